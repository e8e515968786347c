"""Edits of known kinds on real text, drawn from a seed: what release histories are short of.

Each kind is a function ``(text, donor, rng) -> edited text``, or None where the text does not lend itself to it.
The text is the prediction and the edited text the output. `donor` is another text of the same sort, for new
material.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

Edit = Callable[[str, str, random.Random], "str | None"]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORDS = frozenset([
    "and", "as", "assert", "async", "await", "break", "case", "class", "continue", "def", "del", "elif",
    "else", "except", "false", "finally", "for", "from", "global", "if", "import", "in", "is", "lambda",
    "none", "nonlocal", "not", "or", "pass", "raise", "return", "self", "true", "try", "while", "with",
    "yield", "the", "that", "this", "when", "have", "will", "which", "there", "their", "your", "string",
    "select", "insert", "update", "delete", "where", "create", "table", "values", "null", "default",
    "primary", "integer", "text",
])  # fmt: skip


def near_verbatim(text: str, donor: str, rng: random.Random) -> str | None:
    """One to three small changes: a word, a number, a line gone, a line doubled or a line put in."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 12:
        return None
    for _ in range(rng.randint(1, 3)):
        _change_line(lines, donor, rng)
    return _changed(text, "".join(lines))


def rename(text: str, donor: str, rng: random.Random) -> str | None:
    """One name that occurs five times or more is replaced everywhere by a name that is not in the text."""
    counts = Counter(_WORD.findall(text))
    names = [w for w, n in counts.items() if n >= 5 and len(w) >= 4 and w.lower() not in _KEYWORDS]
    if not names:
        return None
    old = rng.choice(sorted(names))
    parts = [w for w in _words(donor) if 4 <= len(w) <= 12 and w.isalpha() and w not in counts]
    if not parts:
        return None
    part = rng.choice(parts)
    styles = [part, f"{old}_{part.lower()}", f"{part.lower()}_{old}", f"new_{old}"]
    new = rng.choice([s for s in styles if s not in counts] or [f"{old}_renamed"])
    return _changed(text, re.sub(rf"(?<![A-Za-z0-9_]){re.escape(old)}(?![A-Za-z0-9_])", new, text))


def moved_blocks(text: str, donor: str, rng: random.Random) -> str | None:
    """One to three blocks, as blank lines part them, go elsewhere."""
    blocks = _blocks(text)
    if len(blocks) < 6:
        return None
    for _ in range(rng.randint(1, 3)):
        block = blocks.pop(rng.randrange(len(blocks)))
        blocks.insert(rng.randrange(len(blocks) + 1), block)
    return _changed(text, "".join(blocks))


def large_insertions(text: str, donor: str, rng: random.Random) -> str | None:
    """One or two stretches of 15 to 60 lines of another text are put in between blocks."""
    blocks, new = _blocks(text), donor.splitlines(keepends=True)
    if len(blocks) < 3 or len(new) < 20:
        return None
    for _ in range(rng.randint(1, 2)):
        size = min(rng.randint(15, 60), len(new))
        start = rng.randrange(len(new) - size + 1)
        blocks.insert(rng.randrange(1, len(blocks)), "".join(new[start : start + size]))
    return _changed(text, "".join(blocks))


def heavy_rewrite(text: str, donor: str, rng: random.Random) -> str | None:
    """About half of the lines change or go, in runs of up to eight, and some blocks swap places."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 20:
        return None
    new = donor.splitlines(keepends=True) or ["\n"]
    rewritten: list[str] = []
    at = 0
    while at < len(lines):
        run = rng.randint(1, 8)
        part = lines[at : at + run]
        if rng.random() < 0.7:
            for line in part:
                what = rng.random() if line.strip() else 1.0
                if what < 0.55:
                    line = change_word(change_word(line, donor, rng), donor, rng)
                elif what < 0.65:
                    line = rng.choice(new)
                if not 0.65 <= what < 0.75:  # else the line is gone
                    rewritten.append(line)
        else:
            rewritten += part
        at += run
    blocks = _blocks("".join(rewritten))
    for _ in range(len(blocks) // 8):
        at = rng.randrange(len(blocks) - 1)
        blocks[at : at + 2] = blocks[at : at + 2][::-1]
    return _changed(text, "".join(blocks))


#: Kind of a record -> the edit that makes it.
EDITS: dict[str, Edit] = {
    "near_verbatim": near_verbatim,
    "rename": rename,
    "moved_blocks": moved_blocks,
    "large_insertions": large_insertions,
    "heavy_rewrite": heavy_rewrite,
}


def one_line_edit(text: str, donor: str, rng: random.Random) -> str | None:
    """Exactly one line, which is not blank, has one of its words or numbers replaced."""
    lines = text.splitlines(keepends=True)
    candidates = [i for i, line in enumerate(lines) if re.search(r"[A-Za-z0-9]", line)]
    if not candidates:
        return None
    at = rng.choice(candidates)
    lines[at] = change_word(lines[at], donor, rng)
    return _changed(text, "".join(lines))


def _changed(before: str, after: str) -> str | None:
    return after if after != before and after.strip() else None


def _blocks(text: str) -> list[str]:
    """Stretches of text with the blank lines that follow them; joined again they are the text."""
    return re.findall(r"(?:.*\S.*(?:\n|$))+(?:[ \t]*\n)*|(?:[ \t]*\n)+", text)


def _change_line(lines: list[str], donor: str, rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    what = rng.random()
    if what < 0.5:
        lines[at] = change_word(lines[at], donor, rng)
    elif what < 0.65 and len(lines) > 1:
        del lines[at]
    elif what < 0.75:
        lines.insert(at, lines[at])
    else:
        new = [line for line in donor.splitlines(keepends=True) if line.strip()] or ["\n"]
        start = rng.randrange(len(new))
        indent = indent_of(lines[at])
        lines[at:at] = [indent + line.lstrip() for line in new[start : start + rng.randint(1, 3)]]


def change_word(line: str, donor: str, rng: random.Random) -> str:
    """One word of a line becomes another word of `donor`, or one number a larger one."""
    found = list(re.finditer(r"[A-Za-z_][A-Za-z0-9_]*|\d+", line))
    if not found:
        return line
    hit = rng.choice(found)
    if hit.group().isdigit():
        new = str(int(hit.group()) + rng.choice((1, 2, 10, 100)))
    else:
        words = [word for word in _words(donor) if word != hit.group()] or ["value"]
        new = rng.choice(words)
    return line[: hit.start()] + new + line[hit.end() :]


@lru_cache(maxsize=64)
def _words(text: str) -> tuple[str, ...]:
    return tuple(sorted(set(_WORD.findall(text))))


def indent_of(line: str) -> str:
    """The blanks that a line begins with."""
    return line[: len(line) - len(line.lstrip(" \t"))]
