"""Replay: a known output plays the model, and a policy drafts for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...predictors.base import TokenPredictor
from ...predictors.loop import PredictorLoop, VerifiedStep
from ..html import Origin
from .records import Record

#: Bins of equal width; ten of them make a decile.
NUM_BINS = 100
NUM_DECILES = 10


class Decile(NamedTuple):
    """The draft tokens whose confidence is in ``[low, low + 0.1)``, the last tenth closed.

    How many, their share of all draft tokens, their mean confidence, and the share of them that was accepted; NaN
    where there are none.
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

    A draft token's confidence is the probability that it is accepted *given the ones before it*.

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


@dataclass
class PairResult:
    """What one policy did on one record.

    Attributes:
        id: the record's.
        output_tokens: L, tokens replayed.
        steps: forward passes of the model, prefill included.
        accepted: draft tokens that were equal to the output.
        rejected: draft tokens that were not, up to the last output token.
        propose_ns: a step's drafting time, [steps with a draft call].
        origins: [L] uint8, an `Origin` a token.
        step_of: [L] int32, the step, from 0, that produced each token.
        rejected_from: rejected draft tokens by `gpu_align.Source`, of a policy that tells its source.
        reliability: confidence beside acceptance, of a policy that tells its confidence.
    """

    id: str
    output_tokens: int
    steps: int
    accepted: int
    rejected: int
    propose_ns: list[int] = field(repr=False)
    origins: NDArray[np.uint8] = field(repr=False)
    step_of: NDArray[np.int32] = field(repr=False)
    rejected_from: Counter[int] = field(default_factory=Counter)
    reliability: Reliability = field(default_factory=Reliability, repr=False)

    @classmethod
    def begin(cls, record: Record, draft_in_prefill: bool = False) -> PairResult:
        """Before the first step that verifies: the prefill has given a token, unless it verifies drafts, too."""
        length = len(record.output)
        origins = np.full(length, Origin.GENERATED, dtype=np.uint8)
        step_of = np.zeros(length, dtype=np.int32)
        return cls(record.id, length, int(not draft_in_prefill), 0, 0, [], origins, step_of)

    def count(self, step: VerifiedStep) -> None:
        """Take the next step."""
        accepted, wrong = step.accepted, len(step.draft) - step.accepted
        self.step_of[step.start : step.end] = self.steps
        self.steps += 1
        self.accepted += accepted
        self.rejected += wrong
        self.propose_ns.append(step.ns)
        origin = Origin.ACCEPTED if step.source is None else step.source
        self.origins[step.start : step.start + accepted] = origin
        if step.source is not None and wrong:
            self.rejected_from[step.source] += wrong
        if step.confidence is not None:
            # The tokens behind the first wrong one were not put to the test.
            self.reliability.add(step.confidence[: min(accepted + 1, len(step.draft))], accepted)


def replay(
    policy: TokenPredictor, record: Record, num_draft_tokens: int, draft_in_prefill: bool = False
) -> PairResult:
    """Run one policy over one record; `PredictorLoop.follow` is the loop.

    ::

        policy.update_input_tokens(prompt + prediction)
        policy.reset(prompt, options)                      # K and the prediction are in the options
        if draft_in_prefill: position, steps = 0, 0        # the prefill verifies drafts like any step
        else:                position, steps = 1, 1        # the prefill yields output[0] and no more
                             policy.push_tokens(output[:1])
        while position < L:
            draft = policy.predict_tokens()[: min(K, L - position)]    # past the end, nothing is verified
            n = length of the longest common prefix of draft and output[position:]
            accepted += n
            rejected += len(draft) - n
            position += n, and one more for the model's own token if position + n < L
            steps += 1
            policy.push_tokens(the tokens of this step)

    The engine stops at the last output token: draft tokens behind it are neither accepted nor rejected, and a
    step whose draft reaches it adds no token of its own. So ``accepted + (steps that added a token) == L``,
    and a perfect prediction takes ``1 + ceil((L - 1) / (K + 1))`` steps, or ``ceil(L / (K + 1))`` with
    `draft_in_prefill`.

    Worked example, K = 2, output ``[5, 6, 7, 8, 9]``, prediction ``[5, 6, 7, 1, 9]``, cursor policy: prefill
    gives 5; the draft [6, 7] is accepted and the model adds 8; the draft [9] is behind the mismatch, so a
    policy that stops there drafts nothing, and the model adds 9: 3 steps, 2 accepted, 0 rejected.

    The policy gets copies: it cannot see a token that is not generated yet.

    Args:
        policy: the drafter; it is reset. An error of it is raised: a figure without its drafts would mislead.
        record: what to replay.
        num_draft_tokens: K, at least 1.
        draft_in_prefill: let the prefill step verify drafts, as a hosted service can.

    Raises:
        ValueError: ``num_draft_tokens < 1``, or a `gpu_align.policies.Policy` drafted more than K tokens.
    """
    loop = PredictorLoop(policy, num_draft_tokens=num_draft_tokens, strict=True, timeout=None)
    loop.start(record.prompt, record.prediction)
    result = PairResult.begin(record, draft_in_prefill)
    for step in loop.follow(record.output, draft_in_prefill):
        result.count(step)
    loop.stop()
    return result


@dataclass
class PolicyResult:
    """What one policy did on all records."""

    name: str
    pairs: list[PairResult]

    @property
    def output_tokens(self) -> int:
        return sum(pair.output_tokens for pair in self.pairs)

    @property
    def steps(self) -> int:
        return sum(pair.steps for pair in self.pairs)

    @property
    def accepted(self) -> int:
        return sum(pair.accepted for pair in self.pairs)

    @property
    def rejected(self) -> int:
        return sum(pair.rejected for pair in self.pairs)

    @property
    def tokens_per_step(self) -> float:
        """``output_tokens / steps``."""
        return self.output_tokens / self.steps

    @property
    def rejected_per_accepted(self) -> float | None:
        """``rejected / accepted``; 0 where nothing was drafted, None where all drafts were rejected."""
        if self.accepted:
            return self.rejected / self.accepted
        return None if self.rejected else 0.0

    @property
    def propose_us_median(self) -> float | None:
        """Median over all steps of the time spent drafting, µs; None where no step drafted."""
        times = [ns for pair in self.pairs for ns in pair.propose_ns]
        return float(np.median(times)) / 1e3 if times else None

    @property
    def rejected_from(self) -> dict[int, int]:
        """Rejected draft tokens by `gpu_align.Source`; empty for a policy that does not tell its source."""
        counts: Counter[int] = Counter()
        for pair in self.pairs:
            counts.update(pair.rejected_from)
        return dict(counts)

    @property
    def reliability(self) -> Reliability:
        """Confidence beside acceptance; empty for a policy that does not tell its confidence."""
        return Reliability.total(pair.reliability for pair in self.pairs)


#: Called as ``progress(policy_name, tokens_just_replayed)`` after each record.
Progress = Callable[[str, int], None]


def simulate(
    records: Sequence[Record],
    policies: Sequence[TokenPredictor],
    num_draft_tokens: int,
    draft_in_prefill: bool = False,
    progress: Progress | None = None,
) -> list[PolicyResult]:
    """`replay` every record with every policy, in this order; one `PolicyResult` a policy.

    `progress` is told after each record.
    """
    results = []
    for policy in policies:
        found = PolicyResult(policy.name or type(policy).__name__, [])
        for record in records:
            found.pairs.append(replay(policy, record, num_draft_tokens, draft_in_prefill))
            if progress is not None:
                progress(found.name, len(record.output))
        results.append(found)
    return results
