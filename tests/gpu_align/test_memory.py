"""`ResponseMemory`: what it recalls, for whom, and what it forgets first."""

import itertools
import random

import numpy as np
import pytest

from gpu_align import ResponseMemory, TextKind
from gpu_align.drafter.memory import ALIKE


def test_what_is_refused_and_shown():
    with pytest.raises(ValueError, match="max_tokens"):
        ResponseMemory(0)
    with pytest.raises(TypeError, match="max_tokens"):
        ResponseMemory("many")
    memory = ResponseMemory(3)
    assert not memory.remember("a", [])
    assert not memory.remember("a", [1, 2, 3, 4])
    assert memory.remember("a", [1, 2, 3])
    assert memory.remember("a secret tenant", [4711])
    assert repr(memory) == "ResponseMemory(max_tokens=3, num_tokens=1, num_answers=1, num_tenants=1)"


@pytest.mark.parametrize(
    ("tenant", "token_ids", "prompt", "error", "words"),
    [
        ("a", [5, -1], (), ValueError, r"token_ids\[1\]: expected 0 <= id < 2147483648, found -1"),
        ("a", np.ones((1, 3), dtype=np.int32), (), TypeError, "token_ids: expected a flat sequence"),
        ("a", 5, (), TypeError, "token_ids: expected a sequence"),
        ("a", [5, True], (), TypeError, r"token_ids\[1\]: expected an integer, found bool"),
        ("a", [5], [False], TypeError, r"prompt\[0\]: expected an integer, found bool"),
        ("a", [5], [1, -1, 2], ValueError, r"prompt\[1\]: expected"),
        ([], [5], (), TypeError, "unhashable"),
    ],
)
def test_after_bad_input_the_memory_is_as_it_was(tenant, token_ids, prompt, error, words):
    memory = ResponseMemory(3)
    memory.remember("b", [1, 2])
    with pytest.raises(error, match=words):
        memory.remember(tenant, token_ids, prompt)
    assert memory.remember("a", [7, 8, 9])  # drops the oldest
    assert memory.num_tokens == 3
    assert memory.recall("a", 9).tolist() == [7, 8, 9]


def test_whole_answers_of_one_tenant_the_newest_first():
    """10,000 answers of two tenants whose tokens tell whose they are, beside a list of what should be held: an
    answer given again is held once, and the oldest of both tenants goes."""
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
        asked, most = rng.randrange(2), rng.choice([1, 7, 60, 1 << 20])
        expected: list[int] = []
        for tokens in (tokens for owner, tokens in reversed(held) if owner == asked):
            if len(expected) + len(tokens) > most:
                break
            expected += tokens
        assert memory.recall(asked, most).tolist() == expected
        assert memory.num_tokens == sum(len(tokens) for _, tokens in held)


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
    like = [*prompt_of(1, 8)[:-1], 9]
    found = memory.recall_for("a", like, 100)
    assert found.kind == TextKind.RELATED_MEMORY
    assert found.token_ids.tolist() == [2, 2, 3, 1, 1]  # nearly the same prompt, then the newest first
    assert memory.recall_for("a", like, 3).token_ids.tolist() == [2, 2, 3]
    assert memory.recall_for("b", like, 9).token_ids.tolist() == [5]


def test_answers_to_the_same_prompt_come_alone_however_many_there_are():
    """128 prompts that share a system prompt, eight answers each, in two epochs: each prompt gets its own, the
    newest first, as long as they are remembered. An answer that comes again belongs to the newest prompt."""
    rng, shared = random.Random(5), list(range(500, 900))
    prompts = [[*shared, *(rng.randrange(400) for _ in range(20))] for _ in range(128)]
    memory, given = ResponseMemory(128 * 8 * 4), {}
    for epoch in range(2):
        for number, prompt in enumerate(prompts):
            found = memory.recall_for("a", prompt, 100)
            assert (found.token_ids.tolist(), found.kind) == (
                given.get(number, []),
                TextKind.RELATED_MEMORY,
            ) or not epoch
            answers = [[2000 * epoch + 8 * number + i] * 4 for i in range(8)]
            for answer in answers:
                memory.remember("a", answer, prompt)
            given[number] = [token for answer in reversed(answers) for token in answer]
    memory.remember("a", [2000] * 4, prompts[1])
    assert memory.recall_for("a", prompts[0], 100).token_ids.tolist() == given[0][:-4]
    assert memory.recall_for("a", prompts[1], 4).token_ids.tolist() == [2000] * 4
    assert len(memory.recall_for("b", prompts[0], 100).token_ids) == 0


@pytest.mark.parametrize("prompt", [prompt_of(3), [], [5]])
def test_without_like_prompts_it_is_the_newest(prompt):
    memory = ResponseMemory(100)
    for answer, asked in (([1], prompt_of(1)), ([2], prompt_of(2)), ([3], ())):
        memory.remember("a", answer, asked)
    found = memory.recall_for("a", prompt, 2)
    assert (found.token_ids.tolist(), found.kind) == ([3, 2], TextKind.MEMORY)
    found = memory.recall_for("none", prompt, 2)
    assert (found.token_ids.tolist(), found.kind) == ([], TextKind.MEMORY)


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
        assert memory.recall_for("a", text, 10).kind == TextKind.MEMORY + (share >= ALIKE), shared
