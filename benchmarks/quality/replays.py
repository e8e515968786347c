"""Replays beside the simulator's: our drafter in batches, its confidences, and a bound of all choices.

`bound` replays a record with a chooser that sees the rest of the output: it takes the candidate that is right for
longest, and drafts the part that is right. With `everywhere`, any position in prediction, prompt or output, this
is the clairvoyant bound. A draft here is a copy from one position: a drafter that replays edits inside of what it
copies may exceed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_align import Drafter, DrafterConfig, Recipes
from gpu_align.predictors.base import count_accepted
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import sizes_for
from gpu_align.tools.simulate.replay import PairResult, VerifiedStep

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
    """Counts of verified draft tokens, those up to the first wrong one of each draft, by bins of their confidence.

    Attributes:
        drafts, accepted: [NUM_BINS] int64, tokens a bin, and those of them that were accepted.
        confidence: [NUM_BINS] float64, the sum of their confidences: that of each *given the ones before it*.
    """

    drafts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    confidence: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.float64))

    def add(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Count one draft: `confidence` of its verified tokens, of which the first `num_accepted` were right."""
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

    def take(self, other: Reliability) -> None:
        """Count what `other` has counted, too."""
        self.drafts += other.drafts
        self.accepted += other.accepted
        self.confidence += other.confidence

    def deciles(self) -> list[Decile]:
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


@dataclass
class OurPair(PairResult):
    """Counts of our drafter on one record, and its confidences beside the accepted drafts."""

    reliability: Reliability = field(default_factory=Reliability, repr=False)

    def count(self, step: VerifiedStep) -> None:
        super().count(step)
        if step.confidence is not None:
            # The tokens after the first wrong one were not put to the test.
            self.reliability.add(step.confidence[: min(step.accepted + 1, len(step.draft))], step.accepted)


def replay_batched(
    records: Sequence[Record],
    num_draft_tokens: int,
    config: DrafterConfig | None = None,
    draft_in_prefill: bool = False,
    batch_size: int = 64,
    recipes: Recipes | None = None,
    memory: bool = False,
    related: Sequence[bool] = (),
) -> list[PairResult]:
    """`replay` with `our_drafter`, with up to `batch_size` records drafted for in one call; faster.

    memory: take the records' predictions for texts of earlier answers. related: of which records these are answers
    to requests like it; none if empty.
    """
    sizes = sizes_for(records, recipes)
    drafter = Drafter(
        max_slots=batch_size, **sizes._asdict(), num_draft_tokens=num_draft_tokens, device="cpu",
        config=config, recipes=recipes,
    )  # fmt: skip
    token_ids = torch.zeros((batch_size, sizes.max_context_len), dtype=torch.int32)
    total_len = torch.zeros(batch_size, dtype=torch.int32)
    rows, lengths = token_ids.numpy(), total_len.numpy()
    results: list[PairResult] = [OurPair.begin(record, draft_in_prefill) for record in records]
    # Longest first: the last calls then still have a full batch. What the prefill ends is not drafted for.
    prefilled = 0 if draft_in_prefill else 1
    waiting = sorted(range(len(records)), key=lambda i: len(records[i].output))
    waiting = [i for i in waiting if len(records[i].output) > prefilled]
    running: dict[int, int] = {}  # slot -> record

    def append(slot: int, tokens: Sequence[int]) -> None:
        rows[slot, lengths[slot] : lengths[slot] + len(tokens)] = tokens
        lengths[slot] += len(tokens)

    while waiting or running:
        for slot in [slot for slot in range(batch_size) if slot not in running][: len(waiting)]:
            running[slot] = index = waiting.pop()
            record = records[index]
            is_related = bool(related) and related[index]
            drafter.add(slot, record.prediction, len(record.prompt), memory=memory, related=is_related)
            lengths[slot] = 0
            append(slot, [*record.prompt, *record.output[:prefilled]])
        slots = sorted(running)
        draft = drafter.propose(
            token_ids, total_len, torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32)
        )
        drafted = zip(slots, draft.length.tolist(), draft.source.tolist(), strict=True)
        tokens, confidence = draft.token_ids.numpy(), draft.confidence.numpy()
        for b, (slot, length, source) in enumerate(drafted):
            record = records[running[slot]]
            told = source, confidence[b, :length].tolist()
            start = int(lengths[slot]) - len(record.prompt)
            step = VerifiedStep.verify(record.output, start, tokens[b, :length].tolist(), *told)
            results[running[slot]].count(step)
            append(slot, record.output[start : step.end])
            if step.end == len(record.output):
                del running[slot]
    return results


#: ``candidates(record)`` is called once a record; what it returns is called with the number of output tokens so
#: far, which only grows, and gives the continuations to choose from.
Continuations = Callable[[Record], Callable[[int], Iterable[Sequence[int]]]]


def bound(record: Record, num_draft_tokens: int, candidates: Continuations) -> PairResult:
    """Replay with a perfect choice of candidate and length.

    ::

        while position < L:
            draft = the longest prefix of output[position:], up to K tokens, that a candidate starts with

    No draft is ever rejected. A longer draft is never worse than a shorter one for a set of candidates that only
    grows, so with `everywhere` no drafter that copies from prediction or output takes fewer steps.
    """
    result = PairResult.begin(record, False)
    at = candidates(record)
    position = 1
    while position < len(record.output):
        truth = record.output[position : position + num_draft_tokens]
        right = max((count_accepted(candidate, truth) for candidate in at(position)), default=0)
        step = VerifiedStep.verify(record.output, position, truth[:right])
        result.count(step)
        position = step.end
    return result


def everywhere(record: Record, matched: bool = False) -> Callable[[int], Iterable[Sequence[int]]]:
    """Every position in prediction, prompt and output so far; looks ahead, and gives the best of each text.

    matched: only those behind a token that is the last of the output.
    """
    prediction = np.asarray(record.prediction, np.int64)
    context = np.asarray([*record.prompt, *record.output], np.int64)

    def best(done: int) -> list[list[int]]:
        now = len(record.prompt) + done
        last = context[now - 1] if matched else None
        return [_longest_in(text, context[now:], last) for text in (prediction, context[:now])]

    return best


def _longest_in(text: NDArray[np.int64], truth: NDArray[np.int64], last: int | None = None) -> list[int]:
    """The longest prefix of `truth` that occurs in `text`, behind `last` where that is told."""
    starts, length = np.arange(len(text)) if last is None else np.flatnonzero(text[:-1] == last) + 1, 0
    while length < len(truth):
        longer = starts[starts + length < len(text)]
        longer = longer[text[longer + length] == truth[length]]
        if not len(longer):
            break
        starts, length = longer, length + 1
    found: list[int] = truth[:length].tolist()
    return found
