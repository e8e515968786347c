"""Registers of a warp: 32 lanes, and the one of the uniform data path."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.speed.sass import Operand

Array = npt.NDArray[Any]
M32 = np.uint64(0xFFFFFFFF)
ALL = np.arange(32)


class Registers:
    """Registers and predicates of a warp, and the constant bank.

    Attributes:
        r, p: [256, 32] uint32 and [8, 32] bool; ur, up: the uniform ones, one lane.
        constants: bytes of bank 0.
        special: special register → [32] or [1] values.
    """

    def __init__(self, constants: bytes, special: dict[str, Array]) -> None:
        self.r, self.p = np.zeros((256, 32), np.uint32), np.zeros((8, 32), bool)
        self.ur, self.up = np.zeros((256, 1), np.uint32), np.zeros((8, 1), bool)
        self.p[7] = self.up[7] = True
        self.constants, self.special = constants, special

    def value(self, o: Operand) -> Array:
        """32 bits a lane."""
        found: Array
        if o.kind == "R":
            found = self.r[o.number]
        elif o.kind == "UR":
            found = self.ur[o.number]
        elif o.kind == "I":
            found = np.array([o.number], np.uint32)
        elif o.kind == "C":
            found = np.frombuffer(self.constants, np.uint32, 1, o.number)
        elif o.kind == "F":
            found = np.array([float(o.text)], np.float32).view(np.uint32)
        else:
            raise NotImplementedError(f"operand {o.text}")
        if o.absolute:
            found = np.abs(found.view(np.int32)).view(np.uint32)
        if o.negative:
            found = np.negative(found)
        return ~found if o.inverted else found

    def wide(self, o: Operand) -> Array:
        """64 bits a lane, of a pair of registers; an immediate is extended by zeros."""
        if o.kind not in ("R", "UR") or o.number == 255:
            return self.value(o).astype(np.uint64)
        file = self.r if o.kind == "R" else self.ur
        found = file[o.number].astype(np.uint64) | file[o.number + 1].astype(np.uint64) << np.uint64(32)
        return np.negative(found) if o.negative else found

    def predicate(self, o: Operand) -> Array:
        found: Array = (self.p if o.kind == "P" else self.up)[o.number]
        return ~found if o.inverted else found

    def write(self, o: Operand, value: Array, mask: Array, offset: int = 0) -> None:
        """Into the lanes of `mask`; `offset` registers on. RZ and PT stay."""
        last = 7 if o.kind in ("P", "UP") else 255
        if o.number == last:
            return
        file = {"R": self.r, "UR": self.ur, "P": self.p, "UP": self.up}[o.kind]
        if o.kind in ("UR", "UP"):
            if mask.any():
                file[o.number + offset] = value[np.argmax(mask) if len(value) > 1 else 0]
        else:
            np.copyto(file[o.number + offset], value, where=mask, casting="unsafe")

    def write_wide(self, o: Operand, value: Array, mask: Array) -> None:
        self.write(o, (value & M32).astype(np.uint32), mask)
        self.write(o, (value >> np.uint64(32)).astype(np.uint32), mask, 1)
