"""The reference of `set_slot_kernel`, on the CPU."""

from __future__ import annotations

from ..layout import SEEN, SlotMeta, StepState


def set_slot_reference(state: StepState, slot: int, meta: SlotMeta) -> None:
    """Write a slot's meta, and that none of its tokens was seen."""
    state.slot_meta.numpy()[slot] = meta.row()
    state.align_state.numpy()[slot, SEEN] = -1
