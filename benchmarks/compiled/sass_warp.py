"""Warps of a compiled program, and its memory: what loads and stores move, and where branches lead.

Lanes follow their own branches as on a GPU: BSSY names the lanes that BSYNC brings together again. `racing` runs
warps; `sass` has what instructions do to registers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.compiled.sass import ALL, Array, Instruction, Program, Registers

#: No kernel has a stack, or wants to know what an atomic replaced.
LOAD_STORE = {"LDG", "STG", "LDS", "STS", "LDSM", "REDG", "RED"}
CONTROL_FLOW = {"BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "CALL", "RET", "YIELD"}
SHARED = 1 << 18
#: In place of an instruction's index: the warp is at its end.
ENDED = -1
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


class Warp(Registers):
    """One warp of a program. mask: its lanes that run the next instruction; paths: other lanes, and where."""

    def __init__(self, machine: Machine, i_warp: int) -> None:
        nothing = np.zeros(1, np.uint32)
        special = {
            "SR_TID.X": (ALL + 32 * i_warp).astype(np.uint32), "SR_LANEID": ALL.astype(np.uint32),
            **dict.fromkeys(("SR_CTAID.X", "SR_CTAID.Y", "SR_CgaCtaId"), nothing),
        }  # fmt: skip
        super().__init__(machine.constants, special)
        self.machine = machine
        self.mask, self.exited = np.ones(32, bool), np.zeros(32, bool)
        self.paths: list[tuple[int, Array]] = []
        self.barriers: dict[str, Array] = {}
        self.meeting: dict[str, int] = {}
        self.arrived: dict[str, tuple[int, Array]] = {}

    def addresses(self, ins: Instruction) -> Array:
        """Of a load or store, [32] int64."""
        o = next(o for o in ins.operands if o.kind == "M")
        address = np.zeros(1, np.uint64)
        is_wide = "desc" in o.text or ".64" in o.text  # sm_80 writes [R2.64+UR4], sm_90 desc[UR4][R2.64]
        for register, suffix, immediate in o.terms:
            if register is None:
                address = address + np.uint64(immediate & (1 << 64) - 1)
            elif is_wide and (suffix == "64" or register.kind == "UR"):
                address = address + self.wide(register)
            else:
                scale = int(suffix[1:]) if suffix.startswith("X") else 1
                address = address + self.value(register).astype(np.uint64) * np.uint64(scale)
        if not is_wide:
            address = address & np.uint64(0xFFFFFFFF)
        address = address.view(np.int64)
        return address if len(address) == 32 else np.broadcast_to(address, (32,))

    def transfer(self, ins: Instruction, mask: Array, addresses: Array) -> None:
        """Load or store the lanes of `mask`."""
        name, width = ins.name, width_of(ins)
        if name == "LDSM":
            self.r[ins.operands[0].number] = self.machine.shared.view(np.uint32)[matrix(ins, addresses) // 4]
            return
        in_global = is_global(ins)
        block = self.machine.memory.bytes if in_global else self.machine.shared
        offsets = addresses - (Memory.BASE if in_global else 0)
        used: Array = offsets[mask]
        if in_global:
            self.machine.memory.check(used, width, ins.text)
        if (used % width).any():
            raise IndexError(f"{ins.text}: an address that is not a multiple of {width}")
        if name.startswith("RED"):
            if not {"MAX", "MIN"} & {*ins.modifiers}:
                raise NotImplementedError(ins.text)
            how = np.maximum if "MAX" in ins.modifiers else np.minimum
            view = block.view(np.int32 if "S32" in ins.modifiers else np.uint32)
            values = np.broadcast_to(self.value(ins.operands[-1]), (32,)).view(view.dtype)
            how.at(view, used // 4, values[mask])
            return
        data = ins.operands[0] if name.startswith("LD") else ins.operands[1]
        kind = {1: np.uint8, 2: np.uint16}.get(width, np.uint32)
        if signed := next((s for s in ("S8", "S16") if s in ins.modifiers), None):
            kind = np.int8 if signed == "S8" else np.int16
        view, size = block.view(kind), min(width, 4)
        at = np.where(mask, offsets, 0) // size
        for i in range(max(width // 4, 1)):
            if name.startswith("LD"):
                self.write(data, view[at + i].astype(np.int64).view(np.uint64).astype(np.uint32), mask, i)
            else:
                view[at[mask] + i] = self.r[min(data.number + i, 255)][mask].astype(kind)

    def _resume(self, pc: int) -> int:
        """The next instruction: `pc`, or that of other lanes if none is left here."""
        if self.mask.any():
            return pc
        if self.paths:
            pc, self.mask = self.paths.pop()
            return pc
        for name, (after, mask) in self.arrived.items():
            missing = self.barriers[name] & ~mask & ~self.exited
            if not missing.any() and mask.any():
                del self.arrived[name]
                self.mask = mask
                return after
        if not self.exited.all():
            raise RuntimeError("lanes that wait for each other")
        return ENDED

    def _branch(self, ins: Instruction, mask: Array, pc: int, labels: dict[str, int]) -> int:
        """The next instruction of the lanes of `self.mask`; those that go elsewhere are set aside."""
        name = ins.name
        if name == "BRA" and {"DIV", "CONV"} & {*ins.modifiers}:
            is_whole = bool((self.mask | self.exited).all())
            if "CONV" in ins.modifiers and is_whole:
                return labels[ins.operands[-1].text]
            if "DIV" in ins.modifiers and not is_whole:
                raise NotImplementedError(f"{ins.text} of a part of a warp")
        elif name in ("BRA", "CALL", "RET"):
            if name == "BRA" and len(ins.operands) > 1:
                mask = mask & self.predicate(ins.operands[0])
            # A call keeps its return address itself, in a register, as an offset from the kernel's beginning.
            if name == "RET":
                [address] = np.unique(np.broadcast_to(self.wide(ins.operands[0]), (32,))[mask])
                target = next(i for i, o in enumerate(self.machine.program.code) if o.address == address)
            else:
                target = labels[ins.operands[-1].text]
            if mask.any():
                if (rest := self.mask & ~mask).any():
                    self.paths.append((pc + 1, rest))
                self.mask = mask
                return target
        elif name == "EXIT":
            self.exited = self.exited | mask
            self.mask = self.mask & ~mask
        elif name == "BSSY":
            self.barriers[ins.operands[0].text] = self.mask.copy()
            self.meeting[ins.operands[0].text] = labels[ins.operands[1].text]
        elif name == "BREAK":
            text = ins.operands[0].text
            self.barriers[text] = self.barriers[text] & ~mask
        elif name in ("BSYNC", "WARPSYNC"):
            key = ins.operands[0].text if name == "BSYNC" else f"{pc}"
            wanted = self.barriers[key] if name == "BSYNC" else np.ones(32, bool)
            if name == "WARPSYNC" and "ALL" not in ins.modifiers:  # the lanes that it names
                [bits] = np.unique(self.value(ins.operands[0]))
                wanted = (int(bits) >> ALL & 1).astype(bool)
            wanted = wanted & ~self.exited
            self.barriers[key] = wanted
            _, here = self.arrived.pop(key, (0, np.zeros(32, bool)))
            here = here | mask
            after = self.meeting.get(key, pc + 1)
            if not (wanted & ~here).any():
                self.mask = here
                return after
            self.arrived[key] = after, here
            self.mask = self.mask & ~here
        return pc + 1


@dataclass
class Machine:
    """One program of a kernel on a GPU of its own. memory: changed in place; constants: bank 0, with arguments."""

    program: Program
    memory: Memory
    constants: bytes
    num_warps: int
    shared: Array = field(default_factory=lambda: np.zeros(SHARED, np.uint8))
