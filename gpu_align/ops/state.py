"""The tensors that a step reads and writes, and their NumPy views."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import constants as c

#: `StepState` of NumPy arrays.
StepArrays = Any


class StepState(NamedTuple):
    """Everything a drafter keeps on the device; `gpu_align.ops.constants` says what is in which column."""

    prediction_tokens: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    slot_meta: torch.Tensor
    align_state: torch.Tensor
    lcs_row: torch.Tensor
    edits: torch.Tensor
    context_index: torch.Tensor

    def numpy(self) -> StepArrays:
        """The same memory as arrays; on the CPU only."""
        return StepState._make(tensor.numpy() for tensor in self)


class SlotMeta(NamedTuple):
    """What the host says about a slot's request, in the order of the columns of ``slot_meta``."""

    prediction_base: int = 0
    prediction_len: int = 0
    prediction_shift: int = 0
    output_start: int = c.VACANT
    context_start: int = c.VACANT
    recipe_packs: int = 0
    text_kind: int = c.TEXT_PREDICTION


def allocate_state(
    max_slots: int, max_context_len: int, num_tokens: int, device: torch.device | str
) -> StepState:
    """State of `max_slots` vacant slots and an arena of `num_tokens` tokens."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slot_meta, align_state = zeros(max_slots, c.SLOT_META), zeros(max_slots, c.ALIGN_STATE)
    slot_meta[:, c.OUTPUT_START] = slot_meta[:, c.CONTEXT_START] = c.VACANT
    align_state[:, c.SEEN] = -1
    return StepState(
        zeros(num_tokens), zeros(num_tokens), zeros(num_tokens), slot_meta, align_state,
        zeros(max_slots, c.WINDOW, dtype=torch.int16), zeros(max_slots, c.MAX_EDITS, c.EDIT),
        zeros(max_slots, 1 << c.context_index_bits(max_context_len), c.WAYS),
    )  # fmt: skip


class StepSettings(NamedTuple):
    """What a step does not read from tensors."""

    #: Drafts for each four tokens of matched suffix.
    length_quarters: int
    #: Shortest match in the prediction and in the context, 1 to 64.
    min_match: int
    min_context_match: int
    #: A draft ends before the first token that is not below it.
    vocab_size: int


class DraftChoice(NamedTuple):
    """What a step drafts from: the best candidate, or a recipe in its place."""

    #: Of the candidate; from `FIRST_CONTEXT` on its position is one of the context.
    lane: Any
    position: Any
    #: Tokens before it that agree.
    matched: Any
    class_id: Any
    #: Drafts that it is good for; 0 where there is none.
    num: Any
    #: The recipe that is drafted instead, or -1, and its drafts.
    recipe: Any
    num_recipe: Any
