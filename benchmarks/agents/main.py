"""What agents write, out of collections that you have cloned: ``python -m benchmarks.agents FOLDER...``.

Known answers are replayed with every drafter, in the form in which they were written and in those of other agents;
no model and no GPU is needed, and no figure depends on time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.agents.forms import WRITE, Exchange, exchanges
from benchmarks.agents.readers import HALVES, Edit, Message, read
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.replays import bound, everywhere, replay_batched
from benchmarks.quality.runs import Counts, Knowledge, Run, policy_of
from gpu_align import Recipes, views
from gpu_align.recipes import learn
from gpu_align.simulate import Record, load_tokenizer, replay, runnable_policy_names
from gpu_align.tools.simulate.policies import OURS, SHIPPED_PACK, tokenized_pack

#: Edits of a collection, where no other number is asked for; of the other half, to learn from.
MOST, EARLIER = 60, 400
Case = dict[str, Any]
TOKENIZER = "tekken"
#: Draft tokens a step.
K = 32
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
    Row("suffix_decoding_vllm"),
    Row("prompt_lookup"),
    Row("prompt_lookup_vllm_v2"),
)
#: Upper bound of drafters that copy from one position after the last token: the best choice at each step.
BOUND = "bound"
BOUNDS = (Row(BOUND), Row(BOUND, views=True))


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
    """The shipped pack behind one of earlier answers, and those answers; a task is a source."""
    packs = {SHIPPED_PACK: tokenized_pack(SHIPPED_PACK, TOKENIZER)}
    if earlier:
        learned = learn((exchange.task, exchange.answer) for exchange in earlier)
        packs = {"learned": learned.tokenize(lambda words: [encode(word) for word in words]), **packs}
    return Knowledge(Recipes.join(packs), [encode(exchange.answer) for exchange in earlier])


def measure(row: Row, records: Sequence[Record], known: Knowledge) -> Counts:
    """Replay them; ours takes the views for a memory, from which nothing is drafted before it has matched."""
    if not row.views:
        records = [record_without(record) for record in records]
    if row.policy == OURS:
        recipes = known.recipes if row.learned else tokenized_pack(SHIPPED_PACK, TOKENIZER)
        return Counts.of(replay_batched(records, K, batch_size=16, recipes=recipes, memory=row.views))
    if row.policy == BOUND:
        return Counts.of(bound(record, K, partial(everywhere, matched=True)) for record in records)
    policy = policy_of(Run(row.policy, K), records, known)
    return Counts.of(replay(policy, record, K) for record in records)


def record_without(record: Record) -> Record:
    """The same and no prediction."""
    return Record(record.id, record.prompt, [], record.output, record.tokenizer)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 1: there is nothing to measure)."""
    parser = tables.command("benchmarks.agents", __doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="a collection, or part of one"
    )
    parser.add_argument("--half", choices=HALVES, default=HALVES[0], help="of each collection (%(default)s)")
    parser.add_argument("--edits", type=int, default=MOST, help="most of a collection (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among them (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the counts there")
    parser.add_argument("--written", choices=WRITE, metavar="FORM", help="measure answers in this form alone")
    parser.add_argument("--bound", action="store_true", help="measure the best choices instead of drafters")
    options = parser.parse_args(argv)
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"FOLDER: no such folder: {folder}")
    if options.edits < 1:
        parser.error(f"--edits: expected at least 1, found {options.edits}")
    if not add_to_path():
        print(
            "note: suffix decoding is not built: python -m benchmarks.quality.build_suffix_peer",
            file=sys.stderr,
        )
    found = read(options.folders, options.half, options.edits, options.seed)
    if not found:
        print("error: no collection that is known in these folders", file=sys.stderr)
        return 1
    [other] = set(HALVES) - {options.half}
    earlier = read(options.folders, other, EARLIER, options.seed)
    runnable = runnable_policy_names()
    rows = BOUNDS if options.bound else [r for r in ROWS if r.policy.removesuffix("_cached") in runnable]
    results = {
        "command": f"python -m benchmarks.agents FOLDER... --half {options.half} --edits {options.edits}",
        "folders": [f"{folder} {_commit(folder)}".strip() for folder in options.folders],
        "half": options.half,
        "seed": options.seed,
        "num_draft_tokens": K,
        "tokenizer": TOKENIZER,
        "capacity": CAPACITY,
        "cases": [
            case
            for name, edits in found.items()
            for case in cases_of(name, edits, earlier.get(name, []), rows, options.written)
        ],
    }
    print(shown(results["cases"]))
    if options.json is not None:
        options.json.write_text(tables.as_json(results, 4), encoding="utf-8")
    return 0


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
        if sys.stderr.isatty():
            print(f"{collection}, {read_as}, {written_as}".ljust(78), end="\r", file=sys.stderr)
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
    names = list(cases[0]["rows"])
    rows = [
        [
            case["collection"],
            case["read"],
            case["written"],
            case["records"],
            *(cell(case, name) for name in names),
        ]
        for case in cases
    ]
    return tables.table(
        ["collection", "read", "written", "records", *names], rows, "lll" + "r" * (len(names) + 1)
    )


def cell(case: Case, name: str) -> str:
    """Tokens a step @ rejected per accepted of one drafter."""
    counts = case["rows"][name]
    speed = tables.ratio(counts["output_tokens"], counts["steps"])
    return f"{speed} @ {tables.ratio(counts['rejected'], counts['accepted'])}"


def _commit(folder: Path) -> str:
    """The first digits of a checkout's commit; empty where there is none."""
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
