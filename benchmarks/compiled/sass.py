"""Machine code of a kernel as Python objects: nvdisasm's text with operands and source lines."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
M32 = np.uint64(0xFFFFFFFF)
ALL = np.arange(32)


class Registers:
    """Registers and predicates of a warp, and the constant bank.

    r, p: [256, 32] uint32 and [8, 32] bool; ur, up: the uniform ones, one lane. constants: bytes of bank 0.
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
            found = o.immediate
        elif o.kind == "C":
            found = np.frombuffer(self.constants, np.uint32, 1, o.number)
        else:
            raise NotImplementedError(f"operand {o.text}")
        if o.negative:
            found = np.negative(found)
        return ~found if o.inverted else found

    def wide(self, o: Operand) -> Array:
        """64 bits a lane, of a pair of registers or of the constant bank; an immediate is extended by zeros."""
        if o.kind == "C":
            return np.frombuffer(self.constants, np.uint64, 1, o.number)
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
            file[o.number + offset] = value[np.argmax(mask) if len(value) > 1 else 0]
        else:
            np.copyto(file[o.number + offset], value, where=mask, casting="unsafe")

    def write_wide(self, o: Operand, value: Array, mask: Array) -> None:
        self.write(o, (value & M32).astype(np.uint32), mask)
        self.write(o, (value >> np.uint64(32)).astype(np.uint32), mask, 1)


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        kind: R, UR, P, UP (registers), I (immediate, in hexadecimal), C (constant bank), M (memory), L (label),
            S (special register or a name).
        number: register number (255: RZ, 7: PT), immediate modulo 2**32, offset in the constant bank.
        text: as printed, without ``.reuse``.
        negative, inverted: of a value: minus, every bit; `inverted` of a predicate: not.
        terms: of a memory operand what is added: (register or None, suffixes, immediate).
    """

    kind: str
    number: int
    text: str
    negative: bool = False
    inverted: bool = False
    terms: tuple[tuple[Operand | None, str, int], ...] = ()

    @cached_property
    def immediate(self) -> Array:
        """Of kind I, [1] uint32."""
        return np.array([self.number], np.uint32)


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@guard name.modifiers operands``."""

    address: int
    guard: Operand | None
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    #: Source lines, the innermost function's first: ("align/kernel.py", 147).
    lines: tuple[tuple[str, int], ...]
    text: str


@dataclass
class Program:
    """A kernel's instructions, and where its labels are: indices into `code`."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_REGISTER = re.compile(r"(UR|UP|R|P)(\d+|Z|T)$")


@cache
def operand(text: str) -> Operand:
    """One operand of a disassembled instruction."""
    text = text.replace(".reuse", "").strip()
    body, inverted, negative = text, False, False
    if body[0] in "!~":
        inverted, body = True, body[1:]
    if body[0] == "-" and not body.startswith("-0x"):
        negative, body = True, body[1:]
    flags: dict[str, Any] = {"text": text, "negative": negative, "inverted": inverted}
    if label := re.match(r"`\((\S+)\)$", body):
        return Operand("L", 0, label[1])
    if body.startswith(("[", "desc")):
        return Operand("M", 0, text, terms=_terms(body[body.rindex("[") + 1 : body.rindex("]")]))
    if constant := re.match(r"c\[0x(\w+)\]\[0x(\w+)\]$", body):
        return Operand("C", int(constant[2], 16), **flags)
    bare = body.split(".")[0]
    if register := _REGISTER.match(bare):
        last = {"R": 255, "UR": 255, "P": 7, "UP": 7}[register[1]]
        return Operand(register[1], int(register[2]) if register[2].isdigit() else last, **flags)
    if re.match(r"-?0x[0-9a-f]+$", body):
        return Operand("I", int(body, 0) & 0xFFFFFFFF, **flags)
    return Operand("S", 0, **flags)


def _terms(inside: str) -> tuple[tuple[Operand | None, str, int], ...]:
    terms: list[tuple[Operand | None, str, int]] = []
    for part in inside.split("+"):
        if re.match(r"-?0x", part):
            terms.append((None, "", int(part, 16)))
        else:
            name, _, suffix = part.partition(".")
            terms.append((operand(name), suffix, 0))
    return tuple(terms)


_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_SOURCE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')


def parse(text: str) -> Program:
    """The only kernel of ``nvdisasm -c -gi``."""
    program = Program()
    lines: list[tuple[str, int]] = []
    is_new = True
    for row in text.splitlines():
        if row.startswith("//") and ".text." not in row and program.code:
            break
        if row.startswith((".", "$")):  # also functions of the compiler's own
            program.labels[row.partition(":")[0].strip()] = len(program.code)
        elif source := _SOURCE.match(row):
            if is_new:
                lines, is_new = [], False
            path = Path(source[1])
            lines.append((f"{path.parent.name}/{path.name}", int(source[2])))
        elif found := _LINE.match(row):
            is_new = True
            program.code.append(_instruction(found, tuple(lines)))
    return program


def _instruction(found: re.Match[str], lines: tuple[tuple[str, int], ...]) -> Instruction:
    text = found[2]
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    opcode, _, arguments = rest.strip().partition(" ")
    name, *modifiers = opcode.split(".")
    operands = tuple(operand(part) for part in re.split(r",\s*", arguments.strip()) if part)
    return Instruction(
        int(found[1], 16), operand(guard[1:]) if guard else None, name, tuple(modifiers), operands,
        lines, text,
    )  # fmt: skip


@cache
def disassemble(cubin: bytes) -> Program:
    """A compiled kernel's instructions."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-gi", file.name]
        program = parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if not program.code:
        raise ValueError("nvdisasm: expected instructions, found none")
    return program


def _split(ins: Instruction) -> tuple[Operand, list[Operand], list[Operand]]:
    """``(destination, its predicates, sources)``: predicates right after the destination are written."""
    first, *rest = ins.operands
    written = []
    while rest and rest[0].kind in ("P", "UP"):
        written.append(rest.pop(0))
    return first, written, rest


def _signed(value: Array) -> Array:
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def _low(value: Array) -> Array:
    return (value.astype(np.uint64) & M32).astype(np.uint32)


def _is_predicate(o: Operand) -> bool:
    return o.kind in ("P", "UP")


def _add(w: Registers, ins: Instruction, mask: Array) -> None:
    d, carries, sources = _split(ins)
    total = np.zeros(1, np.uint64)
    for o in sources:
        if _is_predicate(o):
            total = total + w.predicate(o)
        elif o.negative:  # -x is ~x + 1: its carry is that of a subtraction
            total = total + (np.negative(w.value(o)) ^ np.uint32(0xFFFFFFFF)) + np.uint64(1)
        else:
            total = total + w.value(o)
    carry = total >> np.uint64(32)
    w.write(d, _low(total), mask)
    for i, o in enumerate(carries):
        w.write(o, carry > i, mask)


def _mad(w: Registers, ins: Instruction, mask: Array) -> None:
    d, carries, sources = _split(ins)
    a, b, c, *ins_carry = sources
    is_unsigned = "U32" in ins.modifiers
    x, y = w.value(a), w.value(b)
    if "WIDE" in ins.modifiers or "HI" in ins.modifiers:
        if is_unsigned:
            product = x.astype(np.uint64) * y.astype(np.uint64)
        else:
            product = (_signed(x) * _signed(y)).view(np.uint64)
        total = product + w.wide(c)
        if "HI" in ins.modifiers:
            w.write(d, _low(total >> np.uint64(32)), mask)
            return
        for o in carries[:1]:
            w.write(o, total < product, mask)
        w.write_wide(d, total, mask)
        return
    total = x.astype(np.uint64) * y.astype(np.uint64) % np.uint64(1 << 32) + w.value(c)
    for o in ins_carry:
        total = total + w.predicate(o)
    w.write(d, _low(total), mask)
    for o in carries[:1]:
        w.write(o, total > M32, mask)


def _extreme(w: Registers, ins: Instruction, mask: Array) -> None:
    d, _, sources = _split(ins)
    least = w.predicate(sources[-1])
    values = [w.value(o) for o in sources[:-1]]
    if "VIADDMNMX" in ins.name:
        values = [_low(values[0].astype(np.uint64) + values[1]), values[2]]
    if "U32" not in ins.modifiers:
        values = [_signed(v) for v in values]
    low, high = values[0], values[0]
    for v in values[1:]:
        low, high = np.minimum(low, v), np.maximum(high, v)
    result = np.where(least, low, high)
    if "RELU" in ins.modifiers:
        result = np.maximum(result, 0)
    w.write(d, result.astype(np.int64).view(np.uint64).astype(np.uint32), mask)


def _table(a: Array, b: Array, c: Array, lut: int) -> Array:
    result = np.zeros(1, a.dtype)
    for i in range(8):
        if lut >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result


def _logic(w: Registers, ins: Instruction, mask: Array) -> None:
    operands = list(ins.operands)
    flag = operands.pop(0) if _is_predicate(operands[0]) else None
    d, a, b, c, lut, also = operands
    result = _table(w.value(a), w.value(b), w.value(c), lut.number)
    w.write(d, result, mask)
    if flag is not None:
        w.write(flag, (result != 0) | w.predicate(also), mask)


def _predicate_logic(w: Registers, ins: Instruction, mask: Array) -> None:
    first, second, a, b, c, lut, other = ins.operands
    values = [w.predicate(o) for o in (a, b, c)]
    w.write(first, _table(*values, lut.number), mask)
    w.write(second, _table(*values, other.number), mask)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal,
    "NE": np.not_equal,
}  # fmt: skip


def _compare(w: Registers, ins: Instruction, mask: Array) -> None:
    first, second, a, b, also, *below = ins.operands
    x, y = w.value(a), w.value(b)
    if "U32" not in ins.modifiers:
        x, y = _signed(x), _signed(y)
    result = _COMPARE[ins.modifiers[0]](x, y)
    if "EX" in ins.modifiers:  # upper words: where they are equal, what the lower ones gave
        result = np.where(x == y, w.predicate(below[0]), result)
    for o, r in ((first, result), (second, ~result)):
        extra = w.predicate(also)
        combined = r | extra if "OR" in ins.modifiers else r ^ extra if "XOR" in ins.modifiers else r & extra
        w.write(o, combined, mask)


def _select(w: Registers, ins: Instruction, mask: Array) -> None:
    d, a, b, p = ins.operands
    w.write(d, np.where(w.predicate(p), w.value(a), w.value(b)), mask)


def _shift(w: Registers, ins: Instruction, mask: Array) -> None:
    d, a, s, c = ins.operands
    kind = next(m for m in ins.modifiers if m[1:] in ("32", "64"))
    is_high, most = "HI" in ins.modifiers, 64 if kind[1:] == "64" else 32
    by = np.minimum(w.value(s).astype(np.uint64), np.uint64(most))
    low, high = w.value(a).astype(np.uint64), w.value(c).astype(np.uint64)
    both = low | high << np.uint64(32)
    # NumPy's shift by 64 is not 0: two shifts by half.
    half, rest = by // np.uint64(2), by - by // np.uint64(2)
    if ins.modifiers[0] == "L":
        both = both << half << rest
    elif kind[0] == "S":
        both = (both.view(np.int64) >> half.view(np.int64) >> rest.view(np.int64)).view(np.uint64)
    else:
        both = both >> half >> rest
    w.write(d, _low(both >> np.uint64(32) if is_high else both), mask)


def _shift_add(w: Registers, ins: Instruction, mask: Array) -> None:
    d, carries, sources = _split(ins)
    carry_in = w.predicate(sources.pop()) if _is_predicate(sources[-1]) else np.zeros(1, bool)
    by = np.uint64(sources[-1].number)
    a, b = w.value(sources[0]), w.value(sources[1])
    if "HI" in ins.modifiers:
        upper = np.zeros(1, np.uint64)
        if "SX32" in ins.modifiers:
            upper = _signed(a).view(np.uint64) >> np.uint64(32)
        elif len(sources) == 4:
            upper = w.value(sources[2]).astype(np.uint64)
        shifted = (a.astype(np.uint64) | upper << np.uint64(32)) << by >> np.uint64(32)
    else:
        shifted = a.astype(np.uint64) << by & M32
    total = shifted + b + carry_in
    w.write(d, _low(total), mask)
    for o in carries[:1]:
        w.write(o, total > M32, mask)


def _permute(w: Registers, ins: Instruction, mask: Array) -> None:
    d, a, s, c = ins.operands
    both = [w.value(o).view(np.uint8).reshape(-1, 4)[:, i] for o in (a, c) for i in range(4)]
    result = np.empty((32, 4), np.uint8)
    for i in range(4):
        pick = w.value(s) >> np.uint32(4 * i) & np.uint32(15)
        if s.kind == "I":
            chosen, is_sign = both[int(pick[0]) & 7], bool(pick[0] & 8)
        else:
            chosen, is_sign = np.choose(pick & 7, both), pick & 8 > 0
        result[:, i] = np.where(is_sign, (chosen >> np.uint8(7)) * np.uint8(255), chosen)
    w.write(d, result.view(np.uint32)[:, 0], mask)


def _extend(w: Registers, ins: Instruction, mask: Array) -> None:
    d, a, n = ins.operands
    left = np.int64(64) - w.value(n).astype(np.int64)
    value = w.value(a).astype(np.uint64) << left.view(np.uint64)
    is_unsigned = "U32" in ins.modifiers
    value = value >> left.view(np.uint64) if is_unsigned else (value.view(np.int64) >> left).view(np.uint64)
    w.write(d, _low(value), mask)


def _from_predicates(w: Registers, ins: Instruction, mask: Array) -> None:
    d, _, a, keep = ins.operands
    bits = sum(w.p[i].astype(np.uint32) << np.uint32(i) for i in range(7))
    w.write(d, w.value(a) & ~w.value(keep) | np.asarray(bits, np.uint32) & w.value(keep), mask)


def _special(w: Registers, ins: Instruction, mask: Array) -> None:
    d, s = ins.operands
    value = np.zeros(1, np.uint32) if s.text == "SRZ" else w.special[s.text]
    w.write(d, value, mask)
    if ins.name == "CS2R" and "32" not in ins.modifiers:
        w.write(d, value * 0, mask, 1)


def _load_constant(w: Registers, ins: Instruction, mask: Array) -> None:
    d, c = ins.operands
    words = int(next((m for m in ins.modifiers if m in ("64", "128")), "32")) // 32
    for i in range(words):
        w.write(d, np.frombuffer(w.constants, np.uint32, 1, c.number + 4 * i), mask, i)


def _reduce(w: Registers, ins: Instruction, mask: Array) -> None:
    values = w.value(ins.operands[1])[mask]
    if "S32" in ins.modifiers:
        values = values.view(np.int32)
    how = {"MAX": np.maximum, "MIN": np.minimum, "SUM": np.add, "OR": np.bitwise_or, "AND": np.bitwise_and}
    result = int(how[ins.modifiers[0] if ins.modifiers else "SUM"].reduce(values)) & 0xFFFFFFFF
    w.write(ins.operands[0], np.array([result], np.uint32), mask)


def _vote(w: Registers, ins: Instruction, mask: Array) -> None:
    """``VOTEU.ANY``: the lanes where a predicate holds as bits, or whether there are any."""
    *written, p = ins.operands
    lanes = np.broadcast_to(w.predicate(p), (32,)) & mask
    for o in written:
        bits = lanes.any() if _is_predicate(o) else np.sum(1 << ALL[lanes])
        w.write(o, np.array([int(bits)], np.uint64).astype(np.uint32), mask)


def _shuffle(w: Registers, ins: Instruction, mask: Array) -> None:
    flag, d, a, b, c = ins.operands
    by, limit = w.value(b).astype(np.int64), w.value(c).astype(np.int64)
    segment = limit >> 8 & 31
    first, last = ALL & segment, ALL & segment | (limit & 31 & ~segment)
    kind = ins.modifiers[0]
    source = {"UP": ALL - by, "DOWN": ALL + by, "BFLY": ALL ^ by, "IDX": first | (by & ~segment)}[kind]
    inside = source >= last if kind == "UP" else source <= last
    source = np.where(inside, source, ALL) & 31
    w.write(d, np.broadcast_to(w.value(a), (32,))[source], mask)
    w.write(flag, inside, mask)


def _unary(w: Registers, ins: Instruction, mask: Array) -> None:
    value = w.value(ins.operands[1])
    w.write(ins.operands[0], np.bitwise_count(value) if ins.name == "POPC" else value, mask)


def _zero(w: Registers, ins: Instruction, mask: Array) -> None:
    """``HFMA2.MMA Rd, -RZ, RZ, 0, 0``: another way to write 0."""
    d, a, b, *halves = ins.operands
    if (a.number, b.number) != (255, 255) or [o.text for o in halves] != ["0", "0"]:
        raise NotImplementedError(ins.text)
    w.write(d, np.zeros(1, np.uint32), mask)


#: The instructions of the library's kernels, as Triton 3.6 and 3.9 compile them for `BANKS`.
_NAMES: dict[Callable[[Registers, Instruction, Array], None], str] = {
    _add: "IADD3 UIADD3 VIADD",
    _mad: "IMAD UIMAD",
    _unary: "MOV UMOV R2UR POPC",
    _zero: "HFMA2",
    _extreme: "VIMNMX VIMNMX3 VIADDMNMX IMNMX",
    _logic: "LOP3 ULOP3",
    _predicate_logic: "PLOP3 UPLOP3",
    _compare: "ISETP UISETP",
    _select: "SEL USEL",
    _shift: "SHF USHF",
    _shift_add: "LEA ULEA",
    _permute: "PRMT",
    _extend: "SGXT USGXT",
    _from_predicates: "P2R",
    _special: "S2R S2UR CS2R",
    _load_constant: "LDC ULDC LDCU",
    _reduce: "REDUX CREDUX",
    _vote: "VOTEU",
    _shuffle: "SHFL",
    lambda w, ins, mask: None: "NOP BAR ENDCOLLECTIVE",
}

#: Name of an instruction → what it does to the registers of a warp, in the lanes of a mask.
OPERATIONS = {name: function for function, names in _NAMES.items() for name in names.split()}
