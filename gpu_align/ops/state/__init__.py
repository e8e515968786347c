"""What a step reads and writes, and how a prediction and a slot get there."""

from .launch import load_slot_kernel, occupy_slot, state_of, store_prediction, vacate_slot
from .state import IntArray, SlotMeta, StepArrays, StepState, allocate_state

__all__ = [
    "IntArray",
    "SlotMeta",
    "StepArrays",
    "StepState",
    "allocate_state",
    "load_slot_kernel",
    "occupy_slot",
    "state_of",
    "store_prediction",
    "vacate_slot",
]
