"""Each predictor: what it drafts and refuses; the loop: its counts and cuts, and a predictor that fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align.ops.layout import FIRST_GAP
from gpu_align.predictors import (
    DisposedError,
    InputLookupTokenPredictor,
    PredictedOutputTokenPredictor,
    PredictorLoop,
    PredictorOptions,
    TokenPredictor,
    VocabularyError,
)
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.replay import Record, follow, replay


class Calls(TokenPredictor):
    """Calls a function for its draft."""

    def __init__(self, function: Callable[[], Any], at_reset: Callable[[], Any] = lambda: None) -> None:
        self.function, self.at_reset, self.asked = function, at_reset, 0

    def reset(self, state_tokens: Any, options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        self.at_reset()

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        self.asked += 1
        tokens: list[int] = self.function()
        return tokens


def record(rng: random.Random, vocab: int = 9) -> Record:
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
    prediction = [rng.randrange(vocab) for _ in range(rng.randrange(30))]
    output = list(prediction) or [1]
    for _ in range(3):
        output[rng.randrange(len(output))] = rng.randrange(vocab)
    return Record("r", prompt=prompt, prediction=prediction, output=output)


def counts(predictor: TokenPredictor, *arguments: Any) -> tuple[int, int, int]:
    found = replay(predictor, *arguments)
    return found.steps, found.accepted, found.rejected


def test_predicted_output_drafts_what_the_drafter_drafts() -> None:
    rng = random.Random(1)
    shared = PredictedOutputTokenPredictor()  # one for all: it grows and is reset
    for _ in range(12):
        given = record(rng)
        policy = our_drafter([given])
        for in_prefill in (False, True):
            theirs = counts(policy, given, 8, in_prefill)
            own = PredictedOutputTokenPredictor(given.prediction)
            for predictor in (shared, own):
                assert counts(predictor, given, 8, in_prefill) == theirs


def test_predicted_output_grows_beyond_what_it_was_made_for() -> None:
    prediction = [i % 97 for i in range(3000)]
    loop = PredictorLoop(PredictedOutputTokenPredictor(prediction), num_draft_tokens=32, vocab_size=97)
    loop.start([1, 2, 3])
    assert all(step.accepted == len(step.draft) for step in follow(loop, prediction))
    assert loop.predictions.validated > 2800


@pytest.mark.parametrize(
    ("fields", "draft", "is_hot"),
    [
        ({}, [1, 2, 3, 4], False), ({"eos_token_id": None, "temperature": None}, [1, 2, 3, 4], False),
        ({"eos_token_id": 2, "temperature": 1.0}, [1, 2], False),  # greedy
        ({"eos_token_id": [9, 3], "do_sample": True, "temperature": 1.0}, [1, 2, 3], True),
        ({"eos_token_id": torch.tensor([1, -1]), "do_sample": True, "temperature": 0.7}, [1], False),
    ],
)  # fmt: skip
def test_predicted_output_reads_what_ends_a_sequence_and_its_temperature(
    fields: dict[str, Any], draft: list[int], is_hot: bool
) -> None:
    told, untold = (PredictedOutputTokenPredictor([1, 2, 3, 4]) for _ in range(2))
    told.reset([0], PredictorOptions(sampling=SimpleNamespace(**fields)))
    untold.reset([0], PredictorOptions())
    assert (told.predict_tokens(), untold.predict_tokens()) == (draft, [1, 2, 3, 4])
    assert (told.confidence != untold.confidence[: len(draft)]) == is_hot


def test_predicted_output_takes_text_and_refuses_the_rest() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) - 97 for letter in text]

    for made, options in (
        (PredictedOutputTokenPredictor("abc", tokenizer=Letters()), PredictorOptions()),
        (PredictedOutputTokenPredictor("abc"), PredictorOptions(tokenizer=Letters())),
        (PredictedOutputTokenPredictor(), PredictorOptions(prediction=(0, 1, 2))),
    ):
        made.reset([9], options)
        assert made.predict_tokens() == [0, 1, 2]
    with pytest.raises(ValueError, match="a tokenizer for the text"):
        PredictedOutputTokenPredictor("abc").reset([9], PredictorOptions())
    with pytest.raises(ValueError, match=r"prediction\[1\]: expected 0 <= id < 3, found 3"):
        PredictedOutputTokenPredictor([1, 3]).reset([0], PredictorOptions(vocab_size=3))
    with pytest.raises(RuntimeError, match=r"reset\(\) must be called"):
        PredictedOutputTokenPredictor([1]).predict_tokens()
    with pytest.raises(RuntimeError, match=r"reset\(\) must be called"):
        PredictedOutputTokenPredictor([1]).push_tokens([1])


MAKE = {
    "input_lookup": InputLookupTokenPredictor,
    "predicted_output": lambda: PredictedOutputTokenPredictor([1, 2, 3]),
    "own": lambda: Calls(lambda: [1]),
}


@pytest.mark.parametrize("what", MAKE)
def test_after_dispose_errors_are_clear(what: str) -> None:
    with MAKE[what]() as predictor:
        predictor.update_input_tokens([1, 2, 3])
        predictor.reset([1, 2], PredictorOptions(num_draft_tokens=4))
        predictor.push_tokens([3])
        predictor.predict_tokens()
    calls = [
        lambda: predictor.reset([1], PredictorOptions()),
        lambda: predictor.update_input_tokens([1]),
        lambda: predictor.push_tokens([1]),
        lambda: predictor.predict_tokens(),
    ]
    for call in calls:
        with pytest.raises(DisposedError, match=f"{type(predictor).__name__}: disposed; make a new one"):
            call()
    predictor.stop()
    predictor.dispose()


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
    "a bool": (lambda: Calls(lambda: [1, True]), TypeError, "draft: expected token ids, found bool"),
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
