"""Replay: a known output plays the model, and a policy drafts for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...predictors.base import TokenPredictor
from ...predictors.loop import PredictorLoop, VerifiedStep
from ..html import Origin
from .records import Record

if TYPE_CHECKING:
    from typing import Self


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

    @classmethod
    def begin(cls, record: Record, draft_in_prefill: bool = False) -> Self:
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

    So ``accepted + (steps that added a token) == L``, and a perfect prediction takes
    ``1 + ceil((L - 1) / (K + 1))`` steps, or ``ceil(L / (K + 1))`` with `draft_in_prefill`. The policy
    gets copies: it cannot see a token that is not generated yet.

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
    """What one policy did on all records: the sums of its pairs."""

    name: str
    pairs: list[PairResult]
    output_tokens: int = field(init=False)
    steps: int = field(init=False)
    accepted: int = field(init=False)
    rejected: int = field(init=False)

    def __post_init__(self) -> None:
        self.output_tokens = sum(pair.output_tokens for pair in self.pairs)
        self.steps = sum(pair.steps for pair in self.pairs)
        self.accepted = sum(pair.accepted for pair in self.pairs)
        self.rejected = sum(pair.rejected for pair in self.pairs)

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
        name = policy.name or type(policy).__name__
        pairs = []
        for record in records:
            pairs.append(replay(policy, record, num_draft_tokens, draft_in_prefill))
            if progress is not None:
                progress(name, len(record.output))
        results.append(PolicyResult(name, pairs))
    return results
