"""The step log's file: its keys, their order and its layout stay, and what is written can be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gpu_align import Source
from gpu_align.step_log import SOURCES, Step, StepLog, dump, read_step_log

#: A file as the plugin has always written it.
FILE = Path(__file__).with_name("step_log.yaml")

PIECES = {0: "\0", 1: "a", 2: " b", 3: " c", 4: " d", 5: "\n", 6: "é", 7: "x", 8: "?", 9: "!"}


def candidate(source: str) -> dict[str, Any]:
    why = "it continues what was copied: ‘é’"
    return {"source": source, "position": 1, "matched": 4, "expected": 2.5, "why": why}


STEPS = [
    Step(0, 5, "none", [], [], 0, 0, 0, [1], 0, 1, None, 0),
    Step(
        1,
        6,
        "prediction",
        [2, 3, 4],
        [0.9, 0.8125, 0.7],
        12,
        3,
        2,
        [2, 3, 9],
        1,
        3,
        candidate("prediction"),
        2,
    ),
    Step(2, 9, "none", [7], [0.5], 3, 0, 0, [5], 3, 3, candidate("context"), 0),
    Step(3, 10, "recipe", [6, 0], [1.0, 0.25], 1234, 2, 2, [6, 0], 3, 4, candidate("recipe"), 1),
]
LOG = StepLog("chatcmpl-1", 8, prompt_tokens=5, prediction_tokens=4, steps=STEPS)


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def pairs(node: Any) -> Any:
    """A document with its keys in order."""
    if isinstance(node, dict):
        return [(key, pairs(value)) for key, value in node.items()]
    return list(map(pairs, node)) if isinstance(node, list) else node


def test_a_written_file_is_byte_for_byte_the_same() -> None:
    assert dump(LOG.with_texts(decode, [8] * 5)) == FILE.read_text(encoding="utf-8")


def test_a_file_without_texts_lacks_their_keys_and_no_others() -> None:
    whole = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for step in whole["steps"]:
        for name in ("proposed_text", "accepted_text", "own_text"):
            del step[name]
    assert pairs(yaml.safe_load(dump(LOG))) == pairs(whole)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(dump(LOG), encoding="utf-8")
    assert read_step_log(tmp_path / "bare.yaml") == LOG
    assert read_step_log(FILE) == LOG.with_texts(decode, [8] * 5)
    assert read_step_log(FILE).usage() == yaml.safe_load(FILE.read_text(encoding="utf-8"))["usage"]


def test_sources_are_those_of_a_draft() -> None:
    assert [source.name.lower() for source in Source] == list(SOURCES)
