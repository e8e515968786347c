"""Which request holds which drafter slot."""

from __future__ import annotations

import heapq


class SlotTable:
    """Request id → slot, 0 ≤ slot < max_slots; the smallest free slot is given first.

    A request holds at most one slot, a slot at most one request. Not thread-safe: a model runner is not
    either.
    """

    def __init__(self, max_slots: int) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots: expected at least 1, got {max_slots}")
        self.max_slots = max_slots
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_slots))

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slot_of

    def get(self, req_id: str) -> int | None:
        """The slot of a request, or None."""
        return self._slot_of.get(req_id)

    def acquire(self, req_id: str) -> int:
        """Give the request a slot. Raises `ValueError` when it has one or none is free."""
        if req_id in self._slot_of:
            raise ValueError(f"req_id: {req_id!r} already holds slot {self._slot_of[req_id]}")
        if not self._free:
            raise ValueError(f"req_id: no slot left for {req_id!r}, all {self.max_slots} are taken")
        slot = heapq.heappop(self._free)
        self._slot_of[req_id] = slot
        return slot

    def release(self, req_id: str) -> int | None:
        """Take the slot back and return it; None when the request held none."""
        slot = self._slot_of.pop(req_id, None)
        if slot is not None:
            heapq.heappush(self._free, slot)
        return slot

    def holders(self) -> list[str]:
        """The requests that hold a slot, oldest first."""
        return list(self._slot_of)
