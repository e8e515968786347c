"""Rows by kind: what counts in which row, leads at equal rejections, verdicts, and the pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.quality import kinds
from benchmarks.quality.checks import K
from benchmarks.quality.runs import BOUNDS, Counts, Run
from gpu_align.tools.simulate.policies import OURS


def counts(tokens_per_step: float, rejected: float) -> Counts:
    steps, accepted = 1000, 10_000
    return Counts(3, int(tokens_per_step * steps), steps, accepted, int(rejected * accepted), 0)


OURS_TWO = {
    Run(OURS, K): counts(12.0, 0.6),
    Run(OURS, K, (("length_factor", 1),)): counts(8.0, 0.2),
}


def test_leads_are_read_at_the_rejections_of_the_peer() -> None:
    peers = {Run("openai", K): counts(3.0, 0.1), Run("suffix_decoding_4_deep", K): counts(8.0, 0.4)}
    found = kinds.nearest({**OURS_TWO, **peers, Run(BOUNDS[0], K): counts(20.0, 0.0)}, K)
    assert [lead.peer for lead in found] == ["openai", "suffix_decoding_4_deep"]
    assert found[0].ratio is None  # no setting with so few rejections comes first
    assert found[1].ratio == pytest.approx(10 / 8)


def test_verdicts() -> None:
    near, far = counts(9.5, 0.4), counts(8.0, 0.4)
    for peer, passed in ((near, False), (far, True)):
        first = kinds.checks_of({"c": {**OURS_TWO, Run("suffix_decoding_4_deep", K): peer}})[0]
        assert (first.name, first.passed) == ("c, K=64: over every peer", passed)
    worse = {replace(run, num_draft_tokens=32): c for run, c in OURS_TWO.items()}
    rows = {**OURS_TWO, **worse, Run("openai", 32): counts(9.9, 0.4)}
    assert [c.passed for c in kinds.checks_of({"c": rows}) if "K=32" in c.name] == [True]
