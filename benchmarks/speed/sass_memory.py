"""Loads, stores and atomics of a warp: what they move, and how long that takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speed.sass import Instruction, Operand
from benchmarks.speed.sass_registers import ALL, Array, Registers

LOAD_STORE = {"LDG", "STG", "LDS", "STS", "LDL", "STL", "LDSM", "STSM", "REDG", "RED", "ATOMG", "ATOMS"}
STACK = 4096
SHARED = 1 << 18
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Latencies:
    """Cycles from the issue of an instruction to its result, for those that set a scoreboard.

    `first` is what the first access of a program to a sector of 32 bytes costs: 263 where it is in the
    second-level cache of an H100, 600 where it is in its memory. Later ones find it in the first-level cache.
    """

    first: int = 263
    l1: int = 40
    shared: int = 23
    #: A load from shared memory of 128 bits, or LDSM.
    shared_wide: int = 30
    shuffle: int = 23
    reduce: int = 23
    constant: int = 30
    special: int = 20
    #: Conversions, population counts, divisions: what remains.
    other: int = 20
    #: Until the source registers of a load or store may be overwritten.
    read: int = 12
    barrier: int = 25
    #: A taken branch, beyond its stall count: the instructions behind it are fetched anew.
    branch: int = 8
    #: Cycles between two instructions of a warp on a pipe of 16 lanes, and between two of the load and store unit.
    half_rate: int = 2
    #: Cycles for every further line of 128 bytes, or shared memory bank conflict, of one instruction.
    further_line: int = 2


class Memory:
    """Global memory: arrays side by side in one block, far enough apart that an overrun is found."""

    BASE = 1 << 32

    def __init__(self, arrays: list[Array]) -> None:
        self.offsets, self.ranges, end = [], [], 256
        for array in arrays:
            self.offsets.append(end)
            self.ranges.append((end, end + array.nbytes))
            end += -(-array.nbytes // 256) * 256 + 256
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
        """Raises:
        IndexError: an access that lies outside all arrays."""
        starts = np.array([start for start, _ in self.ranges])
        stops = np.array([stop for _, stop in self.ranges])
        i = np.maximum(np.searchsorted(starts, offsets, side="right") - 1, 0)
        bad = (offsets < starts[i]) | (offsets + width > stops[i])
        if bad.any():
            raise IndexError(f"{text}: outside of every tensor, at {hex(int(offsets[bad][0]))}")


class Lanes(Registers):
    """Registers of a warp that reach memory.

    Attributes:
        memory: global memory.
        shared: bytes of the program's shared memory.
        sectors: sector of global memory → cycle from which on the program finds it in its first-level cache.
        local: [words, 32] of each lane's stack.
        costs: latencies.
    """

    memory: Memory
    shared: Array
    sectors: dict[int, int]
    local: Array
    costs: Latencies

    def _addresses(self, o: Operand) -> Array:
        address = np.zeros(1, np.uint64)
        for register, suffix, immediate in o.terms:
            if register is None:
                address = address + np.uint64(immediate & (1 << 64) - 1)
            elif "desc" in o.text and (suffix == "64" or register.kind == "UR"):
                address = address + self.wide(register)
            else:
                scale = int(suffix[1:]) if suffix.startswith("X") else 1
                address = address + self.value(register).astype(np.uint64) * np.uint64(scale)
        if "desc" not in o.text:
            address = address & np.uint64(0xFFFFFFFF)
        return np.broadcast_to(address.view(np.int64), (32,))

    def access(self, ins: Instruction, mask: Array, start: int) -> tuple[int, int]:
        costs, name = self.costs, ins.name
        memory = next(o for o in ins.operands if o.kind == "M")
        addresses = self._addresses(memory)
        if name in ("LDSM", "STSM"):
            self._matrix(ins, addresses)
            return costs.shared_wide, 2 * costs.half_rate
        width = next((w for m, w in _WIDTHS.items() if m in ins.modifiers), 4)
        if name in ("LDL", "STL"):
            rows = addresses // 4
            for i in range(max(width // 4, 1)):
                if name == "LDL":
                    self.write(ins.operands[0], self.local[rows + i, ALL], mask, i)
                else:
                    self.local[rows[mask] + i, ALL[mask]] = self.r[ins.operands[1].number + i][mask]
            return costs.l1, costs.half_rate
        is_global = name in ("LDG", "STG", "REDG", "RED", "ATOMG")
        block = self.memory.bytes if is_global else self.shared
        offsets = addresses - (Memory.BASE if is_global else 0)
        if is_global:
            self.memory.check(offsets[mask], width, ins.text)
        if (offsets[mask] % width).any():
            raise IndexError(f"{ins.text}: an address that is not a multiple of {width}")
        if name.startswith(("ATOM", "RED")):
            self._atomic(ins, mask, block, offsets)
        else:
            self._copy(ins, mask, block, offsets, width)
        if not is_global:
            words = np.unique(offsets[mask][:, None] // 4 + np.arange(max(width // 4, 1)))
            turns = max(Counter((words % 32).tolist()).values())  # a bank gives one word a turn
            latency = costs.shared_wide if width > 8 else costs.shared
            extra = max(turns - max(width // 4, 1), 0)
            return latency + costs.further_line * extra, costs.half_rate * turns
        sectors, lines = np.unique(offsets[mask] // 32), len(np.unique(offsets[mask] // 128))
        extra = costs.further_line * (lines - 1)
        known = self.sectors
        if name == "LDG":
            there = max(known.setdefault(int(s), start + costs.first) for s in sectors) - start
            return max(costs.l1, there) + extra, costs.half_rate + extra
        if name.startswith(("ATOM", "RED")):
            for s in sectors:
                known.pop(int(s), None)
        return costs.first, costs.half_rate + extra

    def _copy(self, ins: Instruction, mask: Array, block: Array, offsets: Array, width: int) -> None:
        data = ins.operands[0] if ins.name.startswith("LD") else ins.operands[1]
        kind = {1: np.uint8, 2: np.uint16}.get(width, np.uint32)
        if signed := next((s for s in ("S8", "S16") if s in ins.modifiers), None):
            kind = np.int8 if signed == "S8" else np.int16
        view, size = block.view(kind), min(width, 4)
        at = np.where(mask, offsets, 0) // size
        for i in range(max(width // 4, 1)):
            if ins.name.startswith("LD"):
                self.write(data, view[at + i].astype(np.int64).view(np.uint64).astype(np.uint32), mask, i)
            else:
                values = self.r[data.number + i if data.number != 255 else 255][mask]
                view[at[mask] + i] = values.astype(kind)

    def _atomic(self, ins: Instruction, mask: Array, block: Array, offsets: Array) -> None:
        signed = np.int32 if "S32" in ins.modifiers else np.uint32
        view, at = block.view(signed), offsets // 4
        values = self.value(ins.operands[-1])
        returns = next((o for o in ins.operands[:2] if o.kind == "R"), None) if ins.name[0] == "A" else None
        apply: dict[str, Any] = {"MAX": np.maximum, "MIN": np.minimum, "ADD": np.add, "OR": np.bitwise_or}
        how = apply[next(m for m in ins.modifiers if m in apply)]
        for lane in ALL[mask]:
            if returns is not None:
                self.r[returns.number, lane] = view[at[lane] : at[lane] + 1].view(np.uint32)[0]
            view[at[lane]] = how(view[at[lane]], np.broadcast_to(values, (32,)).view(signed)[lane])

    def _matrix(self, ins: Instruction, addresses: Array) -> None:
        """LDSM and STSM: matrices of 8 rows of 16 bytes, lane l holds word l % 4 of row l // 4."""
        if any(m.startswith("MT") for m in ins.modifiers):
            raise NotImplementedError(ins.text)
        number = int(ins.modifiers[-1]) if ins.modifiers[-1].isdigit() else 1
        words, is_load = self.shared.view(np.uint32), ins.name == "LDSM"
        data = ins.operands[0 if is_load else 1]
        for i in range(number):
            at = addresses[8 * i + ALL // 4] // 4 + ALL % 4
            if is_load:
                self.r[data.number + i] = words[at]
            else:
                words[at] = self.r[data.number + i]
