"""Cascade's experiments: edits of poems and programs, and speed over the accuracy of the prediction.

Source: https://cascadetech.ai/blog/vllm-predicted-outputs and the fork of vLLM that it describes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.published import texts
from gpu_align.predictors import TokenPredictor
from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.policies import OURS, make_policies
from gpu_align.tools.simulate.replay import PairResult
from gpu_align.tools.simulate.tokenizers import load_tokenizer

TOKENIZER = "tekken"
#: Draft tokens a step, as the fork's server was started with.
K = 32
#: The drafters of the bars. The baseline is a token a step.
SHOWN = ("openai", "static_text", OURS)
#: Made files of the curve, and lines of each.
FILES, LINES = 4, 90
LEVELS = tuple(range(0, 101, 10))
LAYOUTS = {"scattered": False, "block": True}


class Task(NamedTuple):
    """A prediction, the output, and what was published for such a task.

    Attributes:
        name: in tables.
        prediction: text.
        output: text.
        published: drafter → speed-up and share of the output that was accepted.
    """

    name: str
    prediction: str
    output: str
    published: dict[str, tuple[float, float]]


def tasks() -> list[Task]:
    """All of them. The published speeds are ratios of tokens a second, with and without the prediction."""
    poem, snake, report = (texts.read(name) for name in ("poem", "snake", "report"))
    verbatim = {"openai": (386.434 / 56.9, 0.9315), "static_text": (1488.944 / 129.843, 0.9667)}
    multiplayer = {"openai": (57.774 / 71.674, 0.2564), "static_text": (178.454 / 121.17, 0.4003)}
    return [
        Task("poem, middle stanza missing", texts.without_stanza(poem, 1), poem, {}),
        Task("snake game, verbatim", snake, snake, verbatim),
        Task("snake game, made multiplayer", snake, texts.read("snake_multiplayer"), multiplayer),
        Task("a name renamed", report, texts.renamed(report, "data", "orders"), {}),
        Task("a helper extracted", report, texts.read("report_helper"), {}),
    ]


def record_of(name: str, prediction: str, output: str) -> Record:
    """The pair in Tekken's tokens, without a prompt."""
    encode = load_tokenizer(TOKENIZER).encode
    return Record(name, [], encode(prediction), encode(output), TOKENIZER)


def drafters(names: Iterable[str], records: Sequence[Record]) -> dict[str, TokenPredictor]:
    """Each by its name; the lookahead of OpenAI's stays 16."""
    return dict(zip(names, make_policies(list(names), records, K), strict=True))


def run_tasks() -> list[dict[str, Any]]:
    """Steps and counts of each task, and of each of `SHOWN`."""
    all_tasks = tasks()
    records = [record_of(*task[:3]) for task in all_tasks]
    policies = drafters(SHOWN, records)
    return [
        {
            "task": task.name,
            "prediction_tokens": len(record.prediction),
            "output_tokens": len(record.output),
            "equal_lines": round(texts.equal_lines(task.prediction, task.output), 4),
            "published": task.published,
            "here": {name: _counts(replay(policy, record, K)) for name, policy in policies.items()},
        }
        for task, record in zip(all_tasks, records, strict=True)
    ]


def made_records(levels: Sequence[int], files: int) -> dict[str, dict[int, list[Record]]]:
    """Layout → percentage of changed lines → a record a file."""
    found: dict[str, dict[int, list[Record]]] = {layout: {} for layout in LAYOUTS}
    for layout, in_one_block in LAYOUTS.items():
        for level in levels:
            records = []
            for number in range(files):
                lines = texts.made_lines(random.Random(f"file {number}"), LINES)
                rng = random.Random(f"{layout} {level} {number}")
                output = texts.changed(lines, level / 100, in_one_block, rng)
                pair = ("\n".join([*text, ""]) for text in (lines, output))
                records.append(record_of(f"{layout} {level} {number}", *pair))
            found[layout][level] = records
    return found


def run_curve(names: Sequence[str], levels: Sequence[int] = LEVELS, files: int = FILES) -> dict[str, Any]:
    """Steps by the percentage of lines that the prediction has wrong, for every policy."""
    made = made_records(levels, files)
    everything = [record for layout in made.values() for records in layout.values() for record in records]
    policies = drafters(names, everything)
    found: dict[str, Any] = {"files": files, "lines": LINES, "changed": list(levels), "layouts": {}}
    for layout, by_level in made.items():
        runs = {
            name: [_sum(replay(policy, record, K) for record in records) for records in by_level.values()]
            for name, policy in policies.items()
        }
        tokens = [sum(len(record.output) for record in records) for records in by_level.values()]
        found["layouts"][layout] = {"output_tokens": tokens, "runs": runs}
    return found


def measure(names: Sequence[str], quick: bool = False) -> dict[str, Any]:
    """All of Cascade's, the curve for the policies of these names; `quick` with three points of it."""
    curve = run_curve(names, (0, 50, 100), 1) if quick else run_curve(names)
    return {"num_draft_tokens": K, "tasks": run_tasks(), "curve": curve}


def _counts(result: PairResult) -> dict[str, int]:
    return {"steps": result.steps, "accepted": result.accepted, "rejected": result.rejected}


def _sum(results: Iterable[PairResult]) -> dict[str, int]:
    total = {"steps": 0, "accepted": 0, "rejected": 0}
    for result in results:
        for name, count in _counts(result).items():
            total[name] += count
    return total
