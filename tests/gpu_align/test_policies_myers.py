"""Streaming Myers against the dynamic-programming table it must agree with."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.policies import Myers
from gpu_align.tools.policies.static_text import MyersFrontier

TOKENS = st.lists(st.integers(0, 3), max_size=70)


def distances(a: list[int], b: list[int]) -> list[int]:
    """[len(a) + 1] insertions plus deletions that turn a[:x] into b; plain table, row by row."""
    row = list(range(len(a) + 1))
    for y, token in enumerate(b, start=1):
        diagonal, row[0] = row[0], y
        for x, other in enumerate(a, start=1):
            best = diagonal if token == other else min(row[x], row[x - 1]) + 1
            diagonal, row[x] = row[x], best
    return row


def oracle_cursor(prediction: list[int], output: list[int]) -> int | None:
    if not output:
        return 0
    table = distances(prediction, output)
    shortest = min(table)
    matched = (x for x in range(1, len(table)) if prediction[x - 1] == output[-1] and table[x] == shortest)
    return max(matched, default=None)


@settings(max_examples=400, deadline=None)
@given(a=TOKENS, b=TOKENS, cuts=st.lists(st.integers(1, 9), max_size=30))
def test_frontier_is_the_shortest_distance_however_the_tokens_arrive(
    a: list[int], b: list[int], cuts: list[int]
) -> None:
    frontier = MyersFrontier(a)
    done = 0
    for cut in [*cuts, len(b)]:
        frontier.append(b[done : done + cut])
        done = min(done + cut, len(b))
        table = distances(a, b[:done])
        assert frontier.edits == min(table)
        assert frontier.ends().tolist() == [x for x, d in enumerate(table) if d == min(table)]


@settings(max_examples=200, deadline=None)
@given(prediction=TOKENS, output=TOKENS, k=st.integers(1, 8))
def test_policy_drafts_from_the_oracle_cursor(prediction: list[int], output: list[int], k: int) -> None:
    policy = Myers()
    policy.start([], prediction, k)
    for at in range(len(output) + 1):
        cursor = oracle_cursor(prediction, output[:at])
        assert policy.propose() == ([] if cursor is None else prediction[cursor : cursor + k])
        if at < len(output):
            policy.extend([output[at]])


@pytest.mark.parametrize("size", [63, 64, 65, 129])
def test_growing_past_the_first_buffer(size: int) -> None:
    a = list(range(size))
    frontier = MyersFrontier(a)
    frontier.append([500])
    for token in a:
        frontier.append([token])
    assert frontier.edits == 1
    assert frontier.ends().tolist() == [size]


def test_realigns_after_one_matching_token() -> None:
    prediction = list(range(100, 160))
    for output, cursor in [
        ([100, 101, 7, 103], 4),  # substitution
        ([100, 101, 7, 8, 9, 102], 3),  # insertion
        ([100, 101, 103], 4),  # deletion of one token
    ]:
        policy = Myers()
        policy.start([], prediction, 3)
        policy.extend(output)
        assert policy.propose() == prediction[cursor : cursor + 3]


def test_a_deletion_must_be_paid_for_before_it_is_believed() -> None:
    prediction = list(range(100))
    policy = Myers()
    policy.start([], prediction, 4)
    policy.extend([0, 1, 2, 3])
    proposed_at = None
    for count, token in enumerate(range(14, 40), start=1):  # ten tokens were left out
        policy.extend([token])
        if policy.propose():
            proposed_at = count
            break
    assert proposed_at == 10
    assert policy.propose() == [24, 25, 26, 27]


def test_an_unrelated_output_of_some_thousand_tokens_is_affordable() -> None:
    rng = random.Random(11)
    prediction = [rng.randrange(1000) for _ in range(2000)]
    policy = Myers()
    policy.start([], prediction, 64)
    started = time.process_time()
    for _ in range(2000):
        policy.extend([rng.randrange(1000, 2000)])
    assert policy.propose() == []
    # The quadratic scan in plain Python would take minutes; the bound only tells those two apart.
    assert time.process_time() - started < 30
