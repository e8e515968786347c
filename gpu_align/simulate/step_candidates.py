"""Known outputs through the parts of a drafting step, with every candidate in view.

What a `Drafter` chooses from is recomputed by its own references, for many records side by side. Bounds and the
survival tables are made of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_align.config import DrafterConfig
from gpu_align.ops._jit import Entry
from gpu_align.ops.constants import FIRST_CONTEXT, PREDICTION_BASE
from gpu_align.ops.draft import SurvivalTables
from gpu_align.ops.draft.reference import Candidates
from gpu_align.ops.recipe_lookup import RecipeTable
from gpu_align.ops.state import StepArrays
from gpu_align.ops.step.view import StepView, View
from gpu_align.simulate.records import Record

IntArray = NDArray[np.int64]


class CandidateReplay:
    """One slot a record, with all of its output already in the context: only the totals say what is known.

    Args:
        records: what is replayed.
        num_draft_tokens: K: right tokens are counted up to it.
        config: which matches are candidates; the defaults if None.
        max_context_len: T; None is as long as the longest of `records`. Which positions of a context are
            remembered depends on it.
        tables: what a choice is made by, for K; those of `config` if None.
        recipes: drafted where no candidate is likelier, for K; none if None.

    Attributes:
        token_ids: [R, T] int32, prompt and output of each record.
        num_prompt, num_output: [R].
        state: the step's, on the CPU.
    """

    def __init__(
        self,
        records: Sequence[Record],
        num_draft_tokens: int,
        config: DrafterConfig | None = None,
        max_context_len: int | None = None,
        tables: SurvivalTables | None = None,
        recipes: RecipeTable | None = None,
    ) -> None:
        self.num_prompt = np.array([len(r.prompt) for r in records])
        self.num_output = np.array([len(r.output) for r in records])
        width = max_context_len or max(int((self.num_prompt + self.num_output).max()), 1)
        if recipes is None:
            recipes = RecipeTable.build(None, num_draft_tokens, "cpu")
        self._view = StepView(
            [r.prediction for r in records], self.num_prompt.tolist(), width, num_draft_tokens, config,
            recipes.numpy(), tables,
        )  # fmt: skip
        self.state, self.token_ids = self._view.state, self._view.token_ids
        self._num_draft_tokens = num_draft_tokens
        for row, record in zip(self.token_ids, records, strict=True):
            num_prompt = len(record.prompt)
            row[:num_prompt] = record.prompt
            row[num_prompt : num_prompt + len(record.output)] = record.output

    def look(self, slots: IntArray, done: IntArray) -> View:
        """What the drafter sees after ``done[r]`` output tokens of ``slots[r]``, which only grow."""
        return self._view.look(slots, self.num_prompt[slots] + done)

    def right(self, found: Candidates, slots: IntArray, done: IntArray) -> IntArray:
        """[R, C]: how many tokens of each candidate, copied as they are, come next in the output; at most K."""
        most = np.minimum(self.num_output[slots] - done, self._num_draft_tokens)
        runs = np.zeros(found.remaining.shape, dtype=np.int64)
        _count_right(self.state, found, self.token_ids, slots, self.num_prompt[slots] + done, most, runs)
        return runs


@Entry
def _count_right(
    state: StepArrays,
    found: Candidates,
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
