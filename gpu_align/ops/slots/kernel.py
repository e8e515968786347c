"""The kernel that gives a slot to a request: its arguments are the upload."""

import triton
import triton.language as tl

from ..device import (
    ALIGN_STATE,
    CONTEXT_START,
    OUTPUT_START,
    PREDICTION_BASE,
    PREDICTION_LEN,
    PREDICTION_SHIFT,
    RECIPE_PACKS,
    SEEN,
    SLOT_META,
    TEXT_KIND,
)


@triton.jit(
    do_not_specialize=[
        "slot_meta_ptr", "align_state_ptr", "slot", "prediction_base", "prediction_len", "prediction_shift",
        "output_start", "context_start", "recipe_packs", "text_kind",
    ]
)  # fmt: skip
def set_slot_kernel(
    slot_meta_ptr,  # [S, SLOT_META] int32, written
    align_state_ptr,  # [S, ALIGN_STATE] int32, written
    slot,
    prediction_base,
    prediction_len,
    prediction_shift,
    output_start,
    context_start,
    recipe_packs,
    text_kind,
):
    """Grid (1,)::

    slot_meta[slot, :7] = prediction_base, …, text_kind        the fields of `SlotMeta`
    align_state[slot, SEEN] = -1
    """
    i_slot = slot.to(tl.int64)
    p_meta = slot_meta_ptr + i_slot * SLOT_META
    tl.store(p_meta + PREDICTION_BASE, prediction_base)
    tl.store(p_meta + PREDICTION_LEN, prediction_len)
    tl.store(p_meta + PREDICTION_SHIFT, prediction_shift)
    tl.store(p_meta + OUTPUT_START, output_start)
    tl.store(p_meta + CONTEXT_START, context_start)
    tl.store(p_meta + RECIPE_PACKS, recipe_packs)
    tl.store(p_meta + TEXT_KIND, text_kind)
    tl.store(align_state_ptr + i_slot * ALIGN_STATE + SEEN, -1)
