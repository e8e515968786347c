"""Puts measured numbers into README.md and docs/numbers.md, so that nobody types one.

::

    gpu-align simulate CORPUS --json OUT.json
    python docs/_scripts/fill_numbers.py OUT.json

keeps the integers of OUT.json in docs/quality.json and rewrites the block between the two markers of each
page from them. Without an argument it rewrites the blocks from docs/quality.json as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
NUMBERS = DOCS / "quality.json"
PAGES = (DOCS.parent / "README.md", DOCS / "numbers.md")
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"

#: What the rows of the table are; a policy that is not named here has no remark.
REMARKS = {
    "gpu_align": "this library, default settings",
    "prompt_lookup": "n-gram of 2–5 tokens, latest match",
    "prompt_lookup_vllm": "n-gram as vLLM's V1 runner looks it up",
    "prompt_lookup_vllm_v2": "n-gram as vLLM's V2 runner looks it up",
    "prompt_lookup_transformers": "prompt lookup as in transformers",
    "myers": "streaming Myers diff of tokens",
    "static_text": "cursor, and LCS of lines at completed lines",
    "openai": "as reverse-engineered: resumes after 32 equal tokens",
    "input_lookup_node_llama_cpp": "input lookup as in node-llama-cpp",
    "cursor": "stops at the first mismatch",
}
COUNTS = ("output_tokens", "steps", "accepted", "rejected")


def condense(simulation: dict[str, Any]) -> dict[str, Any]:
    """The integers of a ``gpu-align simulate --json`` file; ratios are computed when they are shown."""
    policies = simulation["policies"]
    return {
        "num_draft_tokens": simulation["num_draft_tokens"],
        "records": max(len(counts["pairs"]) for counts in policies.values()),
        "policies": {name: {key: counts[key] for key in COUNTS} for name, counts in policies.items()},
    }


def table(numbers: dict[str, Any]) -> str:
    """The block between the markers, as Markdown."""
    policies = numbers["policies"]
    names = sorted(policies, key=lambda name: policies[name]["steps"])
    tokens = next(iter(policies.values()))["output_tokens"]
    rows = ["| policy | tokens a step | rejected per accepted | |", "|---|--:|--:|---|"]
    for name in names:
        counts = policies[name]
        per_step = f"{counts['output_tokens'] / counts['steps']:.2f}"
        per_accepted = f"{counts['rejected'] / counts['accepted']:.2f}" if counts["accepted"] else "–"
        strong = "**" if name == "gpu_align" else ""
        rows.append(
            f"| `{name}` | {strong}{per_step}{strong} | {strong}{per_accepted}{strong} "
            f"| {REMARKS.get(name, '')} |"
        )
    note = (
        f"{numbers['records']} outputs, {tokens:,} tokens, at most {numbers['num_draft_tokens']} drafts a "
        "step, the prefill counted as a step without drafts."
    )
    return "\n".join([*rows, "", note])


def fill(page: str, block: str) -> str:
    """`page` with `block` between its markers.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before + after:
        raise ValueError(f"page: expected {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main(arguments: list[str]) -> None:
    if arguments:
        numbers = condense(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), table(numbers)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
