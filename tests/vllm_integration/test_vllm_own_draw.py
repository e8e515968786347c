"""Verification by the request's own draw, on rows that were drawn. (Real engines: `tests/campaign`,
`tests/vllm/test_v2_draws.py`.)"""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vllm_integration.seams.guard import Guard
from vllm_integration.worker import own_draw
from vllm_integration.worker.own_draw import accept

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def expected(drawn: list[int], drafts: list[int], ends: list[int]) -> list[list[int]]:
    """The tokens of each request: what is drawn, up to the first that is not the draft."""
    found = []
    for start, end in pairwise(ends):
        tokens = []
        for row in range(start, end):
            tokens.append(drawn[row])
            if row + 1 == end or drafts[row + 1] != drawn[row]:
                break
        found.append(tokens)
    return found


@pytest.mark.parametrize("K", [1, 2, 3, 4, 31, 32, 33, 64, 128])
def test_the_drafts_that_are_drawn_are_accepted_and_the_next_draw(K: int) -> None:
    """Of random requests, from three tokens, so that drafts are right by chance; -1 is no draft. Memory of others
    follows the last row."""
    rng = random.Random(K)
    for num_reqs in (1, 2, 7):
        rows = [1 + rng.choice((0, K, rng.randint(0, K))) for _ in range(num_reqs)]
        ends = [sum(rows[:i]) for i in range(num_reqs + 1)]
        drawn = [rng.randrange(3) for _ in range(ends[-1])]
        right = rng.random()
        drafts = [0, *(token if rng.random() < right else rng.randint(-1, 3) for token in drawn[:-1])]
        beyond = torch.full((1000,), 1, device=DEVICE)  # a drawn token after the last row
        given = [torch.tensor(values, device=DEVICE) for values in (drawn, drafts)]
        cu_num_logits = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        tokens, count = accept(
            torch.cat([given[0], beyond])[: ends[-1]], torch.cat([given[1], beyond]).int()[: ends[-1]],
            cu_num_logits, K,
        )  # fmt: skip
        assert (tokens.shape, tokens.dtype, count.dtype) == ((num_reqs, K + 1), torch.int64, torch.int32)
        found = [row[:n] for row, n in zip(tokens.tolist(), count.tolist(), strict=True)]
        assert found == expected(drawn, drafts, ends)


class States:
    """A runner's `RequestState`, as far as it is looked at."""


@pytest.mark.parametrize("added", [0, 1])
def test_a_parameter_more_leaves_the_coin(added: int) -> None:
    """Taken by its place it would be the drafts, and what the model did not draw would be accepted."""
    states, rows = States(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    own_draw._runners[states] = Guard("own draws", "verifies by the coin")
    drawn = SimpleNamespace(req_states=states, sample=lambda logits, *_, **__: (rows, logits))
    sampler = SimpleNamespace(sampler=drawn, num_speculative_steps=1)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    given = [rows, rows, ends, *[rows] * 6, *[rows.int()] * added]
    found = own_draw.verify(lambda *_: "by the coin", sampler, rows.float(), None, *given)
    assert (found == "by the coin") is bool(added)
