"""`SlotSnapshot` by its public name."""

from .drafter import SlotSnapshot

__all__ = ["SlotSnapshot"]
