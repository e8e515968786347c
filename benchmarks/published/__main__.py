"""Experiments that others published, run again: ``python -m benchmarks.published [--write]``.

OpenAI's service as reverse-engineered (https://vamvas.ch/openai-predicted-outputs) and Cascade's fork of vLLM
(https://cascadetech.ai/blog/vllm-predicted-outputs). Known outputs are replayed, without a model or a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from benchmarks import tables
from benchmarks.quality.runs import Counts
from gpu_align.predictors.base import PredictorOptions, count_accepted
from gpu_align.tools.policies import OpenAI
from gpu_align.tools.simulate.replay import (
    Record,
    load_tokenizer,
    make_policies,
    replay,
)

TEXTS = Path(__file__).parent / "texts"
#: Letters of the short and of the long draft: a to e, and the pairs aa, ab, … bc written out.
SHORT, LONG = 5, 58
#: Where the short and the long draft differ from the output; it follows from the counts.
SHORT_AT, LONG_AT = 3, 22
#: Draft tokens a step in OpenAI's service; the policy's own limit is below the K that it is given.
LOOKAHEAD = 16
#: Matching tokens after which it drafts again: as published, and the threshold that gives all of its counts.
RESUME_AFTER = {"here: a threshold of 35": 35, "here: 32, as published": 32}
#: The token that an edit inserts; no letter has its id.
OTHER = len(ascii_lowercase)
#: OpenAI's tasks: letters to write, what the draft has at a position, and the published counts.
TASKS = (
    ("short, correct", SHORT, "correct", 0, (5, 0)),
    ("short, one token added", SHORT, "added", SHORT_AT, (3, 2)),
    ("short, one token missing", SHORT, "missing", SHORT_AT, (3, 2)),
    ("short, one token replaced", SHORT, "replaced", SHORT_AT, (3, 2)),
    ("long, correct", LONG, "correct", 0, (55, 0)),
    ("long, one token added", LONG, "added", LONG_AT, (21, 11)),
    ("long, one token missing", LONG, "missing", LONG_AT, (22, 11)),
    ("long, one token replaced", LONG, "replaced", LONG_AT, (21, 11)),
)


def letters_of(size: int) -> list[int]:
    """One token a letter: the alphabet of single letters, of a longer text that of pairs: aa, ab, ac, …"""
    pairs = ("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    text = ascii_lowercase if size <= len(ascii_lowercase) else "".join(islice(pairs, size))
    return [ascii_lowercase.index(letter) for letter in text[:size]]


def output_of(letters: Sequence[int], kind: str, at: int) -> list[int]:
    """The output from which the draft `letters` differs so: the draft is the same in all tasks."""
    before, after = list(letters[:at]), list(letters[at:])
    return {
        "correct": before + after,
        "added": before + after[1:],
        "missing": [*before, OTHER, *after],
        "replaced": [*before, OTHER, *after[1:]],
    }[kind]


def usage_of(draft: Sequence[int], output: Sequence[int], resume_after: int = 32) -> tuple[int, int]:
    """Accepted and rejected, the draft verified from the first token on.

    Draft tokens after the last token of the output count as rejected, because they were verified as well.
    """
    policy = OpenAI(resume_after=resume_after)
    policy.reset([], PredictorOptions(4 * LOOKAHEAD, prediction=tuple(draft)))
    done = drafted = accepted = 0
    while done < len(output):
        offered = policy.predict_tokens()
        right = count_accepted(offered, output[done:])
        drafted, accepted = drafted + len(offered), accepted + right
        policy.push_tokens(output[done : done + right + 1])
        done += right + 1
    return accepted, drafted - accepted


def openai() -> dict[str, Any]:
    """The tasks by each threshold; and what is rejected by the position of one replaced token."""
    tasks = []
    for name, size, kind, at, published in TASKS:
        draft = letters_of(size)
        output = output_of(draft, kind, at)
        here = {label: usage_of(draft, output, after) for label, after in RESUME_AFTER.items()}
        task = {"name": name, "size": size, "kind": kind, "at": at, "published": published}
        tasks.append({**task, "here": here})
    letters = letters_of(LONG)
    rejected = [usage_of(letters, output_of(letters, "replaced", at))[1] for at in range(LONG)]
    return {"tasks": tasks, "rejected": rejected}


#: Cascade's: draft tokens a step, as the fork's server was started with; drafters of the table.
K = 32
DRAFTERS = {"openai": "OpenAI's", "static_text": "static text", "gpu_align": "`gpu_align`"}


class Edit(NamedTuple):
    """A prediction, the output, and what was published: drafter → speed-up, share of the output accepted."""

    name: str
    prediction: str
    output: str
    published: dict[str, tuple[float, float]]


def text_of(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def edits() -> list[Edit]:
    """All of them. The published speeds are ratios of tokens a second, with and without the prediction."""
    poem, snake, report = map(text_of, ("poem", "snake", "report"))
    first, _, *rest = poem.split("\n\n")
    verbatim = {"openai": (386.434 / 56.9, 0.9315), "static_text": (1488.944 / 129.843, 0.9667)}
    multiplayer = {"openai": (57.774 / 71.674, 0.2564), "static_text": (178.454 / 121.17, 0.4003)}
    return [
        Edit("poem, middle stanza missing", "\n\n".join([first, *rest]), poem, {}),
        Edit("snake game, verbatim", snake, snake, verbatim),
        Edit("snake game, made multiplayer", snake, text_of("snake_multiplayer"), multiplayer),
        Edit("a name renamed", report, re.sub(r"\bdata\b", "orders", report), {}),
        Edit("a helper extracted", report, text_of("report_helper"), {}),
    ]


def equal_lines(prediction: str, output: str) -> float:
    """The share of the output's lines, empty ones aside, that stand in the prediction as well."""
    lines = list(filter(str.strip, output.splitlines()))
    return float(np.isin(lines, prediction.splitlines()).mean())


def cascade() -> dict[str, Any]:
    """The edits by three drafters."""
    tasks, encode = [], load_tokenizer("tekken").encode
    for edit in edits():
        record = Record("", [], encode(edit.prediction), encode(edit.output), "tekken")
        policies = zip(DRAFTERS, make_policies(list(DRAFTERS), [record], K), strict=True)
        tasks.append({
            "task": edit.name,
            "prediction_tokens": len(record.prediction),
            "output_tokens": len(record.output),
            "equal_lines": round(equal_lines(edit.prediction, edit.output), 4),
            "published": edit.published,
            "here": {name: Counts.of([replay(each, record, K)]).as_json() for name, each in policies},
        })  # fmt: skip
    return {"tasks": tasks}


def letters_table(results: dict[str, Any]) -> str:
    """OpenAI's letters, accepted and rejected, by each threshold."""
    rows, agree = [], dict.fromkeys(RESUME_AFTER, 0)
    for task in results["openai"]["tasks"]:
        cells = []
        for name in RESUME_AFTER:
            same = task["here"][name] == task["published"]
            agree[name] += same
            pair = "/".join(map(str, task["here"][name]))
            cells.append(f"**{pair}**" if same else pair)
        rows.append([task["name"], "/".join(map(str, task["published"])), *cells])
    rows.append(["tasks that agree", "", *(f"{count} of {len(rows)}" for count in agree.values())])
    most = max(results["openai"]["rejected"])
    said = f"One divergence rejects at most {most} tokens at each of the {LONG} positions, as published."
    return f"{tables.table(['accepted/rejected', 'published', *RESUME_AFTER], rows)}\n\n{said}"


def edits_table(results: dict[str, Any]) -> str:
    """Cascade's edits: tokens a step, acceptance and rejections here, with the published speed and acceptance."""
    percent = "{:.1f}\u00a0%".format
    rows = []
    for task in results["cascade"]["tasks"]:
        tokens, cells = task["output_tokens"], []
        for drafter in DRAFTERS:
            run = task["here"][drafter]
            wrong = tables.ratio(run["rejected"], run["accepted"])
            cell = f"{tokens / run['steps']:.2f} ({percent(100 * run['accepted'] / tokens)}; {wrong})"
            if drafter in task["published"]:
                speed, accepted = task["published"][drafter]
                cell += f"; published {speed:.2f}× ({percent(100 * accepted)}: {1 / (1 - accepted):.2f})"
            cells.append(cell)
        same, sizes = percent(100 * task["equal_lines"]), f"{task['prediction_tokens']:,} → {tokens:,}"
        rows.append([f"{task['task']}: {sizes} tokens, {same} of the lines", *cells])
    return tables.table(["task", *DRAFTERS.values()], rows)


#: The blocks of docs/published.md that are made here.
BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {"letters": letters_table, "edits": edits_table}


def main() -> None:
    parser = tables.command("benchmarks.published", __doc__)
    said = "into benchmarks/results and the page"
    parser.add_argument("--write", action="store_true", help=said)
    options = parser.parse_args()
    # Tuples become lists, as in the file.
    results = json.loads(json.dumps({"openai": openai(), "cascade": cascade()}))
    for block in BLOCKS.values():
        print(f"{block(results)}\n")
    if options.write:
        tables.write_json(tables.RESULTS / "published.json", results)
        tables.fill_file(tables.DOCS / "published.md", BLOCKS, results)


main()
