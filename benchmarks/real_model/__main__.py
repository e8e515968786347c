"""A real language model as an instrument: ``python -m benchmarks.real_model [--serve N] [--published] [--write]``.

SmolLM2-135M-Instruct answers 51 tasks, once; drafters are replayed on its answers. Answers that end in a loop, and
those that the model does not end, are in no figure.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from benchmarks import tables
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.real_model import measure
from benchmarks.real_model.answers import Ask, K, record, tasks, turns
from benchmarks.real_model.model import ModelError, locked, model_folder
from benchmarks.tables import table
from gpu_align.tools.bench.client import BenchError

TEMPERATURES = (0.7, 1.0, 0.0)
Results = dict[str, Any]


def run(options: Any) -> Results:
    """Run the measurements that the options ask for; returns the content of the JSON file."""
    add_to_path()  # suffix decoding, where it is built
    model, asked = model_folder(), tasks()
    end = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    answers = iter(record(model, [Ask(task.messages, t) for t in TEMPERATURES for task in asked]))
    found: Results = {"num_draft_tokens": K, "confidence": {}}
    for t in TEMPERATURES:  # the greedy answers are last: their records stay
        answered = [(task, next(answers)) for task in asked]
        paths = measure.write_records(answered, model, options.half)
        found["confidence"][str(t)] = measure.confidence(paths.values(), end, t)
    found["answers"] = [[task.id, task.half, len(each.output), each.counts] for task, each in answered]
    found["replays"] = {half: measure.replays(path, end) for half, path in paths.items()}
    if options.baseline:
        found["baseline"] = {half: measure.at_commit(options.baseline, path) for half, path in paths.items()}
    if options.serve:
        found["served"] = asyncio.run(turns(model, asked[:: options.serve]))
    if options.published:
        found["published"] = measure.published(model, answered)
    return found


def replays(found: Results) -> str:
    """Tokens a step, and rejected per accepted, of every drafter on each half."""
    columns, heads = [], ["tokens a step; rejected per accepted"]
    for half, counts in found["replays"].items():
        counts = {**counts, "gpu_align, baseline": found["baseline"][half]}
        columns.append({name: tables.at(each).replace(" @", ";") for name, each in counts.items()})
        heads.append(f"{half}: {sum(row[1] == half and row[3] for row in found['answers'])} answers")
    return table(heads, [[name, *(column[name] for column in columns)] for name in columns[0]])


def served(found: Results) -> str:
    """CPU seconds of the servers' processes over the answers that count."""
    each, rows = [row["cpu_s"] for row in found["served"] if row["counts"]], []
    for mode in each[0]:
        used, none = (sum(seconds[name] for seconds in each) for name in (mode, "none"))
        by_task = sorted(seconds["none"] / seconds[mode] for seconds in each)
        rows.append([mode, f"{used:.0f} s", f"{none / used:.2f}", f"{by_task[0]:.2f}–{by_task[-1]:.2f}"])
    same = sum(row["identical"] for row in found["served"] if row["counts"])
    return table([f"{same} of {len(each)} texts equal", "CPU", "none over it", "by task"], rows)


def node(found: Results) -> str:
    """node-llama-cpp: validated and refuted by the release and by its guide's rule, its text, CPU seconds."""
    rows = []
    for task, run in found["published"]["node_llama_cpp"].items():
        for rule in ("example", "defaults"):
            pairs = [" / ".join(map(str, run[rule][which])) for which in ("release", "guide")]
            seconds = [f"{run['cpu_s'][which]:.1f} s" for which in (rule, "none")]
            text = "equal" if run[rule]["identical"] else "another"
            rows.append([f"{task}, {run['tokens']} tokens, {rule}", *pairs, text, *seconds])
    return table(["validated / refuted", "release", "guide's rule", "text", "CPU", "without"], rows)


def teacher(found: Results) -> str:
    """Packs of the model's samples: share drafted, share of it right, tokens a step without and with the pack."""
    rows = []
    for task, run in found["published"]["recipes"].items():
        alone, both = (f"{run['tokens'] / run[steps]:.2f}" for steps in ("steps_context", "steps_both"))
        right = f"{run['accuracy']:.1%}" if run["drafted"] else "–"
        rows.append([task, f"{run['coverage']:.0%}", right, alone, both])
    return table(["task", "coverage", "accuracy", "tokens a step: context alone", "with the pack"], rows)


def passes(found: Results) -> str:
    """Forward passes and CPU seconds with the answer as prediction, and of llama-cpp-python."""
    rows = []
    for name, of in (("verbatim", "verbatim"), ("llama_cpp", "llama-cpp-python")):
        for task, runs in found["published"].get(name, {}).items():
            made = [(run, each) for run, each in runs.items() if run != "tokens"]
            cells = [f"{run}: {each['passes']} ({each['cpu_s']:.1f} s)" for run, each in made]
            rows.append([f"{of}: {task}, {runs['tokens']} tokens", ", ".join(cells)])
    return table(["", "passes (CPU)"], rows, "ll")


#: The blocks of the page by name.
BLOCKS = {"model": replays, "served": served, "node": node, "teacher": teacher, "passes": passes}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 1: something could not be had or written)."""
    parser = tables.command("benchmarks.real_model", __doc__)
    halves = measure.HALVES
    parser.add_argument(
        "--half", nargs="+", choices=halves, default=halves, help="seen: for choosing settings"
    )
    parser.add_argument("--baseline", metavar="COMMIT", help="replay the drafter of this commit, too")
    parser.add_argument("--serve", type=int, metavar="N", help="servers in turns, on every Nth task")
    parser.add_argument("--published", action="store_true", help="what others published, with this model")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/published.md")
    options = parser.parse_args(argv)
    try:
        with locked():
            found = {**tables.read("real_model"), **run(options)}
            for block in BLOCKS.values():
                print(f"{block(found)}\n")
            if options.json is not None:
                tables.write_json(options.json, found, 4)
            if options.write:
                tables.write_json(tables.RESULTS / "real_model.json", found, 4)
                tables.fill_file(tables.DOCS / "published.md", BLOCKS, found)
    except (ModelError, BenchError, httpx.HTTPError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
