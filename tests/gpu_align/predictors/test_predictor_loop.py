"""The loop's side: counts, cuts, and what happens when a predictor fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align.ops.layout import FIRST_GAP
from gpu_align.predictors import (
    DisposedError,
    PredictorLoop,
    PredictorOptions,
    TokenPredictor,
    VocabularyError,
)


class Calls(TokenPredictor):
    """Calls a function for its draft."""

    def __init__(self, function: Callable[[], Any], at_reset: Callable[[], Any] = lambda: None) -> None:
        self.function, self.at_reset, self.asked = function, at_reset, 0

    def reset(self, state_tokens: Any, options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        self.at_reset()

    def predict_tokens(self) -> list[int]:
        self.asked += 1
        tokens: list[int] = self.function()
        return tokens


def raises(error: Exception) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


def test_the_loop_counts_and_cuts() -> None:
    predictor = Calls(lambda: [1, 2, 3, 4, 5])
    loop = PredictorLoop(predictor, num_draft_tokens=4, vocab_size=10)
    loop.start([9], [8])
    assert predictor.input_tokens == [9, 8]
    assert predictor.options.prediction == (8,)
    assert loop.draft() == [1, 2, 3, 4]
    loop.push([1, 2, 7])
    assert (loop.predictions.validated, loop.predictions.refuted) == (2, 2)
    assert loop.draft(limit=2) == [1, 2]
    loop.push([1, 2, 3])  # all accepted, and one more
    assert (loop.predictions.validated, loop.predictions.refuted) == (4, 2)
    assert loop.draft(limit=0) == []
    loop.push([6])
    assert loop.draft() == [1, 2, 3, 4]
    loop.push([1])  # the output ends within the draft: the rest is neither
    assert (loop.predictions.validated, loop.predictions.refuted) == (5, 2)
    assert predictor.state_tokens == [9, 1, 2, 7, 1, 2, 3, 6, 1]
    loop.stop()
    loop.start([1])
    assert (loop.predictions.validated, predictor.state_tokens) == (0, [1])


@pytest.mark.parametrize(
    "draft", [(1, 2), np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2]), [1, 2, FIRST_GAP, 0]]
)
def test_a_draft_may_be_any_sequence_and_ends_before_a_gap(draft: Any) -> None:
    loop = PredictorLoop(Calls(lambda: draft), strict=True, vocab_size=3)
    loop.start([0])
    found = loop.draft()
    assert found == [1, 2]
    assert all(type(token) is int for token in found)


def disposed() -> Calls:
    predictor = Calls(lambda: [1])
    predictor.dispose()
    return predictor


BAD: dict[str, tuple[Callable[[], TokenPredictor], type[Exception], str]] = {
    "raises": (lambda: Calls(raises(KeyError("x"))), KeyError, "predict_tokens: KeyError: 'x'"),
    "other vocabulary": (
        lambda: Calls(lambda: [1], raises(VocabularyError("not the target's"))),
        VocabularyError,
        "reset: VocabularyError: not the target's",
    ),
    "disposed": (disposed, DisposedError, "reset: DisposedError: Calls: disposed; make a new one"),
    "above": (lambda: Calls(lambda: [1, 10]), ValueError, r"draft[1]: expected 0 <= id < 10, found 10"),
    "below": (lambda: Calls(lambda: [-1]), ValueError, "draft[0]: expected 0 <= id < 10, found -1"),
    "floats": (lambda: Calls(lambda: [1.0]), TypeError, "draft: expected token ids, found float"),
    "none": (lambda: Calls(lambda: None), TypeError, "not iterable"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_predictor_that_fails_is_not_asked_again(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, error, message = BAD[what]
    predictor = make()
    loop = PredictorLoop(predictor, vocab_size=10)
    loop.start([1, 2])
    for _ in range(3):
        assert loop.draft() == []
        loop.push([3])
    loop.stop()
    assert message in (loop.failure or "")
    assert getattr(predictor, "asked", 0) <= 1
    assert [record.name for record in caplog.records] == ["gpu_align.predictors"]
    assert "goes on without drafts" in caplog.text
    strict = PredictorLoop(make(), vocab_size=10, strict=True)

    def run() -> None:
        strict.start([1, 2])
        strict.draft()

    with pytest.raises(error):
        run()


def test_a_predictor_that_failed_is_asked_for_the_next_sequence() -> None:
    answers = iter([[99], [5]])
    loop = PredictorLoop(Calls(lambda: next(answers)), vocab_size=10)
    loop.start([1])
    assert loop.draft() == []
    loop.start([1])
    assert loop.draft() == [5]
