"""`ResponseMemory`: what it recalls, for whom, and what it forgets first."""

import itertools
import random

import numpy as np
import pytest
import torch

from gpu_align import Drafter, ResponseMemory, Source
from gpu_align.memory import ALIKE, MOST_COMPARED


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


def prompt_of(*topic: int) -> list[int]:
    """40 tokens that depend on the topic, and four behind them."""
    rng = random.Random(repr(topic[:1]))
    return [*(rng.randrange(1000) for _ in range(40)), *topic, *range(4)]


def test_answers_to_like_prompts_come_alone_and_the_closest_first():
    memory = ResponseMemory(100)
    memory.remember("a", [1, 1], prompt_of(1, 7))
    memory.remember("a", [2, 2], prompt_of(1, 8))
    memory.remember("a", [3], prompt_of(1, 9))
    memory.remember("a", [4], prompt_of(2, 7))
    memory.remember("b", [5], prompt_of(1, 7))
    memory.remember("a", [6])
    found = memory.recall_for("a", prompt_of(1, 8), 100)
    assert found.related
    assert found.token_ids.tolist() == [2, 2, 3, 1, 1]  # the same prompt, then the newest first
    assert memory.recall_for("a", prompt_of(1, 8), 3).token_ids.tolist() == [2, 2, 3]
    assert memory.recall_for("b", prompt_of(1, 8), 9).token_ids.tolist() == [5]


@pytest.mark.parametrize("prompt", [prompt_of(3), [], [5]])
def test_without_like_prompts_it_is_the_newest(prompt):
    memory = ResponseMemory(100)
    for answer, asked in (([1], prompt_of(1)), ([2], prompt_of(2)), ([3], ())):
        memory.remember("a", answer, asked)
    found = memory.recall_for("a", prompt, 2)
    assert (found.token_ids.tolist(), found.related) == ([3, 2], False)
    found = memory.recall_for("none", prompt, 2)
    assert (found.token_ids.tolist(), found.related) == ([], False)


def test_how_much_two_prompts_must_have_in_common():
    """The estimate decides as the share itself does, where that is not close to `ALIKE`."""
    rng = random.Random(3)
    for shared in (0, 20, 60, 240, 270, 300):
        text = [rng.randrange(50_000) for _ in range(300)]
        other = [*text[:shared], *(rng.randrange(50_000) for _ in range(300 - shared))]
        pairs, others = (set(itertools.pairwise(t)) for t in (text, other))
        share = len(pairs & others) / len(pairs | others)
        memory = ResponseMemory(10)
        memory.remember("a", [1], other)
        assert memory.recall_for("a", text, 10).related == (share >= ALIKE), shared


def test_only_the_latest_answers_are_compared():
    memory = ResponseMemory(10_000)
    memory.remember("a", [1], prompt_of(1))
    for number in range(MOST_COMPARED - 1):
        memory.remember("a", [number + 2], prompt_of(2))
    assert memory.recall_for("a", prompt_of(1), 9).related
    memory.remember("a", [MOST_COMPARED + 2], prompt_of(2))
    assert not memory.recall_for("a", prompt_of(1), 9).related


def test_more_is_drafted_from_related_answers():
    """Three tokens of a long output have matched: more follows where the answers are related than where not."""
    lengths = {}
    for related in (False, True):
        drafter = Drafter(
            max_slots=1,
            max_context_len=256,
            max_prediction_len=64,
            num_draft_tokens=4,
            vocab_size=1000,
            device="cpu",
        )
        drafter.add(0, list(range(10, 60)), 0, memory=True, related=related)
        tokens = torch.zeros((1, 256), dtype=torch.int32)
        tokens[0, :100] = torch.tensor([*range(500, 597), 20, 21, 22])
        draft = drafter.propose(
            tokens,
            torch.tensor([100], dtype=torch.int32),
            torch.tensor([0]),
            torch.ones(1, dtype=torch.int32),
        )
        lengths[related] = int(draft.length[0])
        if lengths[related]:
            assert int(draft.source[0]) == Source.MEMORY
            assert draft.token_ids[0, : lengths[related]].tolist() == list(range(23, 23 + lengths[related]))
        assert drafter.export_slot(0).related == related
    assert lengths[True] > lengths[False]
