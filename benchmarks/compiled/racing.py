"""Compiled programs in random order, with a check for races.

Each time that a warp reaches memory another one may go first; of a branch that divides a warp either side goes
first. Registers and shared memory hold garbage at the start.

Two accesses to a byte, one of them a store, race unless one *happens before* the other: they are of the same
thread; or of the same warp, and all its lanes ran one instruction together in between; or of the same program, and
a barrier of all its threads was in between. Programs of one launch have no order. Atomics do not race with each
other. Two stores of the same value are no race but are counted.

Not modelled: stale first-level caches, the weak order of one thread's stores as others see it, streams.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.compiled.sass import ALL, OPERATIONS, Array, Instruction, Program, Registers
from benchmarks.compiled.sass_memory import LOAD_STORE, Memory, is_global, matrix, width_of

CONTROL_FLOW = {"BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "CALL", "RET", "YIELD"}
SHARED = 1 << 18
#: In place of an instruction's index: the warp is at its end.
ENDED = -1
#: Threads of the largest program: thread numbers of program i begin at i times as many.
THREADS = 1024
NEVER = 0
#: Branches of one warp.
MOST_BRANCHES = 1_000_000
LOAD, STORE, ATOMIC = "load", "store", "atomic"
#: Who else has read a byte since it was written.
ONE_LANE, ONE_WARP, ONE_PROGRAM, PROGRAMS = range(4)


class Accesses:
    """The last store to each byte and the last load of it. Threads count from 1; `NEVER`: there was none."""

    def __init__(self, size: int) -> None:
        zeros = partial(np.zeros, size, np.int32)
        self.store, self.store_epoch, self.store_turn, self.store_pc = (zeros() for _ in range(4))
        self.is_atomic, self.value = np.zeros(size, np.bool_), np.zeros(size, np.uint8)
        self.load, self.load_epoch, self.load_turn, self.load_pc = (zeros() for _ in range(4))
        self.readers, self.last = np.zeros(size, np.int8), zeros()


class Findings:
    """Findings of a run.

    Attributes:
        races: (what, earlier instruction, later instruction) → bytes.
        same_value: bytes to which two threads stored the same value without an order.
        reached: how often each instruction ran, or decided that a branch is not taken.
        programs: that ran.
    """

    def __init__(self, program: Program) -> None:
        self.races: Counter[tuple[str, str, str]] = Counter()
        self.same_value = self.programs = 0
        self.reached = [0] * len(program.code)


def where(ins: Instruction) -> str:
    """Its name, and the line of a kernel that it comes from."""
    own = [f"{file}:{line}" for file, line in ins.lines if file.endswith("/kernel.py")]
    return " ".join([ins.name, *own[:1]])


class Warp(Registers):
    """A warp that pauses in front of each access to memory and at each barrier: `run` yields which.

    Lanes follow their own branches as on a GPU: BSSY names the lanes that BSYNC brings together again. mask: those
    that run the next instruction; paths: other lanes, and where.
    """

    def __init__(self, machine: Machine, i_warp: int, i_program: int, i_y: int) -> None:
        numbers = {"SR_CTAID.X": i_program, "SR_CTAID.Y": i_y, "SR_CgaCtaId": 0}
        special = {"SR_TID.X": (ALL + 32 * i_warp).astype(np.uint32), "SR_LANEID": ALL.astype(np.uint32)}
        special |= {name: np.array([number], np.uint32) for name, number in numbers.items()}
        super().__init__(machine.constants, special)
        garbage = np.random.default_rng(machine.rng.randrange(2**32))
        self.r[:255] = garbage.integers(0, 2**32, (255, 32), np.uint32)
        self.ur[:255] = garbage.integers(0, 2**32, (255, 1), np.uint32)
        self.p[:7], self.up[:7] = garbage.random((7, 32)) < 0.5, garbage.random((7, 1)) < 0.5
        self.machine, self.i_warp, self.turn, self.pc, self.left = machine, i_warp, 0, 0, MOST_BRANCHES
        self.mask, self.exited = np.ones(32, bool), np.zeros(32, bool)
        self.paths: list[tuple[int, Array]] = []
        self.barriers: dict[str, Array] = {}
        self.meeting: dict[str, int] = {}
        self.arrived: dict[str, tuple[int, Array]] = {}

    def run(self) -> Iterator[str]:
        code, labels = self.machine.program.code, self.machine.program.labels
        reached, operations = self.machine.findings.reached, self.machine.operations
        pc, is_whole = self._resume(0), True
        while pc != ENDED:
            ins, operation = code[pc], operations[pc]
            mask = self.mask if ins.guard is None else self.mask & self.predicate(ins.guard)
            self.turn += is_whole
            is_run = ins.guard is None or bool(mask.any())
            reached[pc] += is_run or ins.name in CONTROL_FLOW
            if operation is not None:
                if is_run:
                    operation(self, ins, mask)
                pc += 1
            elif ins.name in LOAD_STORE:
                if is_run:
                    yield ins.name
                    self.pc = pc
                    self._access(ins, mask)
                pc += 1
            elif ins.name not in CONTROL_FLOW and ins.name != "BAR":
                raise NotImplementedError(ins.text)
            else:
                if ins.name == "BAR":
                    if not is_whole:
                        self.machine.found("a barrier that a part of a warp reaches", pc, pc, 1)
                    yield ins.name
                self.left -= 1
                if not self.left:
                    raise RuntimeError("expected a program that ends")
                pc = self._resume(self._branch(ins, mask, pc, labels))
                is_whole = bool((self.mask | self.exited).all())

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
                    sides = (target, mask), (pc + 1, rest)
                    (target, mask), later = sides[::-1] if self.machine.rng.random() < 0.5 else sides
                    self.paths.append(later)
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

    def _access(self, ins: Instruction, mask: Array) -> None:
        name, machine, addresses = ins.name, self.machine, self.addresses(ins)
        width, lanes, values = width_of(ins), ALL[mask], None
        if name == "LDSM":
            lanes, offsets = ALL, matrix(ins, addresses)
        else:
            offsets = addresses[mask] - (Memory.BASE if is_global(ins) else 0)
        if name.startswith("ST"):  # [32, width] bytes
            numbers = [min(ins.operands[1].number + i, 255) for i in range(max(width // 4, 1))]
            words = np.ascontiguousarray(self.r[numbers].T)
            values = words.view(np.uint8)[mask, :width].reshape(-1)
        on = machine.globally if is_global(ins) else machine.in_shared
        if on is machine.in_shared:
            end = machine.shared_start + machine.shared_size
            if (offsets < machine.shared_start).any() or (offsets + width > end).any():
                raise IndexError(f"{ins.text}: outside of the {machine.shared_size} bytes of shared memory")
        self.transfer(ins, mask, addresses)
        kind = ATOMIC if name.startswith("RED") else LOAD if name.startswith("LD") else STORE
        at = (offsets[:, None] + np.arange(width)).reshape(-1)
        self._note(kind, on, at, np.repeat(lanes, width), values)

    def _note(self, kind: str, on: Accesses, at: Array, lanes: Array, values: Array | None) -> None:
        """One instruction's accesses: bytes `at`, each with its lane."""
        machine, turn, epoch = self.machine, self.turn, self.machine.epoch
        threads = (lanes + (32 * self.i_warp + 1 + machine.first_thread)).astype(np.int32)

        def races(other: Array, other_epoch: Array, other_turn: Array) -> Array:
            program, warp = (other - 1) // THREADS, (other - 1) // 32
            is_own = program == machine.first_thread // THREADS
            in_order = is_own & (other_epoch < epoch)
            in_order |= (warp == (threads - 1) // 32) & (other_turn < turn) & is_own
            found: Array = (other != NEVER) & (other != threads) & ~in_order
            return found

        bad = races(on.store[at], on.store_epoch[at], on.store_turn[at])
        if kind == ATOMIC:
            bad &= ~on.is_atomic[at]
        if kind == STORE:
            assert values is not None
            same = bad & (on.value[at] == values) & ~on.is_atomic[at]
            machine.findings.same_value += int(same.sum())
            bad &= ~same
            order = np.argsort(at, kind="stable")
            twice = at[order][1:] == at[order][:-1]
            differ = twice & (values[order][1:] != values[order][:-1])
            machine.findings.same_value += int((twice & ~differ).sum())
            machine.found("lanes of one store write different values", self.pc, self.pc, int(differ.sum()))
        self._tell(f"{kind} after a store", bad, on.store_pc[at])
        if kind == LOAD:
            if on is machine.in_shared:
                unwritten = int((on.store[at] == NEVER).sum())
                machine.found("shared memory is read before it is written", self.pc, self.pc, unwritten)
            self._note_load(on, at, threads)
            return
        readers, load_epoch = on.readers[at], on.load_epoch[at]
        bad = races(on.load[at], load_epoch, on.load_turn[at])
        own = (on.load[at] - 1) // THREADS == machine.first_thread // THREADS
        bad |= (readers == ONE_WARP) & own & (load_epoch == epoch) & (on.load_turn[at] == turn)
        bad |= (readers == ONE_PROGRAM) & own & (load_epoch == epoch)
        bad |= readers == PROGRAMS
        self._tell(f"{kind} after a load", bad, on.load_pc[at])
        on.store[at], on.store_epoch[at], on.store_turn[at] = threads, epoch, turn
        on.store_pc[at], on.is_atomic[at] = self.pc, kind == ATOMIC
        if values is not None:
            on.value[at] = values

    def _note_load(self, on: Accesses, at: Array, threads: Array) -> None:
        machine, turn, epoch = self.machine, self.turn, self.machine.epoch
        before, readers = on.load[at], on.readers[at]
        is_own = (before - 1) // THREADS == machine.first_thread // THREADS
        is_now = is_own & (on.load_epoch[at] == epoch)
        now = np.where(is_now, readers, ONE_LANE)
        if is_now.any():
            same_warp = (before - 1) // 32 == (threads - 1) // 32
            now[is_now & ~same_warp] = ONE_PROGRAM
            together = is_now & same_warp & (on.load_turn[at] == turn) & (before != threads)
            now[together] = np.maximum(now[together], ONE_WARP)
        now[(before != NEVER) & ~is_own | (readers == PROGRAMS)] = PROGRAMS
        on.readers[at] = now
        on.last[at] = np.arange(len(at))  # of several lanes at a byte one stays
        several = on.last[at] != np.arange(len(at))
        on.readers[at[several]] = np.maximum(on.readers[at[several]], ONE_WARP)
        on.load[at], on.load_epoch[at], on.load_turn[at], on.load_pc[at] = threads, epoch, turn, self.pc

    def _tell(self, what: str, bad: Array, earlier: Array) -> None:
        for pc in np.unique(earlier[bad]):
            self.machine.found(what, int(pc), self.pc, int((earlier[bad] == pc).sum()))


class Machine:
    """The programs of one launch, on a GPU of their own.

    Args:
        memory: changed in place.
        constants: bank 0, with arguments.
        shared_start, shared_size: where shared memory begins, and its bytes.
        seed: of all that is random.
    """

    def __init__(
        self, program: Program, memory: Memory, constants: bytes, num_warps: int, *, shared_start: int,
        shared_size: int, findings: Findings, seed: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.constants, self.num_warps = program, memory, constants, num_warps
        self.shared = np.zeros(SHARED, np.uint8)
        self.shared_start, self.shared_size, self.findings = shared_start, shared_size, findings
        self.rng = random.Random(seed)
        #: By instruction; None of those that change the course of a warp, or its memory.
        self.operations = [None if i.name == "BAR" else OPERATIONS.get(i.name) for i in program.code]
        self.globally, self.in_shared = Accesses(len(memory.bytes)), Accesses(0)
        self.first_thread = self.epoch = 0

    def found(self, what: str, earlier: int, later: int, times: int) -> None:
        if times:
            code = self.program.code
            self.findings.races[what, where(code[earlier]), where(code[later])] += times

    def run_grid(self, grid: tuple[int, int]) -> None:
        """All programs, one after the other in random order."""
        places = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
        for i, (x, y) in enumerate(self.rng.sample(places, len(places))):
            self.first_thread, self.epoch = i * THREADS, 1
            self._run_program(x, y)
            self.findings.programs += 1

    def _run_program(self, x: int, y: int) -> None:
        self.in_shared = Accesses(len(self.shared))
        self.shared[:] = np.frombuffer(self.rng.randbytes(len(self.shared)), np.uint8)
        running = {i: Warp(self, i, x, y).run() for i in range(self.num_warps)}
        waiting: set[int] = set()
        while running:
            ready = [i for i in running if i not in waiting]
            if not ready:
                waiting.clear()
                self.epoch += 1
                continue
            i = self.rng.choice(ready)
            try:
                reached = next(running[i])
            except StopIteration:
                del running[i]
                continue
            if reached == "BAR":
                waiting.add(i)
