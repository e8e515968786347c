"""Each predictor: what it drafts, and what it refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_align.predictors import (
    DisposedError,
    InputLookupTokenPredictor,
    PredictedOutputTokenPredictor,
    PredictorLoop,
    PredictorOptions,
    TokenPredictor,
)
from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.replay import follow


class Says(TokenPredictor):
    """Drafts the same tokens always."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        return self.tokens


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
    "own": lambda: Says(1),
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
