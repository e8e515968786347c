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

from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.real_model import measure, page, published, server
from benchmarks.real_model.model import ModelError, locked, model_folder
from benchmarks.real_model.tasks import tasks
from benchmarks.tables import as_json, command, fill_file, read
from gpu_align.tools.bench.client import BenchError

TEMPERATURES = (0.7, 1.0, 0.0)


def run(options: Any) -> dict[str, Any]:
    """Run the measurements that the options ask for; returns the content of the JSON file."""
    add_to_path()  # suffix decoding, where it is built
    model, asked = model_folder(), tasks()
    end = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    asks = [server.Ask(task.messages, t) for t in TEMPERATURES for task in asked]
    answers = iter(asyncio.run(server.record(model, asks)))
    found: dict[str, Any] = {"num_draft_tokens": server.K, "confidence": {}}
    for t in TEMPERATURES:  # the greedy answers are last: their records stay
        by_id = {task.id: next(answers) for task in asked}
        paths = measure.write_records(asked, by_id, model, options.half)
        found["confidence"][str(t)] = measure.confidence(paths, end, t)
    found["answers"] = [[t.id, t.half, len(by_id[t.id].output), by_id[t.id].counts] for t in asked]
    found["replays"] = {half: measure.replays(path, end) for half, path in paths.items()}
    if options.baseline:
        found["baseline"] = measure.at_commit(options.baseline, paths)
    if options.serve:
        found["served"] = asyncio.run(server.turns(model, asked[:: options.serve]))
    if options.published:
        found["published"] = published.measure(model, asked, by_id)
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 1: something could not be had or written)."""
    parser = command("benchmarks.real_model", __doc__)
    halves = {"nargs": "+", "choices": measure.HALVES, "default": measure.HALVES}
    parser.add_argument("--half", **halves, help="seen: settings are chosen there; unseen")  # type: ignore[arg-type]
    parser.add_argument("--baseline", metavar="COMMIT", help="replay the drafter of this commit, too")
    parser.add_argument("--serve", type=int, metavar="N", help="servers in turns, on every Nth task")
    parser.add_argument("--published", action="store_true", help="what others published, with this model")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/published.md")
    options = parser.parse_args(argv)
    try:
        with locked():
            found = run(options)
            if page.RESULTS.exists():
                found = {**read(page.NAME), **found}
            for block in page.BLOCKS.values():
                print(f"{block(found)}\n")
            if options.json is not None:
                options.json.write_text(as_json(found, 4), encoding="utf-8")
            if options.write:
                page.RESULTS.write_text(as_json(found, 4), encoding="utf-8")
                fill_file(page.PAGE, page.BLOCKS, found)
    except (ModelError, BenchError, httpx.HTTPError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
