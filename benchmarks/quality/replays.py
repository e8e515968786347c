"""Replays beside the simulator's: our drafter in batches, its confidences, and a bound of all choices.

`bound` is the clairvoyant one: its chooser sees the rest of the output. A draft here is a copy from one position:
a drafter that replays edits inside of what it copies may exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_align import Drafter, DrafterConfig, Recipes
from gpu_align.tools.simulate.policies import sizes_for
from gpu_align.tools.simulate.replay import PairResult, Record, VerifiedStep


def deciles(counts: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Of `OurPair.by_tenth`: how many draft tokens, their mean confidence, and the share that was accepted."""
    found: list[dict[str, Any]] = []
    for i, (drafts, *sums) in enumerate(counts.T.tolist()):
        confidence, accepted = (round(each / drafts, 4) if drafts else None for each in sums)
        found.append({"low": i / 10, "drafts": int(drafts), "confidence": confidence, "accepted": accepted})
    return found


@dataclass
class OurPair(PairResult):
    """Counts of our drafter on one record.

    Attributes:
        by_tenth: [3, 10], verified draft tokens, up to the first wrong one of each draft, by tenths of their
            confidence, the sum of the confidences, and those of them that were accepted. A confidence is that of a
            token *given the ones before it*.
    """

    by_tenth: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 10)), repr=False)

    def count(self, step: VerifiedStep) -> None:
        super().count(step)
        if step.confidence is not None:
            # The tokens after the first wrong one were not put to the test.
            values = np.asarray(step.confidence[: min(step.accepted + 1, len(step.draft))], np.float64)
            tenths = np.minimum((values * 10).astype(np.int64), 9)
            weights = np.ones(len(values)), values, np.arange(len(values)) < step.accepted
            self.by_tenth += [np.bincount(tenths, weight, 10) for weight in weights]


def replay_batched(
    records: Sequence[Record],
    num_draft_tokens: int,
    config: DrafterConfig | None = None,
    recipes: Recipes | None = None,
    batch_size: int = 64,
) -> list[PairResult]:
    """`replay` with `our_drafter`, with up to `batch_size` records drafted for in one call; four times as fast."""
    sizes = sizes_for(records, recipes)
    drafter = Drafter(
        max_slots=batch_size, **sizes._asdict(), num_draft_tokens=num_draft_tokens, device="cpu",
        config=config, recipes=recipes,
    )  # fmt: skip
    rows, lengths = drafter.token_ids.numpy(), drafter.total_len.numpy()
    results: list[PairResult] = [OurPair.begin(record) for record in records]
    # Longest first: the last calls then still have a full batch. What the prefill ends is not drafted for.
    waiting = sorted(range(len(records)), key=lambda i: len(records[i].output))
    waiting = [i for i in waiting if len(records[i].output) > 1]
    running: dict[int, int] = {}  # slot -> record

    def append(slot: int, tokens: Sequence[int]) -> None:
        rows[slot, lengths[slot] : lengths[slot] + len(tokens)] = tokens
        lengths[slot] += len(tokens)

    while waiting or running:
        for slot in [slot for slot in range(batch_size) if slot not in running][: len(waiting)]:
            running[slot] = index = waiting.pop()
            record = records[index]
            drafter.add(slot, record.prediction, len(record.prompt), kind=record.kind)
            lengths[slot] = 0
            append(slot, [*record.prompt, record.output[0]])
        slots = sorted(running)
        draft = drafter.propose(torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32))
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


def bound(record: Record, num_draft_tokens: int) -> PairResult:
    """Replay with a perfect choice: the longest prefix of what follows, up to K tokens, that prediction, prompt or
    output so far has anywhere.

    No draft is ever rejected. A longer draft is never worse than a shorter one, so no drafter that copies from
    prediction or output takes fewer steps than this.
    """

    def longest_in(text: NDArray[np.int64]) -> int:
        starts = np.arange(len(text))
        for length, token in enumerate(truth):
            starts = starts[starts + length < len(text)]
            starts = starts[text[starts + length] == token]
            if not len(starts):
                return length
        return len(truth)

    result = PairResult.begin(record)
    prediction = np.asarray(record.prediction, np.int64)
    context = np.asarray([*record.prompt, *record.output], np.int64)
    position = 1
    while position < len(record.output):
        now = len(record.prompt) + position
        truth = context[now : now + num_draft_tokens]
        right = max(map(longest_in, (prediction, context[:now])))
        step = VerifiedStep.verify(record.output, position, truth[:right].tolist())
        result.count(step)
        position = step.end
    return result
