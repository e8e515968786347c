"""Known outputs through the parts of a drafting step, with every candidate in view.

What a `Drafter` chooses from is recomputed by its own references, for many records side by side. Bounds and the
survival tables are made of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_align.config import DrafterConfig
from gpu_align.ops.draft.reference import IS_CONTEXT, Candidates, candidates
from gpu_align.ops.index import build_index
from gpu_align.ops.layout import (
    PAGE,
    TEXT_BASE,
    index_bits,
)
from gpu_align.ops.state import about_request, allocate_state
from gpu_align.ops.step.reference import recent_shift, take_in
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
    ) -> None:
        self._config = config if config is not None else DrafterConfig()
        self._num_draft_tokens = num_draft_tokens
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

    def candidates(self, slots: IntArray, done: IntArray) -> Candidates:
        """What the drafter chooses from after ``done[r]`` output tokens of ``slots[r]``, which only grow."""
        totals = self.num_prompt[slots] + done
        take_in(self.state, self.context, slots, totals)
        return candidates(
            self.state, self.context, slots, totals, self._config.min_match, self._config.min_context_match,
            recent_shift(self.state),
        )  # fmt: skip

    def right(self, found: Candidates, slots: IntArray, done: IntArray) -> IntArray:
        """[R, C]: how many tokens of each candidate, copied as they are, come next in the output; at most K."""
        start = np.where(found.room > 0, found.position, 0)
        width = self.context.shape[1]
        start += np.where(IS_CONTEXT, (slots * width)[:, None], self.state.about[slots, TEXT_BASE, None])
        most = np.minimum(found.room, (self.num_output[slots] - done)[:, None])
        runs = np.zeros(start.shape, dtype=np.int64)
        flat = self.context.reshape(-1)
        truth = slots * width + self.num_prompt[slots] + done
        row, lane = np.nonzero(most > 0)
        for k in range(self._num_draft_tokens):
            if not row.size:
                break
            place, own = start[row, lane] + k, IS_CONTEXT[lane]
            token = np.where(own, flat[np.where(own, place, 0)], self.state.text[np.where(own, 0, place)])
            good = token == flat[truth[row] + k]
            row, lane = row[good], lane[good]
            runs[row, lane] = k + 1
            more = k + 1 < most[row, lane]
            row, lane = row[more], lane[more]
        return runs
