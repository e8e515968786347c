"""Replay: a known output plays the model, and a policy drafts for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..html import Origin
from ..policies.base import Policy
from .records import Record

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


class Drafted(NamedTuple):
    """One draft, its source and confidence where the policy tells them, and its drafting time, ns."""

    tokens: Sequence[int]
    source: int | None = None
    confidence: Sequence[float] | None = None
    ns: int = 0


@dataclass
class PairResult:
    """What one policy did on one record.

    Attributes:
        id: the record's.
        output_tokens: L, tokens replayed.
        steps: forward passes of the model, prefill included.
        accepted: draft tokens that were equal to the output.
        rejected: draft tokens that were not, up to the last output token.
        propose_ns: a step's drafting time, `extend` and `propose` together, [steps with a draft call].
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


def replay(
    policy: Policy, record: Record, num_draft_tokens: int, draft_in_prefill: bool = False
) -> PairResult:
    """Run one policy over one record.

    ::

        policy.start(prompt, prediction, K)
        if draft_in_prefill: position, steps = 0, 0        # the prefill verifies drafts like any step
        else:                position, steps = 1, 1        # the prefill yields output[0] and no more
                             policy.extend(output[:1])
        while position < L:
            draft = policy.propose()[: L - position]       # past the end, nothing is verified
            n = length of the longest common prefix of draft and output[position:]
            accepted += n
            rejected += len(draft) - n
            position += n, and one more for the model's own token if position + n < L
            steps += 1
            policy.extend(the tokens of this step)

    The engine stops at the last output token: draft tokens behind it are neither accepted nor rejected, and a
    step whose draft reaches it adds no token of its own. So ``accepted + (steps that added a token) == L``,
    and a perfect prediction takes ``1 + ceil((L - 1) / (K + 1))`` steps, or ``ceil(L / (K + 1))`` with
    `draft_in_prefill`.

    Worked example, K = 2, output ``[5, 6, 7, 8, 9]``, prediction ``[5, 6, 7, 1, 9]``, cursor policy: prefill
    gives 5; the draft [6, 7] is accepted and the model adds 8; the draft [9] is behind the mismatch, so a
    policy that stops there drafts nothing, and the model adds 9: 3 steps, 2 accepted, 0 rejected.

    The policy gets copies: it cannot see a token that is not generated yet.

    Args:
        policy: the drafter; it is restarted.
        record: what to replay.
        num_draft_tokens: K, at least 1.
        draft_in_prefill: let the prefill step verify drafts, as a hosted service can.

    Raises:
        ValueError: ``num_draft_tokens < 1``, or the policy drafted more than K tokens.
    """
    steps = verification_steps(record, num_draft_tokens, draft_in_prefill, policy.name)
    policy.start(list(record.prompt), list(record.prediction), num_draft_tokens)
    try:
        fresh = next(steps)  # tokens of the last step, not yet given to the policy
        while True:
            began = time.perf_counter_ns()
            if fresh:
                policy.extend(fresh)
            draft = policy.propose()
            ns = time.perf_counter_ns() - began
            told = getattr(policy, "source", None), getattr(policy, "confidence", None)
            fresh = steps.send(Drafted(draft, *told, ns))
    except StopIteration as finished:
        result: PairResult = finished.value
        return result


def verification_steps(
    record: Record, num_draft_tokens: int, draft_in_prefill: bool = False, name: str = ""
) -> Generator[list[int], Drafted, PairResult]:
    """The loop of `replay` without the policy: yields the tokens of a step, and takes the next `Drafted`.

    It first yields what the prefill gave (nothing with `draft_in_prefill`). A caller that runs several of these
    side by side can draft for all of them at once.

    Args:
        record: what to replay.
        num_draft_tokens: K, at least 1.
        draft_in_prefill: let the prefill step verify drafts.
        name: the policy's, for errors.

    Returns:
        The `PairResult`, once the output has ended.

    Raises:
        ValueError: ``num_draft_tokens < 1``, or a draft of more than K tokens.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens: expected at least 1, found {num_draft_tokens}")
    output, length = record.output, len(record.output)
    origins = np.full(length, Origin.GENERATED, dtype=np.uint8)
    result = PairResult(record.id, length, 0, 0, 0, [], origins, np.zeros(length, dtype=np.int32))
    position, steps = (0, 0) if draft_in_prefill else (1, 1)
    fresh = output[:position]
    while position < length:
        drafted = yield fresh
        if len(drafted.tokens) > num_draft_tokens:
            raise ValueError(
                f"policy {name!r}: expected at most {num_draft_tokens} draft tokens, "
                f"found {len(drafted.tokens)}"
            )
        draft = drafted.tokens[: length - position]
        matched = _common_prefix(draft, output[position : position + len(draft)])
        wrong = len(draft) - matched
        if drafted.source is not None and wrong:
            result.rejected_from[drafted.source] += wrong
        if drafted.confidence is not None:
            # The tokens behind the first wrong one were not put to the test.
            result.reliability.add(drafted.confidence[: min(matched + 1, len(draft))], matched)
        if matched:
            origins[position : position + matched] = (
                Origin.ACCEPTED if drafted.source is None else drafted.source
            )
        result.propose_ns.append(drafted.ns)
        result.accepted += matched
        result.rejected += wrong
        end = min(position + matched + 1, length)
        result.step_of[position:end] = steps
        fresh = output[position:end]
        position = end
        steps += 1
    result.steps = steps
    return result


def _common_prefix(draft: Sequence[int], truth: Sequence[int]) -> int:
    if list(draft) == truth:
        return len(truth)
    return next(i for i, (guess, token) in enumerate(zip(draft, truth, strict=True)) if guess != token)


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
    policies: Sequence[Policy],
    num_draft_tokens: int,
    draft_in_prefill: bool = False,
    progress: Progress | None = None,
) -> list[PolicyResult]:
    """`replay` every record with every policy, in this order; one `PolicyResult` a policy.

    Args:
        records: what to replay.
        policies: each is restarted for every record.
        num_draft_tokens: K, at least 1.
        draft_in_prefill: let the prefill step verify drafts.
        progress: told after each record.
    """
    results = []
    for policy in policies:
        pairs = []
        for record in records:
            pairs.append(replay(policy, record, num_draft_tokens, draft_in_prefill))
            if progress is not None:
                progress(policy.name, len(record.output))
        results.append(PolicyResult(policy.name, pairs))
    return results
