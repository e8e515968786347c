"""The lookup table as a policy: its rule by plain Python, and what it refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import DrafterConfig, Recipes, Source
from gpu_align.policies import RECIPE_POLICIES, RecipeLookup
from gpu_align.predictors import PredictorOptions
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import our_drafter
from tests.gpu_align.test_policies import replay

Row = tuple[list[int], list[int], list[float]]

ROWS: list[Row] = [
    ([1], [2, 3], [0.9, 0.5]),
    ([7, 1], [4], [0.8]),
    ([5, 7, 1], [], []),
    ([3], [9], [0.1]),
]


def policy(rows: list[Row] = ROWS, min_survival: float = 0.2) -> RecipeLookup:
    return RecipeLookup(Recipes.from_lists(rows), min_survival)


def draft_after(
    tokens: list[int], rows: list[Row] = ROWS, min_survival: float = 0.2, k: int = 8
) -> list[int]:
    found = policy(rows, min_survival)
    found.start([], [], k)
    found.extend(tokens)
    return found.propose()


def test_the_longest_context_decides() -> None:
    assert draft_after([1]) == [2, 3]
    assert draft_after([6, 1]) == [2, 3]
    assert draft_after([7, 1]) == [4]
    assert draft_after([5, 7, 1]) == []
    assert draft_after([8]) == []


def test_drafting_stops_where_survival_is_too_low() -> None:
    assert draft_after([1], min_survival=0.5) == [2, 3]
    assert draft_after([1], min_survival=0.6) == [2]
    assert draft_after([3]) == []
    assert draft_after([3], min_survival=0.0) == [9]
    assert draft_after([1], k=1) == [2]
    with pytest.raises(ValueError, match=r"min_survival: expected 0 <= p <= 1, got 1\.5"):
        policy(min_survival=1.5)


def test_a_context_reaches_into_the_prompt_and_a_prediction_does_not_matter() -> None:
    found = policy()
    found.start([7], [1, 2, 3], 4)
    assert found.propose() == []
    found.extend([1])
    assert found.propose() == found.propose() == [4]
    found.propose().append(99)
    assert found.propose() == [4]
    found.start([], [7, 1], 4)
    assert found.propose() == []


def test_no_recipes_at_all() -> None:
    assert draft_after([1], []) == []


def test_bad_input_is_named() -> None:
    [(name, make)] = RECIPE_POLICIES.items()
    found = make(Recipes.from_lists(ROWS))
    assert found.name == name == "recipe_pack"
    with pytest.raises(RuntimeError, match="start"):
        found.propose()
    with pytest.raises(ValueError, match="prediction: expected token ids >= 0, got -3 at index 0"):
        found.start([], [-3], 2)


TOKENS = st.integers(0, 3)
CONTEXTS = st.dictionaries(
    st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
    st.lists(st.tuples(TOKENS, st.sampled_from([0.1, 0.3, 0.6, 1.0])), max_size=5),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    table=CONTEXTS,
    prompt=st.lists(TOKENS, max_size=6),
    output=st.lists(TOKENS, min_size=1, max_size=20),
    k=st.integers(1, 6),
    low=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_drafts_by_plain_python(
    table: dict[tuple[int, ...], list[tuple[int, float]]],
    prompt: list[int],
    output: list[int],
    k: int,
    low: float,
) -> None:
    rows: list[Row] = []
    for context, continuation in table.items():
        alive = sorted((p for _, p in continuation), reverse=True)
        assert all(a >= b for a, b in pairwise(alive))
        rows.append((list(context), [t for t, _ in continuation], alive))
    result = replay(policy(rows, low), [], output, k, prompt, draft_in_prefill=True)
    done = 0
    for draft in result.drafts:
        tokens = prompt + output[:done]
        best: list[int] = []
        for context, continuation, alive in sorted(rows, key=lambda row: len(row[0])):
            if tokens[-len(context) :] == context:
                best = [t for t, p in zip(continuation, alive, strict=True) if p >= low]
        assert draft == best[:k]
        taken = 0
        while taken < len(draft) and output[done : done + 1] == draft[taken : taken + 1]:
            done, taken = done + 1, taken + 1
        done += 1


def test_our_drafter_drafts_the_same_where_it_has_nothing_else() -> None:
    """With neither a prediction nor anything repeated, recipes are all that either has."""
    recipes = Recipes.from_lists(ROWS)
    for tokens in ([1], [7, 1], [5, 7, 1], [8], [3]):
        record = Record("a", [], [], [*tokens, *[6] * 8])
        config = DrafterConfig(use_context=False)
        ours = our_drafter([record], config, recipes)
        ours.reset([], PredictorOptions(8))
        ours.push_tokens(tokens)
        assert ours.predict_tokens() == draft_after(tokens)
        assert ours.source == (Source.RECIPE if draft_after(tokens) else Source.NONE)
