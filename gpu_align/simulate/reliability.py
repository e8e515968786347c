"""Is a confidence the share that is accepted? Draft tokens counted by confidence and by acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Bins of equal width; ten of them make a decile.
NUM_BINS = 100
NUM_DECILES = 10


class Decile(NamedTuple):
    """The draft tokens whose confidence is in one tenth of the range.

    Attributes:
        low: its lower end; the tenth is ``[low, low + 0.1)``, the last one closed.
        drafts: how many.
        share: of all draft tokens; 0 to 1.
        confidence: their mean; NaN where there are none.
        accepted: the share of them that was accepted; NaN where there are none.
    """

    low: float
    drafts: int
    share: float
    confidence: float
    accepted: float

    @property
    def gap(self) -> float:
        """``accepted - confidence``: above 0 where the confidence is too low."""
        return self.accepted - self.confidence


@dataclass
class Reliability:
    """Counts of verified draft tokens: of each draft those up to the first wrong one, and that one.

    A draft token's confidence is the probability that it is accepted *given the ones before it*. It says nothing
    of the tokens behind a wrong one.

    Attributes:
        drafts: [NUM_BINS] int64, tokens a bin; bin i holds ``i / NUM_BINS <= p < (i + 1) / NUM_BINS``, or p = 1.
        accepted: [NUM_BINS] int64, those of them that were accepted.
        confidence: [NUM_BINS] float64, the sum of their confidences.
    """

    drafts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    confidence: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.float64))

    def add(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Count one draft: `confidence` of its verified tokens, of which the first `num_accepted` were right.

        Raises:
            ValueError: a confidence outside 0 to 1.
        """
        values = np.asarray(confidence, np.float64)
        if values.size == 0:
            return
        # In this form the check refuses NaN, too.
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(f"confidence: expected 0 <= p <= 1, found {values.min()} to {values.max()}")
        bins = np.minimum((values * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        np.add.at(self.drafts, bins, 1)
        np.add.at(self.accepted, bins[:num_accepted], 1)
        np.add.at(self.confidence, bins, values)

    @classmethod
    def total(cls, parts: Iterable[Reliability]) -> Reliability:
        """The counts of several together."""
        whole = cls()
        for part in parts:
            whole.drafts += part.drafts
            whole.accepted += part.accepted
            whole.confidence += part.confidence
        return whole

    def deciles(self) -> list[Decile]:
        """Ten tenths of the range of confidence, from 0."""
        drafts, accepted, confidence = (
            counts.reshape(NUM_DECILES, -1).sum(axis=1)
            for counts in (self.drafts, self.accepted, self.confidence)
        )
        total = max(int(drafts.sum()), 1)
        return [
            Decile(
                i / NUM_DECILES,
                int(n),
                int(n) / total,
                float(confidence[i]) / n if n else float("nan"),
                float(accepted[i]) / n if n else float("nan"),
            )
            for i, n in enumerate(drafts.tolist())
        ]

    def worst_gap(self, least_share: float = 0.01) -> float:
        """The largest ``|gap|`` of the deciles that hold at least this share of the tokens; 0 without any."""
        gaps = [abs(d.gap) for d in self.deciles() if d.drafts and d.share >= least_share]
        return max(gaps, default=0.0)

    def chance_gap(self, least_share: float = 0.01, quantile: float = 0.95) -> float:
        """What `worst_gap` would stay below with this probability if every confidence were exactly right.

        Acceptances are drawn anew 1,000 times, each token's by itself, from a seed. Tokens of one text are not
        accepted independently of each other, so in truth chance does more.
        """
        p = np.clip(self.confidence / np.maximum(self.drafts, 1), 0, 1)
        drawn = np.random.default_rng(0).binomial(self.drafts, p, (1000, NUM_BINS)) - self.confidence
        drafts = self.drafts.reshape(NUM_DECILES, -1).sum(axis=1)
        counted = (drafts > 0) & (drafts >= least_share * drafts.sum())
        gaps = np.abs(drawn.reshape(1000, NUM_DECILES, -1).sum(axis=2)[:, counted]) / drafts[counted]
        return float(np.quantile(gaps.max(axis=1), quantile)) if counted.any() else 0.0
