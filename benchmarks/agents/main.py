"""Drafts for the answers of agents: ``python -m benchmarks.agents edits FOLDER...`` and ``... announced``.

Known answers are replayed; no model and no GPU is needed, and no figure depends on time. ``edits``: those of
collections that you have cloned, as they were written and in the forms of other agents. ``announced``: calls of
tools and JSON by schema, with what the request announces (`announced.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.agents import announced
from benchmarks.agents.edits import HALVES, WRITE, Edit, Exchange, Message, exchanges, read
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.replays import replay_batched
from benchmarks.quality.runs import Counts, Knowledge, Run, policy_of
from gpu_align import Recipes, views
from gpu_align.recipes import learn
from gpu_align.simulate import Record, load_tokenizer, replay, runnable_policy_names
from gpu_align.tools.simulate.policies import OURS, SHIPPED_PACK, tokenized_pack

#: Edits of a collection, where no other number is asked for; of the other half, to learn from.
MOST, EARLIER = 60, 400
Case = dict[str, Any]
TOKENIZER, K = announced.TOKENIZER, announced.K
#: Most tokens of views a request holds; those of the newest messages come first.
CAPACITY = 16_384


class Row(NamedTuple):
    """A drafter, and whether it is given the views, and a pack learned from the other half's answers."""

    policy: str
    views: bool = False
    learned: bool = False

    @property
    def name(self) -> str:
        return self.policy + ", views" * self.views + ", learned" * self.learned


ROWS = (
    Row(OURS),
    Row(OURS, views=True),
    Row(OURS, views=True, learned=True),
    Row("suffix_decoding_4_deep"),
    Row("suffix_decoding_4_deep", views=True),
    Row("suffix_decoding_4_deep_cached", views=True),
    Row("suffix_decoding_deep"),
    Row("suffix_decoding_deep", views=True),
    Row("prompt_lookup_vllm_v2"),
)


def records_of(exchanges: Sequence[Exchange], encode: Callable[[str], list[int]]) -> list[Record]:
    """The conversation is the prompt, its views the prediction: `measure` says who gets them."""
    found = []
    for number, exchange in enumerate(exchanges):
        made = viewed(exchange.messages, exchange.tools, encode)
        asked = "".join(f"{message.text}\n\n" for message in exchange.messages)
        prompt, output = (encode(text) for text in (asked, exchange.answer))
        found.append(Record(str(number), prompt, made, output, TOKENIZER))
    return found


def viewed(messages: Iterable[Message], tools: bool, encode: Callable[[str], list[int]]) -> list[int]:
    """The forms that a server makes of all messages, newest first, as far as there is room."""
    found: list[int] = []
    for message in reversed(tuple(messages)):
        for view in views.of_message(message.text, tools, message.is_result):
            found += encode(view)
            if len(found) >= CAPACITY:
                return found[:CAPACITY]
    return found


def knowledge(earlier: Sequence[Exchange], encode: Callable[[str], list[int]]) -> Knowledge:
    """The shipped pack after one of earlier answers, and those answers; a task is a source."""
    packs = {SHIPPED_PACK: tokenized_pack(SHIPPED_PACK, TOKENIZER)}
    if earlier:
        learned = learn((exchange.task, exchange.answer) for exchange in earlier)
        packs = {"learned": learned.tokenize(lambda words: [encode(word) for word in words]), **packs}
    return Knowledge(Recipes.join(packs), [encode(exchange.answer) for exchange in earlier])


def measure(row: Row, records: Sequence[Record], known: Knowledge) -> Counts:
    """Replay them; ours takes the views for a memory, from which nothing is drafted before it has matched."""
    if not row.views:
        records = [Record(each.id, each.prompt, [], each.output, each.tokenizer) for each in records]
    if row.policy == OURS:
        recipes = known.recipes if row.learned else tokenized_pack(SHIPPED_PACK, TOKENIZER)
        return Counts.of(replay_batched(records, K, batch_size=16, recipes=recipes, memory=row.views))
    policy = policy_of(Run(row.policy, K), records, known)
    return Counts.of(replay(policy, record, K) for record in records)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 1: there is nothing to measure)."""
    parser = tables.command("benchmarks.agents", __doc__)
    parsers = parser.add_subparsers(required=True)
    edits, calls = (parsers.add_parser(name) for name in ("edits", "announced"))
    edits.set_defaults(run=measure_edits)
    edits.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a collection, or part of one")
    edits.add_argument("--half", choices=HALVES, default=HALVES[0], help="of each collection (%(default)s)")
    edits.add_argument("--edits", type=int, default=MOST, help="most of a collection (%(default)s)")
    edits.add_argument("--seed", type=int, default=0, help="of the choice among them (%(default)s)")
    edits.add_argument("--written", choices=WRITE, metavar="FORM", help="measure answers in this form alone")
    calls.set_defaults(run=announced.measure_sets)
    announced.add_arguments(calls)
    for each in (edits, calls):
        each.add_argument("--json", type=Path, metavar="OUT", help="write the counts there")
    options = parser.parse_args(argv)
    if not add_to_path():
        print(
            "note: suffix decoding is not built: python -m benchmarks.quality.build_suffix_peer",
            file=sys.stderr,
        )
    results: dict[str, Any] | None = options.run(options)
    if results is None:
        return 1
    if options.json is not None:
        options.json.write_text(tables.as_json(results, 4), encoding="utf-8")
    return 0


def measure_edits(options: argparse.Namespace) -> dict[str, Any] | None:
    """Print a table of the collections in these folders, and return their counts; None without a collection."""
    found = read(options.folders, options.half, options.edits, options.seed)
    if not found:
        print("error: no collection that is known in these folders", file=sys.stderr)
        return None
    [other] = set(HALVES) - {options.half}
    earlier = read(options.folders, other, EARLIER, options.seed)
    rows = [row for row in ROWS if row.policy.removesuffix("_cached") in runnable_policy_names()]
    cases = [
        case
        for name, edits in found.items()
        for case in cases_of(name, edits, earlier.get(name, []), rows, options.written)
    ]
    print(shown(cases))
    half_and_edits = f"--half {options.half} --edits {options.edits}"
    return {
        "command": f"python -m benchmarks.agents edits FOLDER... {half_and_edits}",
        "folders": [f"{folder} {_commit(folder)}".strip() for folder in options.folders],
        "half": options.half,
        "seed": options.seed,
        "num_draft_tokens": K,
        "tokenizer": TOKENIZER,
        "capacity": CAPACITY,
        "cases": cases,
    }


def cases_of(
    collection: str, edits: list[Edit], earlier: list[Edit], rows: Sequence[Row], written: str | None = None
) -> list[Case]:
    """How the file was read and the change written, and what each row counted; every form, or one.

    earlier: of other tasks, whose answers in the same form are known beforehand to the rows that learn.
    """
    encode = lru_cache(1 << 14)(load_tokenizer(TOKENIZER).encode)
    forms, before = by_form(edits, written), by_form(earlier, written)
    cases = []
    for (read_as, written_as), group in forms.items():
        records = records_of(group, encode)
        known = knowledge(before.get((read_as, written_as), []), encode)
        runs = {row.name: measure(row, records, known).as_json() for row in rows}
        about = {"collection": collection, "read": read_as, "written": written_as, "records": len(records)}
        cases.append({**about, "rows": runs})
    return cases


def by_form(edits: list[Edit], written: str | None) -> dict[tuple[str, str], list[Exchange]]:
    """How the file was read and the change written → those edits; every form, or one."""
    forms: dict[tuple[str, str], list[Exchange]] = {}
    for edit in edits:
        for form, exchange in exchanges(edit).items():
            if written in (None, form[1]):
                forms.setdefault(form, []).append(exchange)
    return forms


def shown(cases: list[Case]) -> str:
    """Tokens a step @ rejected per accepted: a row a form, a column a drafter."""
    names, about = list(cases[0]["rows"]), ("collection", "read", "written", "records")
    rows = [[*map(case.get, about), *(cell(case["rows"][name]) for name in names)] for case in cases]
    return tables.table([*about, *names], rows, "lll" + "r" * (len(names) + 1))


def cell(counts: dict[str, Any]) -> str:
    """Tokens a step @ rejected per accepted of one drafter."""
    speed = tables.ratio(counts["output_tokens"], counts["steps"])
    return f"{speed} @ {tables.ratio(counts['rejected'], counts['accepted'])}"


def _commit(folder: Path) -> str:
    """The first digits of a checkout's commit; empty where there is none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
