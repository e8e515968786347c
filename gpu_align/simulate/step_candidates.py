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
from gpu_align.ops.draft import SurvivalTables
from gpu_align.ops.draft.reference import FIRST_OWN, Candidates
from gpu_align.ops.index import build_index
from gpu_align.ops.layout import PAGE, TEXT_BASE, index_bits
from gpu_align.ops.recipe import RecipeTable
from gpu_align.ops.state import StepArrays, about_request, allocate_state
from gpu_align.ops.step.reference import TableArrays
from gpu_align.ops.step.view import View, look
from gpu_align.simulate.records import Record

IntArray = NDArray[np.int64]


class CandidateReplay:
    """One slot a record, with all of its output already in the context: only the totals say what is known.

    Args:
        records: what is replayed.
        num_draft_tokens: K: nobody asks for more tokens that are right.
        config: which matches are candidates; the defaults if None.
        max_context_len: T; None is as long as the longest of `records`. Which places of a context are remembered
            hangs on it.
        tables: what a choice is made by, for K; those of `config` if None.

    Attributes:
        context: [R, T] int32, prompt and output of each record.
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
    ) -> None:
        self._config = config if config is not None else DrafterConfig()
        if tables is None:
            tables = SurvivalTables.load(
                num_draft_tokens, "cpu", self._config.survival_table,
                self._config.min_survival, self._config.min_survival_lost,
            )  # fmt: skip
        self._tables = TableArrays.of(tables)
        self._recipes = RecipeTable.build(None, num_draft_tokens, "cpu").numpy()
        self.num_prompt = np.array([len(r.prompt) for r in records])
        self.num_output = np.array([len(r.output) for r in records])
        width = max_context_len or max(int((self.num_prompt + self.num_output).max()), 1)
        capacities = [max(-(-len(r.prediction) // PAGE), 1) * PAGE for r in records]
        state = allocate_state(len(records), width, sum(capacities), "cpu")
        self.state = state.numpy()
        self.context = np.zeros((len(records), width), dtype=np.int32)
        base = 0
        for slot, (record, capacity) in enumerate(zip(records, capacities, strict=True)):
            num_prompt, num_text = len(record.prompt), len(record.prediction)
            self.context[slot, :num_prompt] = record.prompt
            self.context[slot, num_prompt : num_prompt + len(record.output)] = record.output
            self.state.about[slot] = about_request(
                base, num_text, capacity, num_prompt, self._config.use_context
            )
            self.state.text[base : base + num_text] = record.prediction
            if num_text:
                build_index(state.text, state.order, state.first, base, num_text, index_bits(capacity))
            base += capacity

    def look(self, slots: IntArray, done: IntArray) -> View:
        """What the drafter sees after ``done[r]`` output tokens of ``slots[r]``, which only grow."""
        return look(
            self.state,
            self._tables,
            self._recipes,
            self.context,
            slots,
            self.num_prompt[slots] + done,
            self._config,
        )

    def right(self, found: Candidates, slots: IntArray, done: IntArray) -> IntArray:
        """[R, C]: how many tokens of each candidate, copied as they are, come next in the output; at most K."""
        most = np.minimum(self.num_output[slots] - done, self._tables.confidence.shape[1])
        runs = np.zeros(found.room.shape, dtype=np.int64)
        _count_right(self.state, found, self.context, slots, self.num_prompt[slots] + done, most, runs)
        return runs


@Entry
def _count_right(
    state: StepArrays,
    found: Candidates,
    context: NDArray[np.int32],
    slots: IntArray,
    totals: IntArray,
    most: IntArray,
    runs: IntArray,
) -> None:
    for r in range(len(slots)):
        row, base = context[slots[r]], state.about[slots[r], TEXT_BASE]
        for c in range(runs.shape[1]):
            position, length = found.position[r, c], 0
            while length < min(found.room[r, c], most[r]):
                place = position + length
                token = row[place] if c >= FIRST_OWN else state.text[base + place]
                if token != row[totals[r] + length]:
                    break
                length += 1
            runs[r, c] = length
