"""The chooser that knows the output: never slower than either side, and fed with what was written."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.quality import headroom
from benchmarks.quality.replays import bound
from gpu_align.policies import POLICIES, Policy
from gpu_align.simulate import Record
from gpu_align.tools.simulate.replay import replay

K = 8
PAIR = "static_text", "prompt_lookup"


def record(seed: int) -> Record:
    """A text with an edit, and parts of itself again."""
    random.seed(seed)
    text = [random.randrange(40) for _ in range(120)]
    output = [*text[:50], *text[10:30], 7, 8, 9, *text[60:]]
    return Record(f"r{seed}", text[:9], text, output)


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("seed", range(4))
def test_one_drafter_takes_the_steps_of_a_replay(name: str, seed: int) -> None:
    alone = bound(record(seed), K, headroom.drafts_of([POLICIES[name]()], K))
    replayed = replay(POLICIES[name](), record(seed), K)
    assert (alone.steps, alone.accepted) == (replayed.steps, replayed.accepted)
    assert alone.rejected == 0 < replayed.rejected


class Halves(Policy):
    """Right on one half of the output, silent on the other."""

    def __init__(self, output: Sequence[int], half: range) -> None:
        self.name, self._output, self._half = "halves", output, half

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        self._done = 0

    def propose(self) -> list[int]:
        right = list(self._output[self._done : min(self._done + K, self._half.stop)])
        return right if self._done in self._half else []

    def extend(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == list(self._output[self._done : self._done + len(tokens)])
        self._done += len(tokens)


def test_the_better_one_is_taken_at_each_step() -> None:
    text = record(0)
    middle, end = len(text.output) // 2, len(text.output)
    first, second = Halves(text.output, range(middle)), Halves(text.output, range(middle, end))
    steps = headroom.steps_of(text, first, second, K)
    least = -(-end // (K + 1))
    assert list(steps) == list(headroom.COLUMNS)
    assert least <= steps["either"] <= least + 2
    assert min(steps[headroom.OURS], steps[headroom.PEER]) > middle
