"""The texts of the experiments: those in ``texts/``, written for them, and files made by a script."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"
#: One line of a made function each; the names in braces are drawn anew for every line.
_LINES = (
    "{a} = {verb}_{b}({c}, {n})",
    "{a} = {b}.{verb}({c})",
    "{a} = [{b} for {b} in {c} if {b}.{d}]",
    '{a}["{b}"] = {c}.get("{d}", {n})',
    "{a}.append({verb}_{b}({c}))",
    "{a} += {b} * {n} - {c}",
    "if {a} > {n}: {b} = {c}",
    'logger.info("{verb} %s of %s", {a}, {b})',
    'assert {a} is not None, "no {b}"',
    "{a}, {b} = {c}.split({d})",
    "for {a} in {b}: {verb}_{c}({a}, {d})",
    'self.{a} = {b} or {c}["{d}"]',
)
_LINES_A_FUNCTION = 9


def read(name: str) -> str:
    """The text of one of the files."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


#: Parts of the names in made files.
_WORDS, _VERBS = read("words").split(), read("verbs").split()


def without_stanza(poem: str, number: int) -> str:
    """The poem without one of its stanzas, counted from 0."""
    stanzas = poem.split("\n\n")
    return "\n\n".join(stanzas[:number] + stanzas[number + 1 :])


def renamed(text: str, old: str, new: str) -> str:
    """The text with a name replaced wherever it stands alone."""
    return re.sub(rf"\b{old}\b", new, text)


def equal_lines(prediction: str, output: str) -> float:
    """The share of the output's lines, empty ones aside, that stand in the prediction as well."""
    known = set(prediction.splitlines())
    lines = [line for line in output.splitlines() if line.strip()]
    return sum(line in known for line in lines) / len(lines)


def made_lines(rng: random.Random, count: int) -> list[str]:
    """Lines like those of a program, in functions; hardly two are the same."""
    return [_made_line(rng, number) for number in range(count)]


def changed(lines: Sequence[str], share: float, in_one_block: bool, rng: random.Random) -> list[str]:
    """The lines with a share of them written anew: in one block, or scattered.

    Args:
        lines: of a made file.
        share: of the lines, 0 to 1, that change.
        in_one_block: those that change follow each other, somewhere in the file.
        rng: chooses which change, and what they become.
    """
    count = round(share * len(lines))
    if in_one_block:
        start = rng.randint(0, len(lines) - count)
        chosen = set(range(start, start + count))
    else:
        chosen = set(rng.sample(range(len(lines)), count))
    return [_made_line(rng, n) if n in chosen else line for n, line in enumerate(lines)]


def _made_line(rng: random.Random, number: int) -> str:
    def name() -> str:
        return "_".join(rng.sample(_WORDS, rng.choice((1, 1, 2))))

    if number % _LINES_A_FUNCTION == 0:
        return f"def {rng.choice(_VERBS)}_{name()}(self, {name()}, {name()}={rng.randrange(100)}):"
    names = dict(zip("abcd", (name() for _ in range(4)), strict=True))
    line = rng.choice(_LINES).format(**names, verb=rng.choice(_VERBS), n=rng.randrange(1, 1000))
    return f"    {line}"
