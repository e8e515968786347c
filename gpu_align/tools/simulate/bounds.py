"""What copying is worth at best: replays in which the choice of the draft knows the output.

`bound` replays a record with a chooser that sees the rest of the output: it takes the candidate that is right for
longest, and drafts the part that is right. With `everywhere`, any position in prediction, prompt or output, this
is the clairvoyant bound. `perfect_choice` does the same with the candidates of a `Drafter`: what a perfect choice
among them would be worth.

A draft here is a copy from one position. A drafter that replays edits inside of what it copies may exceed both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...config import DrafterConfig
from ...ops.constants import FIRST_CONTEXT, PREDICTION_BASE
from ...ops.draft import SurvivalTables
from ...ops.jit import Entry
from ...ops.recipe_lookup import RecipeTable
from ...ops.reference.draft import CandidateArrays
from ...ops.state import StepArrays
from ...predictors.base import count_accepted
from ...predictors.loop import VerifiedStep
from ..explain import StepView, View
from .records import Record
from .replay import PairResult

IntArray = NDArray[np.int64]


class CandidateReplay(StepView):
    """One slot a record, with all of its output already in the context: only the totals say what is known.

    Args:
        records: what is replayed.
        num_draft_tokens: K: right tokens are counted up to it.
        config: which matches are candidates; the defaults if None.
        max_context_len: T: which positions of a context are remembered depends on it.
        tables: what a choice is made by, for K; those of `config` if None.
        recipes: drafted where no candidate is likelier, for K; none if None.

    Attributes:
        num_prompt, num_output: [R].
    """

    def __init__(
        self,
        records: Sequence[Record],
        num_draft_tokens: int,
        config: DrafterConfig | None,
        max_context_len: int,
        tables: SurvivalTables | None = None,
        recipes: RecipeTable | None = None,
    ) -> None:
        self.num_prompt = np.array([len(r.prompt) for r in records])
        self.num_output = np.array([len(r.output) for r in records])
        if recipes is None:
            recipes = RecipeTable.build(None, num_draft_tokens, "cpu")
        super().__init__(
            [r.prediction for r in records], self.num_prompt.tolist(), max_context_len, num_draft_tokens,
            config, recipes.numpy(), tables,
        )  # fmt: skip
        self._num_draft_tokens = num_draft_tokens
        for row, record in zip(self.token_ids, records, strict=True):
            num_prompt = len(record.prompt)
            row[:num_prompt] = record.prompt
            row[num_prompt : num_prompt + len(record.output)] = record.output

    def look_after(self, slots: IntArray, done: IntArray) -> View:
        """What the drafter sees after ``done[r]`` output tokens of ``slots[r]``, which only grow."""
        return self.look(slots, self.num_prompt[slots] + done)

    def right(self, found: CandidateArrays, slots: IntArray, done: IntArray) -> IntArray:
        """[R, C]: how many tokens of each candidate, copied as they are, come next in the output; at most K."""
        most = np.minimum(self.num_output[slots] - done, self._num_draft_tokens)
        runs = np.zeros(found.remaining.shape, dtype=np.int64)
        _count_right(self.state, found, self.token_ids, slots, self.num_prompt[slots] + done, most, runs)
        return runs


@Entry
def _count_right(
    state: StepArrays,
    found: CandidateArrays,
    token_ids: NDArray[np.int32],
    slots: IntArray,
    totals: IntArray,
    most: IntArray,
    runs: IntArray,
) -> None:
    for r in range(len(slots)):
        tokens, base = token_ids[slots[r]], state.slot_meta[slots[r], PREDICTION_BASE]
        for c in range(runs.shape[1]):
            position, length = found.position[r, c], 0
            while length < min(found.remaining[r, c], most[r]):
                at = position + length
                token = tokens[at] if c >= FIRST_CONTEXT else state.prediction_tokens[base + at]
                if token != tokens[totals[r] + length]:
                    break
                length += 1
            runs[r, c] = length


#: ``candidates(record)`` is called once a record; what it returns is called with the number of output tokens so
#: far, which only grows, and gives the continuations to choose from.
Continuations = Callable[[Record], Callable[[int], Iterable[Sequence[int]]]]


def bound(
    record: Record, num_draft_tokens: int, candidates: Continuations, draft_in_prefill: bool = False
) -> PairResult:
    """Replay with a perfect choice of candidate and length.

    ::

        while position < L:
            draft = the longest prefix of output[position:], up to K tokens, that a candidate starts with

    No draft is ever rejected. A longer draft is never worse than a shorter one for a set of candidates that only
    grows, so with `everywhere` no drafter that copies from prediction or output takes fewer steps.
    """
    result = PairResult.begin(record, draft_in_prefill)
    at = candidates(record)
    position = 0 if draft_in_prefill else 1
    while position < len(record.output):
        truth = record.output[position : position + num_draft_tokens]
        right = max((count_accepted(candidate, truth) for candidate in at(position)), default=0)
        step = VerifiedStep.verify(record.output, position, truth[:right])
        result.count(step)
        position = step.end
    return result


def everywhere(record: Record) -> Callable[[int], Iterable[Sequence[int]]]:
    """Every position in prediction, prompt and output so far; looks ahead, and gives the best of each text."""
    prediction = np.asarray(record.prediction, np.int64)
    context = np.asarray([*record.prompt, *record.output], np.int64)

    def best(done: int) -> list[list[int]]:
        now = len(record.prompt) + done
        return [_longest_in(text, context[now:]) for text in (prediction, context[:now])]

    return best


def _longest_in(text: IntArray, truth: IntArray) -> list[int]:
    """The longest prefix of `truth` that occurs in `text`."""
    starts, length = np.arange(len(text)), 0
    while length < len(truth):
        longer = starts[starts + length < len(text)]
        longer = longer[text[longer + length] == truth[length]]
        if not len(longer):
            break
        starts, length = longer, length + 1
    found: list[int] = truth[:length].tolist()
    return found


def perfect_choice(
    records: Sequence[Record],
    num_draft_tokens: int,
    config: DrafterConfig | None = None,
    draft_in_prefill: bool = False,
    batch_size: int = 64,
) -> list[PairResult]:
    """`bound` with what a `Drafter` chooses from, large enough for the longest record.

    The candidates are those of `gpu_align.ops.draft`, computed by its references: the best matches in prediction
    and context, and the positions around the cursor. config: which matches are candidates. batch_size: records
    that are replayed side by side; the results do not depend on it.
    """
    width = max((len(r.prompt) + len(r.output) for r in records), default=1)
    results = [PairResult.begin(record, draft_in_prefill) for record in records]
    for first in range(0, len(records), batch_size):
        part = records[first : first + batch_size]
        batch = CandidateReplay(part, num_draft_tokens, config, width)
        done = np.minimum(0 if draft_in_prefill else 1, batch.num_output)
        while (slots := np.flatnonzero(done < batch.num_output)).size:
            found = batch.look_after(slots, done[slots]).candidates
            right = batch.right(found, slots, done[slots]).max(axis=1)
            for slot, start, length in zip(slots.tolist(), done[slots].tolist(), right.tolist(), strict=True):
                output = part[slot].output
                step = VerifiedStep.verify(output, start, output[start : start + length])
                results[first + slot].count(step)
                done[slot] = step.end
    return results
