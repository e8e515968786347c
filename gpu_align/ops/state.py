"""The tensors that a step reads and writes, and their NumPy views for the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .layout import (
    ABOUT,
    ALIGNED,
    CONTEXT_START,
    EDIT,
    EDITS,
    OUTPUT_START,
    SEEN,
    TEXT_BASE,
    TEXT_LEN,
    TEXT_SHIFT,
    VACANT,
    WAYS,
    WINDOW,
    index_bits,
    recent_bits,
)

IntArray = npt.NDArray[np.signedinteger[Any]]


class StepState(NamedTuple):
    """Everything a drafter keeps on the device; `gpu_align.ops.layout` says what is in which column."""

    text: torch.Tensor
    order: torch.Tensor
    first: torch.Tensor
    about: torch.Tensor
    aligned: torch.Tensor
    row: torch.Tensor
    edits: torch.Tensor
    recent: torch.Tensor

    def numpy(self) -> StepArrays:
        """The same memory as arrays; on the CPU only."""
        return StepArrays(*(tensor.numpy() for tensor in self))


class StepArrays(NamedTuple):
    """`StepState` as NumPy sees it."""

    text: IntArray
    order: IntArray
    first: IntArray
    about: IntArray
    aligned: IntArray
    row: IntArray
    edits: IntArray
    recent: IntArray


def allocate_state(
    max_slots: int, max_context_len: int, num_tokens: int, device: torch.device | str
) -> StepState:
    """State of `max_slots` vacant slots and an arena of `num_tokens` tokens."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    about, aligned = zeros(max_slots, ABOUT), zeros(max_slots, ALIGNED)
    about[:, OUTPUT_START] = about[:, CONTEXT_START] = VACANT
    aligned[:, SEEN] = -1
    return StepState(
        zeros(num_tokens), zeros(num_tokens), zeros(num_tokens), about, aligned,
        zeros(max_slots, WINDOW, dtype=torch.int16), zeros(max_slots, EDITS, EDIT),
        zeros(max_slots, 1 << recent_bits(max_context_len), WAYS),
    )  # fmt: skip


def about_request(
    base: int, num_tokens: int, capacity: int, output_start: int, use_context: bool
) -> npt.NDArray[np.int32]:
    """[ABOUT] int32: a slot's row of ``about`` for a request.

    Args:
        base: where its prediction begins in the arena.
        num_tokens: tokens of the prediction; 0 is none.
        capacity: tokens of the prediction's pages, which its index was built for (`index_bits`).
        output_start: tokens of its prompt.
        use_context: whether the request's own context may be drafted from.
    """
    about = np.zeros(ABOUT, dtype=np.int32)
    about[[TEXT_BASE, TEXT_LEN, TEXT_SHIFT]] = base, num_tokens, 32 - index_bits(capacity)
    about[[OUTPUT_START, CONTEXT_START]] = output_start, 0 if use_context else VACANT
    return about
