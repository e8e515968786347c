"""The memory of a compiled program, its arguments, and what its loads and stores reach."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.compiled.sass import ALL, Array, Instruction

#: No kernel has a stack, or wants to know what an atomic replaced.
LOAD_STORE = {"LDG", "STG", "LDS", "STS", "LDSM", "REDG", "RED"}
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def width_of(ins: Instruction) -> int:
    """Bytes that a load, store or atomic moves for each lane."""
    return next((width for modifier, width in _WIDTHS.items() if modifier in ins.modifiers), 4)


def matrix(ins: Instruction, addresses: Array) -> Array:
    """The address that lane l of an LDSM loads from: word l % 4 of row l // 4 of a matrix, 16 bytes a row."""
    if ins.modifiers != ("16", "M88"):
        raise NotImplementedError(ins.text)
    found: Array = addresses[ALL // 4] + 4 * (ALL % 4)
    return found


def is_global(ins: Instruction) -> bool:
    """Whether a load, store or atomic reaches global memory."""
    return ins.name in ("LDG", "STG", "REDG", "RED")


#: Target → where a kernel's arguments begin in constant bank 0, and where shared memory begins.
BANKS = {"sm_80": (0x160, 0), "sm_90": (0x210, 0x400), "sm_100": (0x380, 0x400)}


#: Target → where the numbers of programs are there, by X and Y.
GRIDS = {"sm_80": 0xC, "sm_90": 0xC, "sm_100": 0x370}


def constant_bank(target: str, grid: tuple[int, int], arguments: Iterable[tuple[Any, int]]) -> bytes:
    """Constant bank 0 at a launch. arguments: value and bytes of each."""
    start, bank = BANKS[target][0], bytearray(4096)
    struct.pack_into("<2I", bank, GRIDS[target], *grid)
    for value, size in arguments:
        start = -(-start // size) * size
        bank[start : start + size] = (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
        start += size
    return bytes(bank)


class Memory:
    """Global memory: arrays side by side in one block, far enough apart that an overrun is found."""

    BASE = 1 << 32

    def __init__(self, arrays: list[Array]) -> None:
        self.offsets, self.ranges, end = [], [], 256
        for array in arrays:
            self.offsets.append(end)
            self.ranges.append((end, end + array.nbytes))
            end += -(-array.nbytes // 256) * 256 + 256
        self.starts, self.stops = np.array(self.ranges).T
        self.bytes = np.zeros(end, np.uint8)
        self.arrays = [
            self.bytes[start:stop].view(a.dtype).reshape(a.shape)
            for (start, stop), a in zip(self.ranges, arrays, strict=True)
        ]
        for own, array in zip(self.arrays, arrays, strict=True):
            own[...] = array

    def address(self, i: int) -> int:
        return self.BASE + self.offsets[i]

    def check(self, offsets: Array, width: int, text: str) -> None:
        """Raise IndexError where an access lies outside all arrays."""
        i = np.maximum(np.searchsorted(self.starts, offsets, side="right") - 1, 0)
        bad = (offsets < self.starts[i]) | (offsets + width > self.stops[i])
        if bad.any():
            raise IndexError(f"{text}: outside of every tensor, at {hex(int(offsets[bad][0]))}")
