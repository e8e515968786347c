"""Programs of a compiled kernel, run instruction by instruction: what they compute, and when each one issues.

Lanes follow their own branches as on a GPU: BSSY names the lanes that BSYNC brings together again. A warp issues
in order: an instruction issues when the stall count of the one before has passed, the scoreboards that it waits
for are at 0 and its pipe is free. Results that no scoreboard guards have fixed latencies, which the stall counts
cover. A program has its scheduler for itself: what other programs of the GPU do is not in these times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.speed.sass import NONE, Instruction, Program
from benchmarks.speed.sass_memory import LOAD_STORE, SHARED, STACK, Lanes, Latencies, Memory
from benchmarks.speed.sass_ops import OPERATIONS
from benchmarks.speed.sass_registers import ALL, Array

#: Instructions of pipes that have 16 lanes.
_HALF = {
    "IMAD", "IADD3", "LOP3", "ISETP", "SEL", "SHF", "LEA", "VIADD", "VIMNMX", "VIMNMX3", "VIADDMNMX", "PRMT",
    "SGXT", "PLOP3", "P2R", "R2P", "IABS",
}  # fmt: skip
_SPECIAL = {"S2R": "special", "S2UR": "special", "SHFL": "shuffle", "REDUX": "reduce", "CREDUX": "reduce"}
_CONSTANT = {"LDC", "ULDC", "LDCU"}


@dataclass
class Trace:
    """What a program did.

    Attributes:
        cycles: of its last warp.
        issued: index of an instruction → cycles from its issue to the next one's, but for scoreboards.
        waited: index of an instruction → cycles that others waited for its result.
        count: index → how often it was issued.
        busy: pipe → cycles for which it was, all warps together.
    """

    cycles: int = 0
    issued: Counter[int] = field(default_factory=Counter)
    waited: Counter[int] = field(default_factory=Counter)
    count: Counter[int] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)

    def load(self, pipe: str) -> float:
        """Cycles of a multiprocessor that such a program takes of a pipe, or of its schedulers ("issue").

        Schedulers and pipes are there four times; the load and store unit once, but twice as wide.
        """
        return self.busy[pipe] / (2 if pipe == "load and store" else 4)


class Warp(Lanes):
    """One warp of a program; `run` yields at every barrier and stops at the end."""

    def __init__(self, machine: Machine, i_warp: int, i_program: int) -> None:
        special = {
            "SR_TID.X": (ALL + 32 * i_warp).astype(np.uint32), "SR_CTAID.X": np.array([i_program], np.uint32),
            "SR_CTAID.Y": np.array([0], np.uint32),
            "SR_LANEID": ALL.astype(np.uint32), "SR_CgaCtaId": np.zeros(1, np.uint32),
        }  # fmt: skip
        super().__init__(machine.constants, special)
        self.machine, self.time = machine, 0
        self.memory, self.shared, self.sectors = machine.memory, machine.shared, machine.sectors
        self.costs = machine.latencies
        self.boards = [(0, 0)] * 6  # when it is at 0, because of which instruction
        self.pipes: dict[str, int] = {}
        self.local = np.zeros((STACK // 4, 32), np.uint32)
        self.mask, self.exited = np.ones(32, bool), np.zeros(32, bool)
        self.paths: list[tuple[int, Array]] = []
        self.barriers: dict[str, Array] = {}
        self.meeting: dict[str, int] = {}
        self.arrived: dict[str, tuple[int, Array]] = {}

    def run(self) -> Iterator[None]:
        code, labels, trace = self.machine.program.code, self.machine.program.labels, self.machine.trace
        pc = 0
        while True:
            if not self.mask.any():
                if (found := self._next_path()) is None:
                    return
                pc, self.mask = found
            ins = code[pc]
            mask = self.mask if ins.guard is None else self.mask & self.predicate(ins.guard)
            before = self.time
            start = self._issue_time(ins, pc)
            latency, busy = self._execute(ins, mask, start) if mask.any() else (0, 1)
            c = ins.control
            self.pipes[_pipe(ins)] = start + busy
            trace.busy[_pipe(ins)] += busy
            trace.busy["issue"] += 1
            if c.write != NONE:
                self.boards[c.write] = max(self.boards[c.write], (start + latency, pc))
            if c.read != NONE:
                held = min(latency, self.costs.read) if latency else 0
                self.boards[c.read] = max(self.boards[c.read], (start + held, pc))
            self.time = start + max(c.stall, 1)
            trace.count[pc] += 1
            trace.issued[pc] += self.time - start
            if start > before:
                trace.waited[self.waited_for] += start - before
            if ins.name == "BAR":
                yield
            target = self._branch(ins, mask, pc, labels)
            if target != pc + 1:  # also where lanes meet elsewhere than behind their BSYNC
                self.time += self.costs.branch
                trace.issued[pc] += self.costs.branch
            pc = target

    def _issue_time(self, ins: Instruction, pc: int) -> int:
        start, self.waited_for = self.time, pc
        if (free := self.pipes.get(_pipe(ins), 0)) > start:
            start = free
        for i in range(6):
            if ins.control.wait >> i & 1 and self.boards[i][0] > start:
                start, self.waited_for = self.boards[i]
        return start

    def _next_path(self) -> tuple[int, Array] | None:
        if self.paths:
            return self.paths.pop()
        for name, (pc, mask) in self.arrived.items():
            missing = self.barriers[name] & ~mask & ~self.exited
            if not missing.any() and mask.any():
                del self.arrived[name]
                return pc, mask
        if not self.exited.all():
            raise RuntimeError("lanes that wait for each other")
        return None

    def _branch(self, ins: Instruction, mask: Array, pc: int, labels: dict[str, int]) -> int:
        """Where the lanes of `self.mask` go on; those that go elsewhere are set aside."""
        name = ins.name
        if name == "BRA" and "DIV" in ins.modifiers:
            if not (self.mask | self.exited).all():
                raise NotImplementedError(f"{ins.text} of a part of a warp")
        elif name == "BRA":
            if len(ins.operands) > 1:
                mask = mask & self.predicate(ins.operands[0])
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
        elif name == "BSYNC" or (name == "WARPSYNC" and "ALL" in ins.modifiers):
            key = ins.operands[0].text if name == "BSYNC" else "all"
            wanted = self.barriers.setdefault(key, np.ones(32, bool)) & ~self.exited
            _, here = self.arrived.pop(key, (0, np.zeros(32, bool)))
            here = here | mask
            after = self.meeting.get(key, pc + 1)
            if not (wanted & ~here).any():
                self.mask = here
                return after
            self.arrived[key] = after, here
            self.mask = self.mask & ~here
        elif name in ("WARPSYNC", "CALL", "RET", "BRX", "JMP", "BMOV", "YIELD"):
            raise NotImplementedError(ins.text)
        return pc + 1

    def _execute(self, ins: Instruction, mask: Array, start: int) -> tuple[int, int]:
        """``(latency, cycles on the pipe)``."""
        costs = self.costs
        if ins.name in LOAD_STORE:
            return self.access(ins, mask, start)
        if ins.name in OPERATIONS:
            OPERATIONS[ins.name](self, ins, mask)
        elif ins.name not in ("BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC"):
            raise NotImplementedError(ins.text)
        if ins.name in _SPECIAL:
            return int(getattr(costs, _SPECIAL[ins.name])), costs.half_rate
        if ins.name in _CONSTANT:
            return costs.constant, 1
        return costs.other, costs.half_rate if ins.name in _HALF else 1


def _pipe(ins: Instruction) -> str:
    if ins.name in LOAD_STORE or ins.name in ("SHFL", "REDUX", "CREDUX"):
        return "load and store"
    if ins.name in ("IMAD", "FADD", "FFMA"):
        return "multiply"
    return "uniform" if ins.name.startswith("U") else "other" if ins.name not in _HALF else "integer"


class Machine:
    """One program of a kernel on a GPU of its own.

    Args:
        program: its instructions.
        memory: what its pointers point to; changed in place.
        constants: constant bank 0, with the kernel's arguments.
        num_warps: of a program.
        latencies: of what.
    """

    def __init__(
        self, program: Program, memory: Memory, constants: bytes, num_warps: int, latencies: Latencies
    ) -> None:
        self.program, self.memory, self.constants, self.latencies = program, memory, constants, latencies
        self.num_warps = num_warps
        self.shared = np.zeros(SHARED, np.uint8)
        self.sectors: dict[int, int] = {}
        self.trace = Trace()

    def run(self, i_program: int = 0) -> Trace:
        """Run it to its end."""
        warps = [Warp(self, i, i_program) for i in range(self.num_warps)]
        running = [(warp, warp.run()) for warp in warps]
        while running:
            running = [(warp, rest) for warp, rest in running if next(rest, self) is not self]
            if running:
                end = max(warp.time for warp, _ in running) + self.latencies.barrier
                for warp, _ in running:
                    warp.time = end
        self.trace.cycles = max(warp.time for warp in warps)
        return self.trace
