"""Our drafter in batches, confidence beside acceptance, and the bounds."""

from __future__ import annotations

import random
from itertools import takewhile

import numpy as np
import pytest

from benchmarks.quality.replays import OurPair, Reliability, bound, everywhere, perfect_choice, replay_batched
from gpu_align.simulate import Record, make_policies, replay


def record(seed: int, size: int = 90) -> Record:
    """An output that follows its prediction with random edits."""
    rng = random.Random(seed)
    prediction = [rng.randrange(20) for _ in range(size)]
    output = [t if rng.random() < 0.93 else rng.randrange(20, 30) for t in prediction if rng.random() < 0.97]
    return Record(str(seed), [rng.randrange(20) for _ in range(seed % 4)], prediction, output or [1])


RECORDS = [
    *(record(seed) for seed in range(12)),
    Record("one", [], [], [3]),
    Record("same", [], [1, 2], [1, 2]),
]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_batch_counts_what_single_replays_count(batch_size: int, prefill: bool) -> None:
    [ours] = make_policies(["gpu_align"], RECORDS, 16)
    together = replay_batched(RECORDS, 16, draft_in_prefill=prefill, batch_size=batch_size)
    for record, b in zip(RECORDS, together, strict=True):
        a = replay(ours, record, 16, prefill)
        assert (a.id, a.steps, a.accepted, a.rejected) == (b.id, b.steps, b.accepted, b.rejected)
        assert a.rejected_from == b.rejected_from
        assert a.origins.tolist() == b.origins.tolist()
        assert a.step_of.tolist() == b.step_of.tolist()
        assert isinstance(b, OurPair)
        # Of each draft the accepted tokens, and the first wrong one.
        assert b.accepted <= b.reliability.drafts.sum() <= b.accepted + b.steps
        assert b.reliability.accepted.sum() == b.accepted


def test_reliability_counts_by_hand() -> None:
    counts = Reliability()
    counts.add([0.95, 0.92, 0.31], 2)  # two accepted, the third wrong
    counts.add([1.0], 1)
    counts.add([0.0], 0)
    counts.add([], 0)
    deciles = counts.deciles()
    assert [d.drafts for d in deciles] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 3]
    assert deciles[9].confidence == pytest.approx((0.95 + 0.92 + 1) / 3)
    assert deciles[9].accepted == 1
    assert deciles[3].gap == pytest.approx(-0.31)
    assert np.isnan(deciles[1].gap)
    assert counts.worst_gap() == pytest.approx(0.31)
    assert counts.worst_gap(least_share=0.5) == pytest.approx(1 - deciles[9].confidence)
    assert Reliability().worst_gap() == Reliability().chance_gap() == 0
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="confidence"):
            counts.add([bad], 0)


def brute_force_steps(r: Record, k: int) -> int:
    """The fewest steps over all ways to copy from the prediction or the context so far."""
    n = len(r.output)
    best = [0] * (n + 1)
    for done in range(n - 1, 0, -1):
        ahead, texts = r.output[done : done + k], (r.prediction, r.prompt + r.output[:done])
        copies = (text[start : start + k] for text in texts for start in range(len(text)))
        reach = max(
            len([*takewhile(lambda p: p[0] == p[1], zip(copy, ahead, strict=False))]) for copy in copies
        )
        best[done] = 1 + min(best[min(done + taken + 1, n)] for taken in range(reach + 1))
    return 1 + (best[1] if n > 1 else 0)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_nothing_that_copies_beats_the_clairvoyant(k: int) -> None:
    for r in RECORDS:
        clairvoyant = bound(r, k, everywhere)
        assert clairvoyant.rejected == 0
        assert clairvoyant.steps == brute_force_steps(r, k)
        [chosen] = perfect_choice([r], k)
        assert chosen.rejected == 0
        assert chosen.steps >= clairvoyant.steps
        for policy in make_policies(["cursor", "prompt_lookup", "static_text"], [r], k):
            assert replay(policy, r, k).steps >= clairvoyant.steps
