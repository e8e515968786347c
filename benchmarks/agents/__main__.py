"""Drafts for the answers of agents: ``python -m benchmarks.agents edits FOLDER...`` and ``... announced FOLDER``.

Known answers are replayed; no model and no GPU is needed, and no figure depends on time. ``edits``: those of
collections that you have cloned, as they were written and as tool calls. ``announced``: calls of tools and JSON by
schema, with what the request announces (`announced.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.agents import announced
from benchmarks.agents.announced import TOKENIZER, K
from benchmarks.agents.edits import AS_WRITTEN, HALVES, Answer, read
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.runs import Counts
from gpu_align import TextKind
from gpu_align.texts import views
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import (
    Record,
    load_tokenizer,
    make_policies,
    replay,
    runnable_policy_names,
)

#: Most edits of a collection.
MOST = 60
#: Most tokens of views a request holds; those of the newest messages come first.
CAPACITY = 16_384
#: Drafter, and whether it is given the views.
ROWS = [
    *product((OURS, "suffix_decoding_4_deep", "suffix_decoding_deep"), (False, True)),
    ("prompt_lookup_vllm_v2", False),
]


def record_of(answer: Answer, form: str, encode: Callable[[str], list[int]]) -> Record:
    """The conversation is the prompt. The forms that a server makes of its messages, newest first, are texts from
    which nothing is drafted before the output has matched them."""
    made: list[int] = []
    for message in reversed(answer.messages):
        for view in views.of_message(message.text, form != AS_WRITTEN, message.is_result):
            made += encode(view)
    prompt = encode("".join(f"{message.text}\n\n" for message in answer.messages))
    return Record(
        answer.task, prompt, made[:CAPACITY], encode(answer.forms[form]), TOKENIZER, TextKind.MEMORY
    )


def measure(policy_name: str, has_views: bool, records: Sequence[Record]) -> dict[str, int]:
    """Replay them, with the views or without."""
    if not has_views:
        records = [Record(each.id, each.prompt, [], each.output, each.tokenizer) for each in records]
    [policy] = make_policies([policy_name], records, K)
    return Counts.of(replay(policy, record, K) for record in records).as_json()


def measure_edits(folders: list[Path]) -> dict[str, Any]:
    """Print a row for each form of each collection in these folders, and return their counts."""
    encode = lru_cache(1 << 14)(load_tokenizer(TOKENIZER).encode)
    cases = []
    for collection, answers in read(folders, HALVES[1], MOST).items():
        for form in dict.fromkeys(form for answer in answers for form in answer.forms):
            records = [record_of(answer, form, encode) for answer in answers if form in answer.forms]
            about = {"collection": collection, "read": answers[0].read, "written": form}
            runs = {
                name + ", views" * has_views: measure(name, has_views, records)
                for name, has_views in ROWS
                if name in runnable_policy_names()
            }
            cases.append({**about, "records": len(records), "rows": runs})
            print(*about.values(), *(f"{name} {tables.at(runs[name])}" for name in runs), sep=", ")
    return {"command": "python -m benchmarks.agents edits FOLDER...", "num_draft_tokens": K, "cases": cases}


def main() -> None:
    parser = tables.command("benchmarks.agents", __doc__)
    parser.add_argument("what", choices=("edits", "announced"))
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of collections; bfcl_eval/data"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the counts there")
    options = parser.parse_args()
    if not add_to_path():
        print("no suffix decoding: python -m benchmarks.quality.build_suffix_peer", file=sys.stderr)
    is_edits = options.what == "edits"
    results = measure_edits(options.folders) if is_edits else announced.measure_calls(*options.folders)
    if options.json is not None:
        tables.write_json(options.json, results)


main()
