"""Every policy keeps the contract of `Policy`; cursor and openai give the counts they are known for."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import simulate
from gpu_align.policies import (
    POLICIES,
    Cursor,
    InputLookup,
    OpenAI,
    Policy,
    PromptLookup,
    SuffixDecoding,
)
from gpu_align.predictors import DisposedError, PredictorOptions

ALL = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
TOKENS = st.lists(st.integers(0, 5), max_size=40)


@dataclass
class Replay:
    steps: int
    accepted: int
    rejected: int
    drafts: list[list[int]]


def replay(
    policy: Policy,
    prediction: Sequence[int],
    output: Sequence[int],
    num_draft_tokens: int,
    prompt: Sequence[int] = (),
    draft_in_prefill: bool = False,
) -> Replay:
    """The known output plays the model."""
    policy.start(prompt, prediction, num_draft_tokens)
    result = Replay(0, 0, 0, [])
    done = 0
    while done < len(output):
        draft = policy.propose() if result.steps or draft_in_prefill else []
        accepted = 0
        while accepted < len(draft) and list(output[done : done + 1]) == draft[accepted : accepted + 1]:
            accepted += 1
            done += 1
        new = list(output[done - accepted : done + 1])
        done = min(done + 1, len(output))
        policy.extend(new)
        result.steps += 1
        result.accepted += accepted
        result.rejected += len(draft) - accepted
        result.drafts.append(draft)
    return result


def contains(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


@ALL
@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS, prediction=TOKENS, output=TOKENS.filter(bool), k=st.integers(1, 9), prefill=st.booleans()
)
def test_a_draft_is_a_short_slice_of_what_is_known(
    make: Callable[[], Policy],
    prompt: list[int],
    prediction: list[int],
    output: list[int],
    k: int,
    prefill: bool,
) -> None:
    result = replay(make(), prediction, output, k, prompt, prefill)
    for draft in result.drafts:
        assert len(draft) <= k
        assert contains(prompt + prediction + output, draft)
    assert result.accepted + result.steps >= len(output)
    assert result.steps <= len(output)


@ALL
@settings(max_examples=60, deadline=None)
@given(first=TOKENS, prediction=TOKENS, output=TOKENS.filter(bool))
def test_start_forgets_and_propose_repeats(
    make: Callable[[], Policy], first: list[int], prediction: list[int], output: list[int]
) -> None:
    used = make()
    replay(used, first, first or [1], 4)
    assert replay(used, prediction, output, 4) == replay(make(), prediction, output, 4)
    fresh = make()
    fresh.start([], prediction, 4)
    for token in output:
        assert fresh.propose() == fresh.propose()
        fresh.extend([token])


@ALL
def test_a_policy_is_a_predictor(make: Callable[[], Policy]) -> None:
    """`replay` asks it as a predictor, and finds what the loop here finds."""
    rng = random.Random(5)
    prediction = [rng.randrange(9) for _ in range(120)]
    output = [t if rng.random() < 0.9 else rng.randrange(9) for t in prediction if rng.random() < 0.97]
    for prefill in (False, True):
        found = simulate.replay(make(), simulate.Record("", [3, 4], prediction, output), 4, prefill)
        expected = replay(make(), prediction, output, 4, [3, 4], prefill)
        assert (found.steps, found.accepted) == (expected.steps, expected.accepted)
    policy = make()
    policy.reset([3, 4], PredictorOptions(num_draft_tokens=4, prediction=tuple(prediction)))
    policy.push_tokens(output[:5])
    assert policy.state_tokens == [3, 4, *output[:5]]
    policy.dispose()
    with pytest.raises(DisposedError):
        policy.predict_tokens()


@ALL
def test_a_policy_keeps_its_own_copies(make: Callable[[], Policy]) -> None:
    prediction = [1, 2, 3, 4, 1, 2, 3, 5]
    policy = make()
    policy.start([], prediction, 4)
    policy.extend([1, 2])
    before = policy.propose()
    policy.propose().append(99)
    prediction[:] = [7] * 8
    assert policy.propose() == before


def test_names_are_the_keys() -> None:
    assert {name: make().name for name, make in POLICIES.items()} == {name: name for name in POLICIES}


@ALL
def test_bad_input_is_named(make: Callable[[], Policy]) -> None:
    policy = make()
    with pytest.raises(RuntimeError, match="start"):
        policy.propose()
    with pytest.raises(RuntimeError, match="start"):
        policy.extend([1])
    with pytest.raises(ValueError, match="num_draft_tokens: expected an integer >= 1, got 0"):
        policy.start([], [1], 0)
    with pytest.raises(TypeError, match="num_draft_tokens: expected an integer, got float"):
        policy.start([], [1], 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prediction: expected token ids >= 0, got -3 at index 1"):
        policy.start([], [1, -3], 2)
    with pytest.raises(TypeError, match="prompt: expected a sequence of token ids, got str"):
        policy.start("abc", [1], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prediction: .* an element of type float"):
        policy.start([], [1, 0.5], 2)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"prediction: .* got int"):
        policy.start([], 7, 2)  # type: ignore[arg-type]
    policy.start([], [1], 2)
    with pytest.raises(ValueError, match="tokens: expected at least one"):
        policy.extend([])


def test_policies_never_import_torch() -> None:
    code = "import sys; from gpu_align.policies import *; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["cursor", "static_text", "myers"])
@pytest.mark.parametrize("k", [1, 16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100, 1000])
def test_a_perfect_prediction_takes_the_fewest_steps(name: str, k: int, length: int) -> None:
    text = list(range(length))
    result = replay(POLICIES[name](), text, text, k)
    assert result.steps == 1 + -(-(length - 1) // (k + 1))
    assert result.rejected == 0


def test_cursor_stops_for_good_at_the_first_mismatch() -> None:
    prediction = list(range(20))
    result = replay(Cursor(), prediction, [0, 1, 2, 77, *prediction[4:]], 4)
    assert result.drafts[:3] == [[], [1, 2, 3, 4], []]
    assert not any(result.drafts[2:])
    assert (result.accepted, result.rejected) == (2, 2)


def test_cursor_stops_when_the_first_token_is_another() -> None:
    assert not any(replay(Cursor(), [1, 2, 3], [9, 2, 3], 4).drafts)


def test_openai_published_58_token_draft() -> None:
    """A correct draft of 58 tokens: 55 accepted, none rejected, three written by the model beside them."""
    draft = list(range(58))
    policy = OpenAI()
    result = replay(policy, draft, draft, 64, draft_in_prefill=True)
    assert (policy.accepted, policy.rejected) == (55, 0)
    assert len(draft) - policy.accepted == 3
    assert [len(d) for d in result.drafts] == [16, 16, 16, 7]


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, 199), replacement=st.lists(st.integers(500, 900), max_size=60), skip=st.integers(0, 60)
)
def test_openai_one_divergence_rejects_at_most_the_lookahead(
    at: int, replacement: list[int], skip: int
) -> None:
    prediction = list(range(200))
    output = prediction[:at] + replacement + prediction[at + skip :]
    policy = OpenAI()
    result = replay(policy, prediction, output, 64, draft_in_prefill=True)
    assert policy.rejected <= 16
    assert (policy.accepted, policy.rejected) == (result.accepted, result.rejected)


def test_openai_published_unrelated_and_empty_predictions() -> None:
    """Five trials in OpenAI's forum: 3 to 4 of 4 unrelated tokens rejected, 0 to 1 of an empty prediction."""
    for prediction, published in (([1, 2, 3, 4], range(3, 5)), ([], range(2))):
        policy = OpenAI()
        replay(policy, prediction, list(range(100, 250)), 64, draft_in_prefill=True)
        assert policy.accepted == 0
        assert policy.rejected in published
        assert policy.rejected == len(prediction)


def test_openai_counts_what_was_drafted_beyond_the_end_as_rejected() -> None:
    policy = OpenAI()
    replay(policy, list(range(40)), list(range(20)), 64, draft_in_prefill=True)
    # 16 accepted, 1 of the model, then a draft of 16 of which 3 fit.
    assert (policy.accepted, policy.rejected) == (19, 13)


def test_openai_resumes_after_32_matching_tokens() -> None:
    prediction = list(range(100))
    policy = OpenAI()
    policy.start([], prediction, 64)
    policy.extend([0, 1, 2, 777])
    for count, token in enumerate(range(4, 36), start=1):
        assert policy.propose() == [], f"drafts after only {count - 1} matching tokens"
        policy.extend([token])
    assert policy.propose() == list(range(36, 52))


def test_openai_counts_only_tokens_after_the_divergence() -> None:
    """In a run of one token every window matches; the 32 must still be waited for."""
    policy = OpenAI()
    policy.start([], [5] * 60 + [6, 7], 64)
    policy.extend([5] * 61)
    for _ in range(32):
        assert policy.propose() == []
        policy.extend([5])
    assert policy.propose() != []


def test_openai_prefers_the_occurrence_after_the_divergence() -> None:
    block = list(range(100, 140))
    prediction = [*block, 1, 2, *block, 3, 4, *block, 5]
    policy = OpenAI()
    policy.start([], prediction, 64)
    policy.extend([*block, 1, 9, *block])
    assert policy.propose() == [3, 4, *block[:14]]


def test_openai_seeded_edits_are_counted_like_the_replay() -> None:
    rng = random.Random(7)
    for _ in range(30):
        prediction = [rng.randrange(50) for _ in range(300)]
        output = [token for token in prediction if rng.random() > 0.02]
        policy = OpenAI()
        result = replay(policy, prediction, output, 64)
        assert (policy.accepted, policy.rejected) == (result.accepted, result.rejected)


BAD_ARGUMENTS: list[tuple[Callable[..., Policy], dict[str, Any], str]] = [
    (OpenAI, {"lookahead": 0}, "lookahead: expected an integer >= 1, got 0"),
    (OpenAI, {"resume_after": 0}, "resume_after: expected an integer >= 1, got 0"),
    (OpenAI, {"resume_delay": -1}, "resume_delay: expected an integer >= 0, got -1"),
    (PromptLookup, {"pattern_min": 0}, "pattern_min: expected an integer >= 1, got 0"),
    (PromptLookup, {"pattern_min": 4, "pattern_max": 3}, "pattern_max: expected an integer >= 4, got 3"),
    (PromptLookup, {"prediction_min": 0}, "prediction_min: expected an integer >= 1, got 0"),
    (
        PromptLookup,
        {"prediction_min": 3, "prediction_max": 2},
        "prediction_max: expected an integer >= 3, got 2",
    ),
    (PromptLookup, {"tie": "first"}, "tie: expected 'latest' or 'earliest', got 'first'"),
    (InputLookup, {"pattern_max": 0}, "pattern_max: expected an integer >= 1, got 0"),
    (InputLookup, {"prediction_max": 0}, "prediction_max: expected an integer >= 1, got 0"),
    (SuffixDecoding, {"max_spec_factor": -1}, "max_spec_factor: expected a number >= 0, got -1"),
    (SuffixDecoding, {"min_token_prob": 2}, "min_token_prob: expected 0 <= p <= 1, got 2"),
    (SuffixDecoding, {"max_tree_depth": 0}, "max_tree_depth: expected an integer >= 1, got 0"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(
    make: Callable[..., Policy], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**arguments)
