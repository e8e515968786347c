"""Machine code of a kernel as Python objects: nvdisasm's text with control words, operands and source lines.

An instruction has 128 bits (sm_70 and later). What the scheduler is to do with it stands in bits 105 to 125:

    105–108  stall    cycles until the warp may issue its next instruction
    109      yield    0: another warp may go first
    110–112  write    scoreboard that the result counts on until it is there; 7 is none
    113–115  read     scoreboard that the source registers count on until they are read; 7 is none
    116–121  wait     scoreboards that have to be at 0 before this one issues, a bit each
    122–125  reuse    operands kept in the reuse cache

Two checks of this: in whole kernels every global load has a write scoreboard and no addition has one, and the
first use of a load's result waits for just that scoreboard.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

NONE = 7


class Control(NamedTuple):
    """The control word of an instruction, see above."""

    stall: int
    yields: bool
    write: int
    read: int
    wait: int
    reuse: int


def decode(upper: int) -> Control:
    """From the upper 64 bits of an instruction."""
    bits = upper >> 41
    return Control(
        bits & 15, not bits >> 4 & 1, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63, bits >> 17 & 15
    )


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        kind: R, UR, P, UP (registers), I (immediate), F (immediate with a point), C (constant bank), M (memory),
            L (label), S (special register or a name).
        number: register number (255: RZ, 7: PT), immediate modulo 2**32, offset in the constant bank.
        negative, absolute, inverted: of a value: minus, absolute, every bit; `inverted` of a predicate: not.
        text: as printed, without ``.reuse``.
        terms: of a memory operand what is added: (register or None, suffixes, immediate).
    """

    kind: str
    number: int
    text: str
    negative: bool = False
    absolute: bool = False
    inverted: bool = False
    terms: tuple[tuple[Operand | None, str, int], ...] = ()


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@guard name.modifiers operands``."""

    address: int
    guard: Operand | None
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    control: Control
    #: Source lines, the innermost function's first: ("kernels/realign.py", 147).
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
    body, inverted, negative, absolute = text, False, False, False
    if body[0] in "!~":
        inverted, body = True, body[1:]
    if body[0] == "-" and not re.match(r"-(0x|\d|\.|INF|QNAN)", body):
        negative, body = True, body[1:]
    if body[0] == "|":
        absolute, body = True, body[1:-1]
    flags: dict[str, Any] = {"text": text, "negative": negative, "absolute": absolute, "inverted": inverted}
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
    if re.match(r"-?0x[0-9a-f]+$", body) or re.match(r"-?\d+$", body):
        return Operand("I", int(body, 0) & 0xFFFFFFFF, **flags)
    if re.match(r"[-+]?(\d|\.|INF|QNAN)", body):
        return Operand("F", 0, **flags)
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


_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_SOURCE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')


def parse(text: str) -> Program:
    """The only kernel of ``nvdisasm -c -gi -hex``.

    Raises:
        ValueError: an instruction without its encoding.
    """
    program, rows = Program(), iter(text.splitlines())
    lines: list[tuple[str, int]] = []
    is_new = True
    for row in rows:
        if row.startswith("//") and ".text." not in row and program.code:
            break
        if row.startswith("."):
            program.labels[row.partition(":")[0].strip()] = len(program.code)
        elif source := _SOURCE.match(row):
            if is_new:
                lines, is_new = [], False
            path = Path(source[1])
            lines.append((f"{path.parent.name}/{path.name}", int(source[2])))
        elif found := _LINE.match(row):
            upper = _UPPER.match(next(rows, ""))
            if upper is None:
                raise ValueError(f"expected the upper half of an encoding after {row.strip()!r}")
            is_new = True
            program.code.append(_instruction(found, int(upper[1], 16), tuple(lines)))
    return program


def _instruction(found: re.Match[str], upper: int, lines: tuple[tuple[str, int], ...]) -> Instruction:
    text = found[2]
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    opcode, _, arguments = rest.strip().partition(" ")
    name, *modifiers = opcode.split(".")
    operands = tuple(operand(part) for part in re.split(r",\s*", arguments.strip()) if part)
    return Instruction(
        int(found[1], 16), operand(guard[1:]) if guard else None, name, tuple(modifiers), operands,
        decode(upper), lines, text,
    )  # fmt: skip


def disassemble(cubin: bytes) -> Program:
    """A compiled kernel's instructions.

    Raises:
        ValueError: nvdisasm printed nothing that can be read.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-gi", "-hex", file.name]
        program = parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if not program.code:
        raise ValueError("nvdisasm: expected instructions, found none")
    return program
