"""An explanation is of the very draft that the drafter makes."""

from __future__ import annotations

import random

import pytest

from gpu_align import DrafterConfig
from gpu_align.drafter.explain import Explainer
from gpu_align.ops.layout import FIRST_GAP
from gpu_align.texts.several import joined
from tests.gpu_align.engine import Engine, edited
from tests.gpu_align.step_batch import standing_of

K, WIDTH, VOCABULARY = 8, 300, 50
SOURCES = {1: "prediction", 2: "context"}


@pytest.mark.parametrize("config", [None, DrafterConfig(use_context=False, min_survival_lost=0, min_match=2)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(6))
def test_it_tells_the_source_and_the_place_of_what_the_drafter_drafts(
    seed: int, temperature: float, config: DrafterConfig | None
) -> None:
    """With a temperature of two texts, which are samples then."""
    draw = random.Random(seed)
    alphabet = 4 if seed % 2 else 40  # many repetitions, or few
    prompt = [draw.randrange(alphabet) for _ in range(20)]
    prediction = [draw.randrange(alphabet) for _ in range(60)]
    output = edited(draw, prediction, alphabet, 60)
    engine = Engine("reference", max_slots=1, T=WIDTH, N=64, K=K, vocab=VOCABULARY, config=config)
    if temperature:
        prediction = joined([prediction[:30], prediction[30:]])
    engine.add(0, prediction, prompt, temperature=temperature)
    explainer = Explainer(prediction, len(prompt), K, config, max_context_len=WIDTH, temperature=temperature)
    seen, others = set(), 0
    done = 0
    while done <= len(output):
        tokens = prompt + output[:done]
        [(drafted, length, _, source)] = engine.propose([0])
        explanation = explainer.at(tokens)
        if not length:
            chosen = explanation.chosen
            assert chosen is None or prediction[chosen.position] >= FIRST_GAP  # nothing, or at a gap
        else:
            chosen = explanation.chosen
            assert chosen is not None
            assert chosen.source == SOURCES[source]
            text = prediction if chosen.source == "prediction" else tokens
            # What is not a copy of the place has been edited on the way, and is said to be.
            place = text[chosen.position :]
            if "repeat themselves" in chosen.why:
                assert f"with period {len(place)}" in chosen.why
                place = place * K
            copied = drafted[:length] == place[:length]
            assert copied or "as before" in chosen.why
            assert 0 < chosen.expected <= K
            assert "the beginning of" not in chosen.why or not temperature
            assert chosen not in explanation.others
            others += len(explanation.others)
            seen.add(chosen.why)
        assert 0 <= explanation.cursor <= len(prediction)
        in_sync, cursor, *_ = standing_of(engine.drafter, 0)
        assert explanation.cursor == cursor or not in_sync
        width = draw.randrange(1, 5)
        engine.write(0, output[done : done + width])
        done += width
    assert len(seen) >= 2
    assert others


TEXT, REST = list(range(100, 140)), list(range(20, 30))
#: `1 2 4 3` with a new token for 2 4, three times in the prediction, once and then twice ahead.
AGAIN = [1, 2, 4, 3, *REST, 1, 2, 4, 3, 60, 1, 2, 4, 3, *range(70, 80)]
IN_ALL, IN_TWO = (f"the last {num} tokens occur in the prediction, at the cursor" for num in (11, 2))
SAME = "others that expect the same 8 tokens"


@pytest.mark.parametrize(
    ("prediction", "output", "num", "place", "why"),
    [
        ([], [1, 2, 3, 1, 2, 3, 1, 2], K, ("context", 5, 5),
         "the last 5 tokens occurred before, in the prompt or the output; they repeat themselves with period 3"),
        # Left at 9; one token of what stands 4 ahead: 4 for the match, less 5 for what is skipped with it.
        (TEXT, [*TEXT[:9], TEXT[13]], K, ("prediction", 14, 1),
         "the last token occurs in the prediction, 5 ahead of the cursor; at most 16 worse by the alignment"),
        (AGAIN, [1, 9, 3, *REST], 16, ("prediction", 14, 11), f"{IN_ALL}; 2 edits as before"),
        # Of three samples two go on alike, the third with another token.
        (joined([[1, 2, *TEXT], [1, 2, *TEXT], [1, 2, *REST]]), [1, 2], K, ("prediction", 2, 2),
         f"{IN_TWO}; candidates at least as strong that expect another token: 1; {SAME}: 1"),
    ],
)  # fmt: skip
def test_the_words_for_where_the_output_stands(
    prediction: list[int], output: list[int], num: int, place: tuple[str, int, int], why: str
) -> None:
    chosen = Explainer(prediction, 0, num, max_context_len=WIDTH, temperature=0.7).at(output).chosen
    assert chosen is not None
    assert ((chosen.source, chosen.position, chosen.matched), chosen.why) == (place, why)


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: expected at most 4, as at construction, found 5"):
        Explainer([1], 0, K, max_context_len=4).at([1] * 5)
