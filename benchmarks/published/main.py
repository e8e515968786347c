"""The published experiments, run again: ``python -m benchmarks.published [--json OUT] [--write]``.

Prints what was published beside what comes out here: OpenAI's service as reverse-engineered, Cascade's edits, and
node-llama-cpp's input lookup. Known outputs are replayed; no model and no GPU is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.published import edits, letters, lookup, page, pictures
from benchmarks.quality.build_suffix_peer import add_to_path
from gpu_align.tools.simulate.policies import runnable_policy_names


def measure(quick: bool = False) -> dict[str, Any]:
    """All experiments, as the JSON file has them."""
    policies = edits.SHOWN if quick else runnable_policy_names()
    found = {
        "openai": letters.measure(quick),
        "cascade": edits.measure(policies, quick),
        "node_llama_cpp": lookup.measure(),
    }
    # Tuples become lists, as in the file.
    results: dict[str, Any] = json.loads(json.dumps(found))
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 1: something could not be had or written)."""
    parser = tables.command("benchmarks.published", __doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    said = "into benchmarks/results, the pages and their pictures"
    parser.add_argument("--write", action="store_true", help=said)
    parser.add_argument("--quick", action="store_true", help="a coarse grid, three policies, a short curve")
    options = parser.parse_args(argv)
    if options.write and options.quick:
        parser.error("--write: the pages have the whole experiments, expected no --quick")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {options.json.parent}")
    if not add_to_path() and not options.quick:
        missing = "suffix decoding is not built: python -m benchmarks.quality.build_suffix_peer"
        if options.write:
            print(f"error: {missing}", file=sys.stderr)
            return 1
        print(f"note: {missing}", file=sys.stderr)
    results = measure(options.quick)
    for block in page.BLOCKS.values():
        print(f"{block(results)}\n")
    try:
        if options.json is not None:
            options.json.write_text(tables.as_json(results), encoding="utf-8")
        if options.write:
            page.RESULTS.write_text(tables.as_json(results), encoding="utf-8")
            tables.fill_file(page.PAGE, page.BLOCKS, results)
            pictures.draw_all(results)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
