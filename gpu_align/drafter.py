"""`Drafter`: aligns the predictions of a whole batch with what the model writes, and drafts from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .config import DrafterConfig
from .ops._check import Backend, check_tensor, resolve_backend
from .ops.draft import (
    MAX_MATCH,
    Draft,
    SurvivalTables,
    allocate_draft,
    draft_reference,
    launch_draft,
    length_quarters,
)
from .ops.lcs import lcs_extend_inplace_reference, lcs_row_words
from .ops.lcs.raw import choose_block_words, launch_extend
from .ops.realign import Alignment, allocate_alignment, launch_realign, realign_reference
from .ops.suffix_match import (
    allocate_suffix_match,
    launch_suffix_match,
    suffix_match_reference,
)

#: `start` of a slot that holds no request: beyond every context, so that nothing in it ever matches.
_VACANT = 2**31 - 1


class Drafter:
    """Drafts for up to `max_slots` requests at a time, from their predictions and their own contexts.

    The loop that an engine runs::

        drafter.add(slot, prediction, prompt_len)              # when a request arrives
        while generating:
            draft = drafter.propose(token_ids, total_len, slots, num_sampled)
            ...                                                # verify, append what was accepted
        drafter.remove(slot)                                   # when it is finished

    A step is four operations in one direction: fold the new tokens into each request's LCS row
    (`lcs_extend_inplace`), read off the cursor (`realign`), find the longest suffixes in the prediction and in
    the request's own context (`suffix_match`), choose and write (`draft`).

    A draft is a function of the prediction and the tokens so far: the rows are a cache of that, and it does not
    matter how the tokens were split over steps. Tokens of a slot that were once shown to `propose` must not
    change until `add` is called for it again; `total_len` may shrink (the row is then rebuilt).

    Args:
        max_slots: requests held at a time.
        max_context_len: tokens of prompt and output in a row of the engine's `token_ids`.
        max_prediction_len: longest prediction.
        num_draft_tokens: K, the most drafts a step.
        vocab_size: token ids are below it.
        device: "cuda" runs the kernels, "cpu" the reference implementation; same results.
        config: a `DrafterConfig`.
        backend: "auto" goes by the device; "triton" on the CPU runs the kernels under Triton's interpreter.

    Memory on the device: ``max_slots * max_prediction_len * 4.125`` bytes, and a few a slot.

    Raises:
        ValueError: a size below 1, or a backend that cannot run on the device.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_context_len: int,
        max_prediction_len: int,
        num_draft_tokens: int,
        vocab_size: int,
        device: torch.device | str = "cuda",
        config: DrafterConfig | None = None,
        backend: Backend = "auto",
    ) -> None:
        for name, size in (
            ("max_slots", max_slots),
            ("max_context_len", max_context_len),
            ("max_prediction_len", max_prediction_len),
            ("num_draft_tokens", num_draft_tokens),
            ("vocab_size", vocab_size),
        ):
            if size < 1:
                raise ValueError(f"{name}: expected 1 or more, found {size}")
        self.max_slots = max_slots
        self.max_context_len = max_context_len
        self.max_prediction_len = max_prediction_len
        self.num_draft_tokens = num_draft_tokens
        self.vocab_size = vocab_size
        self.config = config if config is not None else DrafterConfig()

        def per_slot(fill: int, *shape: int) -> torch.Tensor:
            return torch.full((max_slots, *shape), fill, dtype=torch.int32, device=device)

        # What a slot is told by `add`.
        self._prediction = per_slot(0, max_prediction_len)
        self._prediction_len = per_slot(0)
        self._output_start = per_slot(_VACANT)
        self._context_start = per_slot(_VACANT)
        # The carried LCS rows: a cache, rebuilt from the tokens whenever `_row_len` is -1.
        self._row = per_slot(-1, lcs_row_words(max_prediction_len))
        self._row_len = per_slot(-1)

        self.device = self._prediction.device
        self._steps = _steps(resolve_backend(backend, self._prediction), max_prediction_len)
        self._tables = SurvivalTables.load(
            num_draft_tokens, self.device, self.config.survival_table,
            self.config.min_survival, self.config.min_survival_lost,
        )  # fmt: skip
        self._length_quarters = length_quarters(self.config.length_factor)
        # What the operations of a step hand on, one row a batch position.
        self._alignment = allocate_alignment(max_slots, self.device)
        # In the prediction the best and the second best, then in the context.
        self._matches = [allocate_suffix_match(max_slots, self.device) for _ in range(4)]
        self._draft = allocate_draft(max_slots, num_draft_tokens, self.device)

    def add(self, slot: int, prediction: Sequence[int] | npt.NDArray[np.integer], prompt_len: int) -> None:
        """Give `slot` to a new request. Whatever the slot knew is forgotten.

        Args:
            slot: ``0 <= slot < max_slots``; an occupied slot is overwritten.
            prediction: token ids of the predicted output, ``0 <= id < vocab_size``; may be empty.
            prompt_len: tokens of its row that are prompt, ``0 <= prompt_len <= max_context_len``: the output,
                with which the prediction is aligned, begins there.

        On CUDA the prediction is copied once, asynchronously on the current stream, from pinned memory.

        Raises:
            TypeError: the prediction holds something else than integers.
            ValueError: an argument outside its domain; the slot is left as it was.
        """
        self._check_slot(slot)
        if not 0 <= prompt_len <= self.max_context_len:
            raise ValueError(f"prompt_len: expected 0 to {self.max_context_len}, found {prompt_len}")
        tokens = _as_token_array(prediction)
        if len(tokens) > self.max_prediction_len:
            raise ValueError(
                f"prediction: expected at most {self.max_prediction_len} tokens, found {len(tokens)}"
            )
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if wrong.size:
            raise ValueError(
                f"prediction[{wrong[0]}]: expected 0 <= id < {self.vocab_size}, found {tokens[wrong[0]]}"
            )
        _upload(tokens, self._prediction[slot])
        self._prediction_len[slot] = len(tokens)
        self._output_start[slot] = prompt_len
        self._context_start[slot] = 0 if self.config.use_context else _VACANT
        self._row_len[slot] = -1

    def remove(self, slot: int) -> None:
        """Free `slot`: it gets no drafts until the next `add`. Freeing a free slot does nothing.

        Raises:
            ValueError: no such slot.
        """
        self._check_slot(slot)
        self._prediction_len[slot] = 0
        self._output_start[slot] = _VACANT
        self._context_start[slot] = _VACANT
        self._row_len[slot] = -1

    def propose(
        self,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> Draft:
        """Draft the next tokens of every request in the batch.

        Args:
            token_ids: [max_slots, max_context_len] int32, rows contiguous: prompt and output so far, one row a
                slot. Read only.
            total_len: [max_slots] int32: tokens valid in each row, ``<= max_context_len``.
            slots: [B] int64: batch position -> slot, distinct, ``B <= max_slots``.
            num_sampled: [B] int32: tokens sampled this step; 0 means that the request is still in its prefill:
                nothing about it changes and its draft has length 0.

        Returns:
            `Draft` for B requests: views of the drafter's own buffers, which the next call rewrites. A slot that
            holds no request gets length 0.

        On CUDA nothing is allocated, copied to the host or waited for after the first call, which compiles the
        kernels; the call can be captured in a CUDA graph, one for each B. Values inside the tensors are only
        checked on the CPU.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a shape, device or layout differs from the above; on the CPU also an unknown slot.
        """
        batch_size = self._check_step(token_ids, total_len, slots, num_sampled)
        steps, text, text_len = self._steps, self._prediction, self._prediction_len
        alignment, matches, out = self._rows(batch_size)
        start, active = self._output_start, num_sampled
        steps.extend(self._row, self._row_len, token_ids, start, total_len, text, text_len, slots, active)
        steps.realign(self._row, text_len, slots, active, *alignment)
        steps.match(
            token_ids, start, total_len, text, text_len, slots, active, alignment.cursor, *matches[:4],
            self.config.min_match, MAX_MATCH, True,
        )  # fmt: skip
        steps.match(
            token_ids, self._context_start, total_len, token_ids, total_len, slots, active, None, *matches[4:],
            self.config.min_context_match, MAX_MATCH, False,
        )  # fmt: skip
        steps.draft(
            text, text_len, token_ids, start, total_len, slots, active, *alignment, *matches,
            self._tables, *out, self._length_quarters, self.vocab_size,
        )  # fmt: skip
        return out

    def _rows(self, batch_size: int) -> tuple[Alignment, list[torch.Tensor], Draft]:
        """Views of the step's buffers for this batch size."""
        return (
            Alignment(*(t[:batch_size] for t in self._alignment)),
            [tensor[:batch_size] for match in self._matches for tensor in match],
            Draft(*(t[:batch_size] for t in self._draft)),
        )

    def _check_slot(self, slot: int) -> None:
        if isinstance(slot, bool) or not isinstance(slot, (int, np.integer)):
            raise TypeError(f"slot: expected an int, found {type(slot).__name__}")
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot: expected 0 <= slot < {self.max_slots}, found {slot}")

    def _check_step(
        self,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> int:
        """Check what the operations cannot know: the sizes promised at construction. Returns B."""
        size = self.max_slots, self.max_context_len
        check_tensor(
            "token_ids", token_ids, dtype=torch.int32, shape=size, device=self.device, contiguous="inner"
        )
        check_tensor("total_len", total_len, dtype=torch.int32, shape=size[:1], device=self.device)
        check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=self.device)
        batch_size = slots.shape[0]
        check_tensor("num_sampled", num_sampled, dtype=torch.int32, shape=(batch_size,), device=self.device)
        if batch_size > self.max_slots:
            raise ValueError(f"slots: expected at most {self.max_slots}, found {batch_size}")
        if self.device.type == "cpu" and batch_size:
            low, high = int(slots.min()), int(slots.max())
            if low < 0 or high >= self.max_slots:
                raise ValueError(
                    f"slots: expected 0 <= slot < {self.max_slots}, found {low if low < 0 else high}"
                )
        return batch_size


class _Steps(NamedTuple):
    """The operations of a step without their checks: `propose` has made those once for all of them."""

    extend: Callable[..., object]
    realign: Callable[..., object]
    match: Callable[..., object]
    draft: Callable[..., object]


def _steps(backend: str, max_prediction_len: int) -> _Steps:
    if backend == "triton":
        extend = partial(launch_extend, block_words=choose_block_words(max_prediction_len, None))
        return _Steps(extend, launch_realign, launch_suffix_match, launch_draft)
    return _Steps(lcs_extend_inplace_reference, realign_reference, suffix_match_reference, draft_reference)


def _upload(tokens: npt.NDArray[np.int32], row: torch.Tensor) -> None:
    """Copy `tokens` to the beginning of `row`, without the host waiting for it."""
    source = torch.from_numpy(tokens)
    if row.device.type == "cuda":
        # PyTorch's pinned allocator keeps the block until the copy on this stream is done.
        source = source.pin_memory()
    row[: len(tokens)].copy_(source, non_blocking=True)


def _as_token_array(prediction: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """[n] int32 of our own, from any sequence of integers; ids beyond int32 are clipped out of the vocabulary."""
    if not isinstance(prediction, (Sequence, np.ndarray)):
        raise TypeError(f"prediction: expected a sequence of integers, found {type(prediction).__name__}")
    if len(prediction) == 0:
        return np.zeros(0, dtype=np.int32)
    try:
        tokens = np.asarray(prediction)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"prediction: expected a flat sequence of integers ({error})") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"prediction: expected a flat sequence of integers, found {tokens.ndim} dimensions of {tokens.dtype}"
        )
    return np.clip(tokens, -1, 2**31 - 1).astype(np.int32)
