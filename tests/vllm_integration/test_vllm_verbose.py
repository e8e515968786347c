"""`GPU_ALIGN_VERBOSE`: a line for each request, or for each step; ids and counts alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from usage_harness import Step, count, message

from vllm_integration.frontend import usage as verbose
from vllm_integration.frontend.usage import Collector
from vllm_integration.wire import request as wire


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    level = verbose.logger.level
    verbose.logger.addHandler(handler)
    verbose.logger.setLevel(logging.INFO)
    verbose._settings.cache_clear()
    yield found
    verbose._settings.cache_clear()
    verbose.logger.setLevel(level)
    verbose.logger.removeHandler(handler)


ENDED = (
    "INFO gpu_align: request a ended: 20 tokens in 4 steps, 5.0 a step; prediction of 30 tokens; "
    "draft tokens accepted of verified: prediction 13 of 16, context 1 of 2"
)
STEPS = [
    "INFO gpu_align: request a step 0: no draft",
    "INFO gpu_align: request a step 1: 16 proposed from prediction, 16 verified, 13 accepted",
    "INFO gpu_align: request a step 2: 4 proposed from prediction, 0 verified, 0 accepted",
    "INFO gpu_align: request a step 3: 2 proposed from context, 2 verified, 1 accepted",
]


@pytest.mark.parametrize(("level", "told"), [("", []), ("0", []), ("1", [ENDED]), ("2", [*STEPS, ENDED])])
def test_what_is_told_at_each_level(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, level: str, told: list[str]
) -> None:
    monkeypatch.setenv("GPU_ALIGN_VERBOSE", level)
    collector = Collector()
    collector.follow("a", wire.Prediction(token_ids=b"\1\0\0\0" * 30))
    steps = [Step(0, 0, 0, 0), Step(1, 16, 16, 13), Step(1, 4, 0, 0), Step(2, 2, 2, 1)]
    # Three of them come with one output.
    for some, kept in ((steps[:3], 18), (steps[3:], 2)):
        count(collector, "a", message(some), kept)
    collector.end("a")
    collector.end("a")
    assert lines == told


def test_an_aborted_request_and_an_id_that_a_client_chose(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ALIGN_VERBOSE", "1")
    collector = Collector()
    collector.follow("a\nERROR b", wire.Prediction(token_ids=b""))
    collector.end("a\nERROR b", aborted=True)
    (line,) = lines
    assert line.startswith(r"INFO gpu_align: request a\nERROR b aborted: 0 tokens in 0 steps, 0.0 a step; ")
    assert line.endswith("prediction of 0 tokens; draft tokens accepted of verified: none verified")
