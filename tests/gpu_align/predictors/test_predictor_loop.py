"""The loop's side: counts, cuts, and what happens when a predictor fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align.predictors import (
    BackgroundTokenPredictor,
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


@pytest.mark.parametrize("draft", [(1, 2), np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2])])
def test_a_draft_may_be_any_sequence(draft: Any) -> None:
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
    "hangs": (lambda: Calls(threading.Event().wait), TimeoutError, "no answer in 0.05 s"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_predictor_that_fails_is_not_asked_again(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, error, message = BAD[what]
    predictor = make()
    loop = PredictorLoop(predictor, vocab_size=10, timeout=0.05)
    loop.start([1, 2])
    for _ in range(3):
        assert loop.draft() == []
        loop.push([3])
    loop.stop()
    assert message in (loop.failure or "")
    assert getattr(predictor, "asked", 0) <= 1
    assert [record.name for record in caplog.records] == ["gpu_align.predictors"]
    assert "goes on without drafts" in caplog.text
    strict = PredictorLoop(make(), vocab_size=10, timeout=0.05, strict=True)

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


def test_who_runs_on_the_thread_of_the_caller() -> None:
    threads = []
    for timeout in (None, 5.0):
        loop = PredictorLoop(Calls(lambda: threads.append(threading.current_thread()) or []), timeout=timeout)
        loop.start([1])
        loop.draft()
        loop.stop()
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
    threads[1].join(5)
    assert not threads[1].is_alive()


class Counts(BackgroundTokenPredictor):
    """Predicts ever larger numbers, each when `gate` lets it, up to a multiple of ten."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.gate = threading.Semaphore(0)
        self.begun: list[list[int]] = []

    def continue_from(self, tokens: list[int]) -> Iterator[int]:
        self.begun.append(tokens)
        token = tokens[-1]
        while token % 10:
            if not self.gate.acquire(timeout=5):
                raise TimeoutError
            token += 1
            yield token


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def counts() -> Iterator[Counts]:
    with Counts(max_prediction_tokens=4) as predictor:
        predictor.reset([1], PredictorOptions())
        yield predictor


def test_background_returns_what_is_there(counts: Counts) -> None:
    assert counts.predict_tokens() == []  # it has begun, and does not wait
    counts.gate.release(2)
    eventually(lambda: counts.predict_tokens() == [2, 3])
    counts.push_tokens([2])  # came true: the thread goes on behind 3
    assert counts.predict_tokens() == [3]
    counts.gate.release(9)
    eventually(lambda: counts.predict_tokens() == [3, 4, 5, 6])  # never more than 4
    time.sleep(0.02)
    assert counts.predict_tokens() == [3, 4, 5, 6]
    counts.push_tokens([3, 4, 5])
    eventually(lambda: counts.predict_tokens() == [6, 7, 8, 9])
    assert counts.begun == [[1]]


def test_background_discards_what_comes_too_late(counts: Counts) -> None:
    counts.predict_tokens()
    eventually(lambda: counts.begun == [[1]])
    counts.push_tokens([21])  # while the thread is at the token behind 1
    counts.gate.release(3)
    eventually(lambda: len(counts.predict_tokens()) == 2)
    assert counts.predict_tokens() == [22, 23]
    assert counts.begun == [[1], [1, 21]]


def test_background_waits_for_the_fewest_tokens() -> None:
    with Counts(3, 4) as predictor:
        predictor.reset([1], PredictorOptions())
        threading.Timer(0.02, predictor.gate.release, [3]).start()
        assert predictor.predict_tokens() == [2, 3, 4]
        predictor.push_tokens([18])
        predictor.gate.release(3)  # one for the token that the thread was at
        assert predictor.predict_tokens() == [19, 20]  # there will not be more
        predictor.push_tokens([19])
        assert predictor.predict_tokens() == [20]  # nothing new before it is used up
        assert len(predictor.begun) == 2
        predictor.push_tokens([20])
        assert predictor.predict_tokens() == []
        assert len(predictor.begun) == 3
        predictor.push_tokens([21])
        threading.Timer(0.02, predictor.dispose).start()
        with pytest.raises(DisposedError):
            predictor.predict_tokens()  # dispose ends the wait
        predictor.gate.release(9)


def test_stop_and_dispose_in_the_background(counts: Counts) -> None:
    counts.predict_tokens()
    counts.gate.release(2)
    eventually(lambda: counts.predict_tokens() == [2, 3])
    counts.stop(until_predictions_exhausted=True)
    counts.gate.release(4)
    assert counts.predict_tokens() == [2, 3]
    counts.push_tokens([2, 3])
    eventually(lambda: len(counts.predict_tokens()) > 0)
    assert counts.predict_tokens()[0] == 4
    thread = counts._thread
    counts.dispose()
    counts.gate.release(9)
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(DisposedError):
        counts.predict_tokens()


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_prediction_is_raised_by_the_next_call(background: bool) -> None:
    class Fails(BackgroundTokenPredictor):
        def continue_from(self, tokens: list[int]) -> Iterator[int]:
            raise KeyError("x")

    with Fails(1, 4, background) as predictor:
        predictor.reset([1], PredictorOptions())
        with pytest.raises(KeyError):
            predictor.predict_tokens()
        predictor.push_tokens([2])  # another state
        with pytest.raises(KeyError):
            predictor.predict_tokens()


def test_in_the_foreground_drafts_do_not_depend_on_timing() -> None:
    with Counts(0, 4, background=False) as predictor:
        predictor.gate.release(99)
        predictor.reset([1], PredictorOptions())
        assert predictor.predict_tokens() == [2, 3, 4, 5]
        predictor.push_tokens([2, 3, 9])
        assert predictor.predict_tokens() == [10]
        assert predictor._thread is None
    for arguments in ((-1, 4), (5, 4), (0, 0)):
        with pytest.raises(ValueError, match="prediction_tokens: expected"):
            Counts(*arguments)
