"""A batch's budget of draft tokens: which go, and that kernel, reference and a plain loop agree."""

import numpy as np
import pytest
import torch

from gpu_align import Drafter, Source
from gpu_align.ops.constants import SURVIVAL_ONE
from gpu_align.ops.draft import Draft
from gpu_align.ops.draft_budget import limit_drafts_inplace
from tests.gpu_align.step_harness import BACKENDS, device_of

VOCAB = 1000


def drafts(confidences, device, K=None):
    """``(draft, token_ids, total_len, slots)``: request b's last token is 900 + b, its drafts are 100 b on."""
    B, K = len(confidences), K or max(map(len, confidences), default=1)
    confidence = torch.zeros((B, K), dtype=torch.float32)
    token_ids = torch.arange(900, 900 + B)[:, None].repeat(1, K)
    for b, row in enumerate(confidences):
        confidence[b, : len(row)] = torch.tensor(row)
        token_ids[b, : len(row)] = 100 * b + torch.arange(len(row))
    length = torch.tensor([len(row) for row in confidences], dtype=torch.int32)
    source = torch.where(length > 0, int(Source.CONTEXT), 0).to(torch.int8)
    rows = torch.full((B + 1, 5), 7, dtype=torch.int32)
    rows[:B, 2] = torch.arange(900, 900 + B) % VOCAB
    tensors = token_ids, length, confidence, source
    made = Draft(*(tensor.to(device) for tensor in tensors))
    slots = torch.arange(B, dtype=torch.int64)
    total = torch.full((B + 1,), 3, dtype=torch.int32)
    return made, rows.to(device), total.to(device), slots.to(device)


def limit(made, budget, backend):
    draft, rows, total, slots = made
    survival = torch.full(draft.token_ids.shape, -5, dtype=torch.int32, device=rows.device)
    budget = torch.tensor([budget], dtype=torch.int32, device=rows.device)
    limit_drafts_inplace(draft, budget, survival, rows, total, slots, VOCAB, backend)
    return draft


def expected(confidences, budget):
    """The lengths, by taking the likeliest drafts of all: units never rise along a draft."""
    units = []
    for b, row in enumerate(confidences):
        left = SURVIVAL_ONE
        for k, p in enumerate(row):
            left = left * int(np.float32(p) * np.float32(SURVIVAL_ONE)) // SURVIVAL_ONE
            units.append((-left, b, k))
    kept = [b for _, b, _ in sorted(units)[: max(budget, 0)]]
    return [kept.count(b) for b in range(len(confidences))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_kept(backend):
    draft = limit(drafts([[0.5, 0.5], [0.9, 0.5, 0.5]], device_of(backend)), 3, backend)
    assert draft.token_ids.tolist() == [[0, 900, 900], [100, 101, 901]]
    assert draft.confidence[:, 1:].tolist() == [[0, 0], [0.5, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("B", "K"), [(0, 1), (1, 1), (33, 16), (64, 64), (100, 7), (1024, 16)])
def test_random_batches(B, K, backend):
    rng = np.random.default_rng(B * 1000 + K)
    steps = np.array([0.0, 0.25, 0.5, 0.9, 1.0], dtype=np.float32)
    rows = [
        (rng.choice(steps, n) if b % 2 else rng.random(n, dtype=np.float32)).tolist()
        for b, n in enumerate(rng.integers(0, K + 1, B))
    ]
    total = sum(map(len, rows))
    for budget in {-1, 0, 1, total // 3, total - 1, total, total + 5, 2**31 - 1}:
        draft = limit(drafts(rows, device_of(backend), K=K), budget, backend)
        lengths = draft.length.tolist()
        assert lengths == expected(rows, budget)
        assert sum(lengths) == min(max(budget, 0), total)
        assert (draft.source == 0).tolist() == [n == 0 for n in lengths]
        behind = torch.arange(K) >= draft.length.cpu()[:, None]
        assert (draft.confidence.cpu()[behind] == 0).all()
        if B <= 100:
            assert (draft.token_ids.cpu() == torch.arange(900, 900 + B)[:, None])[behind].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_through_a_drafter(backend):
    """The same as cutting by hand what it drafts without a budget; a tensor's budget is read at each call."""
    device = device_of(backend)
    drafter = Drafter(
        max_slots=3, max_context_len=64, max_prediction_len=64, num_draft_tokens=8, vocab_size=500,
        device=device, backend=backend,
    )  # fmt: skip
    token_ids = torch.zeros((3, 64), dtype=torch.int32)
    for slot in range(3):
        text = list(range(100 * slot + 1, 100 * slot + 60))
        drafter.add(slot, text, prompt_len=0)
        token_ids[slot, : 4 + slot] = torch.tensor(text[: 4 + slot])
    token_ids[2, 3] = 7  # diverged
    total = torch.tensor([4, 5, 6], dtype=torch.int32, device=device)
    slots, ones = torch.tensor([2, 0, 1], device=device), torch.ones(3, dtype=torch.int32, device=device)
    step = token_ids.to(device), total, slots, ones
    free = Draft(*(tensor.clone() for tensor in drafter.propose(*step)))
    rows = [free.confidence[b, : free.length[b]].tolist() for b in range(3)]
    budget = torch.zeros(1, dtype=torch.int32, device=device)
    for most in (0, 3, 7, 100):
        budget.fill_(most)
        for given in (most, budget):
            draft = drafter.propose(*step, budget=given)
            assert draft.length.tolist() == expected(rows, most)
            for b, length in enumerate(draft.length.tolist()):
                assert draft.token_ids[b, :length].tolist() == free.token_ids[b, :length].tolist()
    captured = drafter.capture(*step, budget=budget)
    for most in (2, 9):
        budget.fill_(most)
        assert captured.replay().length.tolist() == expected(rows, most)
    assert drafter.propose(*step).length.tolist() == free.length.tolist()
    with pytest.raises(ValueError, match="budget"):
        drafter.propose(*step, budget=-1)
    with pytest.raises(TypeError, match="budget"):
        drafter.propose(*step, budget=torch.zeros(1, dtype=torch.int64, device=device))
