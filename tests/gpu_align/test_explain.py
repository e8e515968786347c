"""An explanation is of the very draft that the drafter makes."""

from __future__ import annotations

import random

import pytest
import torch

from gpu_align import Drafter
from gpu_align.explain import Explainer

K, WIDTH, VOCABULARY = 8, 300, 50
SOURCES = {1: "prediction", 2: "context"}


@pytest.mark.parametrize("seed", range(6))
def test_it_tells_the_source_and_the_place_of_what_the_drafter_drafts(seed: int) -> None:
    draw = random.Random(seed)
    alphabet = 4 if seed % 2 else 40  # many repetitions, or few
    prompt = [draw.randrange(alphabet) for _ in range(20)]
    prediction = [draw.randrange(alphabet) for _ in range(60)]
    output: list[int] = []
    for token in prediction:
        kind = draw.randrange(8)
        output += [] if kind == 0 else [draw.randrange(alphabet)] if kind == 1 else [token]
        output += [draw.randrange(alphabet)] * (kind == 2)
    drafter = Drafter(
        max_slots=1, max_context_len=WIDTH, max_prediction_len=64, num_draft_tokens=K,
        vocab_size=VOCABULARY, device="cpu",
    )  # fmt: skip
    drafter.add(0, prediction=prediction, prompt_len=len(prompt))
    explainer = Explainer(prediction, len(prompt), K)
    ids = torch.zeros((1, WIDTH), dtype=torch.int32)
    seen = set()
    done = 0
    while done <= len(output):
        tokens = prompt + output[:done]
        ids[0, : len(tokens)] = torch.tensor(tokens)
        draft = drafter.propose(
            ids,
            torch.tensor([len(tokens)], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.ones(1, dtype=torch.int32),
        )
        length = int(draft.length)
        explanation = explainer.at(tokens)
        if not length:
            assert explanation.chosen is None
        else:
            chosen = explanation.chosen
            assert chosen is not None
            assert chosen.source == SOURCES[int(draft.source)]
            text = prediction if chosen.source == "prediction" else tokens
            assert draft.token_ids[0, :length].tolist() == text[chosen.position : chosen.position + length]
            assert 0 < chosen.expected <= K
            assert chosen.why
            seen.add(chosen.why)
        assert 0 <= explanation.cursor <= len(prediction)
        done += draw.randrange(1, 5)
    assert len(seen) >= 2


def test_without_a_prediction_it_explains_what_comes_from_the_context() -> None:
    explanation = Explainer([], 6, K).at([1, 2, 3, 1, 2, 3, 1, 2])
    assert explanation.cursor == 0
    assert explanation.chosen is not None
    assert (explanation.chosen.source, explanation.chosen.position) == ("context", 5)
    assert "the last 5 tokens occurred before" in explanation.chosen.why
