"""A real language model as an instrument: ``python -m benchmarks.real_model [--serve N] [--write]``.

SmolLM2-135M-Instruct answers 51 tasks, once; drafters are replayed on its answers. Answers that end in a loop, and
those that the model does not end, are in no figure.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.real_model import measure, server
from benchmarks.real_model.model import locked, model_folder
from benchmarks.real_model.tasks import tasks
from benchmarks.tables import DOCS, RESULTS, command, fill_file, ratio, read, table, write_json

TEMPERATURES = (0.7, 1.0, 0.0)
Results = dict[str, Any]


def run(options: Any) -> Results:
    """Run the measurements that the options ask for; returns the content of the JSON file."""
    add_to_path()  # suffix decoding, where it is built
    model, asked = model_folder(), tasks()
    end = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    asks = [server.Ask(task.messages, t) for t in TEMPERATURES for task in asked]
    answers = iter(asyncio.run(server.record(model, asks)))
    found: Results = {"num_draft_tokens": server.K, "confidence": {}}
    for t in TEMPERATURES:  # the greedy answers are last: their records stay
        by_id = {task.id: next(answers) for task in asked}
        paths = measure.write_records(asked, by_id, model)
        found["confidence"][str(t)] = measure.confidence(paths, end, t)
    found["answers"] = [[t.id, t.half, len(by_id[t.id].output), by_id[t.id].counts] for t in asked]
    found["replays"] = {half: measure.replays(path, end) for half, path in paths.items()}
    if options.baseline:
        found["baseline"] = measure.at_commit(options.baseline, paths)
    if options.serve:
        found["served"] = asyncio.run(server.turns(model, asked[:: options.serve]))
    return found


def replays(found: Results) -> str:
    """Tokens a step, and rejected per accepted, of every drafter on each half."""
    halves = {half: dict(counts) for half, counts in found["replays"].items()}
    for half, counts in halves.items():
        if "baseline" in found:
            counts["gpu_align, baseline"] = found["baseline"][half]

    def shown(c: Results) -> str:
        return f"{ratio(c['output_tokens'], c['steps'])}; {ratio(c['rejected'], c['accepted'])}"

    rows = [[name, *(shown(of[name]) for of in halves.values())] for name in next(iter(halves.values()))]
    sizes = [sum(row[1] == half and row[3] for row in found["answers"]) for half in halves]
    heads = [f"{half}: {size} answers" for half, size in zip(halves, sizes, strict=True)]
    return table(["tokens a step; rejected per accepted", *heads], rows)


def served(found: Results) -> str:
    """CPU seconds of the servers' processes over the answers that count."""
    served = [row for row in found.get("served", ()) if row["counts"]]
    rows = []
    for mode in served[0]["cpu_s"] if served else ():
        used, none = (sum(row["cpu_s"][name] for row in served) for name in (mode, "none"))
        by_task = sorted(row["cpu_s"]["none"] / row["cpu_s"][mode] for row in served)
        rows.append([mode, f"{used:.0f} s", f"{none / used:.2f}", f"{by_task[0]:.2f}–{by_task[-1]:.2f}"])
    same = sum(row["identical"] for row in served)
    return table([f"{same} of {len(served)} texts equal", "CPU", "none over it", "by task"], rows)


#: The blocks of docs/published.md by name.
BLOCKS: dict[str, Callable[[Results], str]] = {"model": replays, "served": served}


def main() -> None:
    parser = command("benchmarks.real_model", __doc__)
    parser.add_argument("--baseline", metavar="COMMIT", help="replay the drafter of this commit, too")
    parser.add_argument("--serve", type=int, metavar="N", help="servers in turns, on every Nth task")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/published.md")
    options = parser.parse_args()
    with locked():
        found = {**read("real_model"), **run(options)}
    for block in BLOCKS.values():
        print(f"{block(found)}\n")
    if options.write:
        write_json(RESULTS / "real_model.json", found, depth=4)
        fill_file(DOCS / "published.md", BLOCKS, found)


main()
