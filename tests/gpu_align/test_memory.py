"""`ResponseMemory`: what it recalls, for whom, and what it forgets first."""

import random

import numpy as np
import pytest

from gpu_align import ResponseMemory


def test_the_newest_answer_comes_first():
    memory = ResponseMemory(100)
    for answer in ([1, 2], [3], [4, 5, 6]):
        assert memory.remember("a", answer)
    assert memory.recall("a", 100).tolist() == [4, 5, 6, 3, 1, 2]
    assert memory.recall("a", 100).dtype == np.int32


def test_each_answer_is_whole():
    memory = ResponseMemory(100)
    for answer in ([9], [1, 2], [3, 4]):
        memory.remember("a", answer)
    assert [memory.recall("a", n).tolist() for n in (1, 3, 4, 5)] == [
        [],
        [3, 4],
        [3, 4, 1, 2],
        [3, 4, 1, 2, 9],
    ]


def test_an_answer_given_again_is_held_once_as_the_newest():
    memory = ResponseMemory(4)
    for answer in ([1, 2], [3], [1, 2]):
        memory.remember("a", answer)
    assert memory.recall("a", 9).tolist() == [1, 2, 3]
    assert (memory.stats().num_tokens, memory.stats().num_answers) == (3, 2)
    memory.remember("a", [4, 5])  # the oldest is now [3]
    assert memory.recall("a", 9).tolist() == [4, 5, 1, 2]


def test_the_oldest_of_all_tenants_goes_first():
    memory = ResponseMemory(4)
    memory.remember("a", [1, 2])
    memory.remember("b", [3, 4])
    memory.remember("b", [5])
    assert memory.recall("a", 9).tolist() == []
    assert memory.recall("b", 9).tolist() == [5, 3, 4]
    assert memory.stats().num_tenants == 1


def test_what_is_not_kept():
    memory = ResponseMemory(3)
    assert not memory.remember("a", [])
    assert not memory.remember("a", [1, 2, 3, 4])
    assert memory.remember("a", [1, 2, 3])
    assert memory.recall("b", 9).tolist() == []


def test_what_is_refused_and_shown():
    with pytest.raises(ValueError, match="max_tokens"):
        ResponseMemory(0)
    with pytest.raises(TypeError, match="max_tokens"):
        ResponseMemory("many")
    memory = ResponseMemory(10)
    memory.remember("a secret tenant", [4711])
    assert "4711" not in repr(memory)
    assert "secret" not in repr(memory)


def test_no_token_of_another_tenant_is_ever_recalled():
    """10,000 answers of two tenants whose tokens tell whose they are, beside a list of what should be held."""
    rng = random.Random(16)
    memory = ResponseMemory(400)
    held: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(10_000):
        tenant = rng.randrange(2)
        answer = tuple(1000 * tenant + rng.randrange(5) for _ in range(rng.choice([1, 2, 5, 40])))
        memory.remember(tenant, answer)
        held = [other for other in held if other != (tenant, answer)] + [(tenant, answer)]
        while sum(len(tokens) for _, tokens in held) > 400:
            held.pop(0)
        asked = rng.randrange(2)
        recalled = memory.recall(asked, 1 << 20).tolist()
        assert all(token // 1000 == asked for token in recalled)
        assert recalled == [t for owner, tokens in reversed(held) if owner == asked for t in tokens]
