"""The kernel that gives a slot to a request: its arguments are the upload."""

import triton
import triton.language as tl

from ..device import ALIGN_STATE, SEEN, SLOT_META


@triton.jit(
    do_not_specialize=[
        "slot_meta_ptr", "align_state_ptr", "slot", "prediction_base", "prediction_len", "prediction_shift",
        "output_start", "context_start", "recipe_packs", "text_kind", "is_hot", "end_0", "end_1", "end_2",
        "end_3", "end_4", "end_5", "end_6", "end_7",
    ]
)  # fmt: skip
def set_slot_kernel(
    slot_meta_ptr,  # [S, SLOT_META] int32, written
    align_state_ptr,  # [S, ALIGN_STATE] int32, written
    slot,
    # The columns of a row, in their order.
    prediction_base,
    prediction_len,
    prediction_shift,
    output_start,
    context_start,
    recipe_packs,
    text_kind,
    is_hot,
    end_0,
    end_1,
    end_2,
    end_3,
    end_4,
    end_5,
    end_6,
    end_7,
):
    """Grid (1,)::

    slot_meta[slot] = prediction_base, …, end_7                the columns of `SlotMeta.row`
    align_state[slot, SEEN] = -1
    """
    i_slot = slot.to(tl.int64)
    row = (
        prediction_base, prediction_len, prediction_shift, output_start, context_start, recipe_packs,
        text_kind, is_hot, end_0, end_1, end_2, end_3, end_4, end_5, end_6, end_7,
    )  # fmt: skip
    for i in tl.static_range(SLOT_META):
        tl.store(slot_meta_ptr + i_slot * SLOT_META + i, row[i])
    tl.store(align_state_ptr + i_slot * ALIGN_STATE + SEEN, -1)
