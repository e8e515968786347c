"""Tokens that the drafter writes to rows: a step's by `append`, a new request's by `admit`."""

import random

import pytest
import torch

from gpu_align.ops.index import admit, append
from gpu_align.ops.layout import SLOT_META, STAGED_ROW, allocate_state
from tests.gpu_align.engine import BACKENDS, INTERPRETED, POISON, device_of

S, T = 6, 300
#: Tokens of a row before, of those that a step brings, and of a context.
TOTALS = [-5, 0, 1, 31, 64, 127, 128, 129, T - 1, T, T + 9]
COUNTS = [-1, 0, 1, 31, 32, 33, 127, 128, 129, 257, 1000]
CONTEXTS = [-1, -1, 0, 1, 31, 64, 1023, 1024, 1025, 2600]


def rows_in(num, width, device):
    """``(rows, all)``: slices of a wider tensor, and that."""
    around = torch.full((num + 2, width + 7), POISON, dtype=torch.int32, device=device)
    return around[1:-1, 3:-4], around


def check_append(rng, backend):
    device, num, width = device_of(backend), rng.choice([0, 1, 3, S]), rng.choice([0, 1, 5, 128, 260])
    slots = rng.sample(range(S), num)
    counts = [rng.choice(COUNTS) for _ in slots]
    if num == S:  # a batch that is filled up with a slot that is there
        slots, counts = [*slots, slots[0]], [*counts, 0]
    (rows, around), totals = rows_in(S, T, device), [rng.choice(TOTALS) for _ in range(S)]
    new = [[rng.randrange(2**31) for _ in range(width + 3)] for _ in slots]
    total_len = torch.tensor(totals, dtype=torch.int32, device=device)
    new_tokens = torch.tensor(new, dtype=torch.int64, device=device).reshape(len(slots), width + 3)[
        :, 2 : width + 2
    ]
    batch = torch.tensor(slots, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32)
    append(rows, total_len, *(tensor.to(device) for tensor in batch), new_tokens, backend)
    expected = [[POISON] * T for _ in range(S)]
    for slot, count, tokens in zip(slots, counts, new, strict=True):
        total = min(max(totals[slot], 0), T)
        taken = tokens[2 : width + 2][: max(count, 0)][: T - total]
        if taken:
            expected[slot][total : total + len(taken)] = taken
            totals[slot] = total + len(taken)
    assert (rows.tolist(), total_len.tolist()) == (expected, totals)
    rows.fill_(POISON)
    assert (around == POISON).all()


def check_contexts(rng, backend):
    device, num_slots, width = device_of(backend), 3, 2600
    (rows, around), totals = rows_in(num_slots, width, device), [POISON] * num_slots
    state, total_len = allocate_state(num_slots, 64, 256, device), torch.tensor(totals, dtype=torch.int32)
    slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
    expected, table, tokens = [[POISON] * width for _ in range(num_slots)], [], []
    for slot in slots:
        num, meta = rng.choice(CONTEXTS), [rng.randrange(2) for _ in range(SLOT_META)]
        table += [slot, rng.randrange(2), *meta, STAGED_ROW * len(slots) + len(tokens), num]
        if num >= 0:
            totals[slot], expected[slot][:num] = num, rng.choices(range(2**31), k=num)
            tokens += expected[slot][:num]
    staged, total_len = torch.tensor([*table, *tokens], dtype=torch.int32), total_len.to(device)
    admit(state, rows, total_len, staged.to(device), len(slots), 0, 0, 23, backend)
    assert (rows.tolist(), total_len.tolist()) == (expected, totals)
    rows.fill_(POISON)
    assert (around == POISON).all()


@pytest.mark.parametrize("check", [check_append, check_contexts])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_writes_the_tokens_of_each_row_and_nothing_else(backend, check, pytestconfig):
    for case in range((15 if INTERPRETED else 100) * pytestconfig.getoption("--campaign-count")):
        check(random.Random(case), backend)
