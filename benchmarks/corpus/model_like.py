"""Texts as language models return them, made by a script of typed edits with stated rates.

A model that is asked for a change keeps most lines. What it does to the others is in `EDITS`, each with the share
of outputs that have it. `wrong_lines` and `badly_applied` make predictions that are worse than the text before the
change: a first draft, and the result of a diff that did not apply.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher

from benchmarks.corpus.edits import change_word, indent_of

Lines = list[str]
#: ``(lines, lines of another text, kind of text, rng) -> changed lines``, or the same if there is nothing to do.
LineEdit = Callable[[Lines, Lines, str, random.Random], Lines]

#: Kind of text -> how a comment line begins and ends. JSON has none.
_COMMENT = {
    "python": ("# ", ""), "sql": ("-- ", ""), "document": ("<!-- ", " -->"), "markup": ("# ", ""),
    "javascript": ("// ", ""), "typescript": ("// ", ""), "c": ("/* ", " */"), "cpp": ("// ", ""),
    "rust": ("// ", ""),
}  # fmt: skip
_IS_COMMENT = {
    "python": r"\s*#(?!!)", "markup": r"\s*(#\s|//|<!--.*-->\s*$|/\*.*\*/\s*$)", "sql": r"\s*--",
    **dict.fromkeys(("javascript", "typescript", "c", "cpp", "rust"), r"\s*(//|/\*.*\*/\s*$)"),
}  # fmt: skip
_IS_IMPORT = {
    "python": r"(import|from)\s", "rust": r"use\s", "c": r"#\s*include\b", "cpp": r"#\s*include\b",
    **dict.fromkeys(("javascript", "typescript"), r"(import\s|(const|var|let)\s.*=\s*require\()"),
    "markup": r"@import\b",
}  # fmt: skip
_FENCE = {"document": "markdown", "markup": "yaml"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
_REMARKS = (
    "Handle the empty case first", "Keep the previous behaviour for callers", "Validate the input",
    "Return early when there is nothing to do", "Use the default if none is given", "Update the state",
)  # fmt: skip


def drop_comments(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """Seven of ten comment lines are gone."""
    pattern = _IS_COMMENT.get(kind)
    return [ln for ln in lines if not (pattern and re.match(pattern, ln) and rng.random() < 0.7)]


def reorder_imports(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """Each run of three import lines or more is sorted, or shuffled where it was sorted."""
    pattern = _IS_IMPORT.get(kind)
    if pattern is None:
        return lines
    result, at = list(lines), 0
    while at < len(result):
        end, opens = at, re.compile(r"[({]\s*$")
        while end < len(result) and re.match(pattern, result[end]) and not opens.search(result[end]):
            end += 1
        if end - at >= 3:
            run = sorted(result[at:end])
            if run == result[at:end]:
                rng.shuffle(run)
            result[at:end] = run
        at = max(end, at + 1)
    return result


def rename(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """One name that occurs three times or more gets another one wherever it stands."""
    counts = Counter(name for line in lines for name in _NAME.findall(line))
    names = sorted(name for name, n in counts.items() if 3 <= n <= 60)
    if not names:
        return lines
    old = rng.choice(names)
    word = rng.choice(("value", "item", "current", "base", "local", "input", "inner", "data"))
    camel = old + word.capitalize() if old[0].islower() else word.capitalize() + old
    new = f"{old}_{word}" if old.islower() else camel
    return [re.sub(rf"\b{re.escape(old)}\b", new, line) for line in lines]


def change_lines(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """One to six of a hundred lines, one at least, get one or two other words or numbers."""
    result = list(lines)
    own, other = "".join(lines), "".join(donor)
    for at in rng.sample(range(len(lines)), max(1, int(len(lines) * rng.uniform(0.01, 0.06)))):
        for _ in range(rng.randint(1, 2)):
            result[at] = change_word(result[at], own if rng.random() < 0.7 else other, rng)
    return result


def add_lines(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """At one to four places, one to ten lines of another text of the kind, indented as the place is."""
    result = list(lines)
    new = [line for line in donor if line.strip()]
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(result) + 1), rng.randint(1, 10)
        if len(new) < size:
            break
        start = rng.randrange(len(new) - size + 1)
        block = new[start : start + size]
        indent, own = indent_of(result[min(at, len(result) - 1)]), min(map(indent_of, block), key=len)
        result[at:at] = [indent + line.removeprefix(own) for line in block]
    return result


def add_comments(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """Three of a hundred lines get a comment above them."""
    if kind not in _COMMENT:
        return lines
    begin, end = _COMMENT[kind]
    result: Lines = []
    for line in lines:
        if line.strip() and rng.random() < 0.03:
            result.append(f"{indent_of(line)}{begin}{rng.choice(_REMARKS)}{end}\n")
        result.append(line)
    return result


def remove_lines(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """At one to three places, one to eight lines are gone."""
    result = list(lines)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(result))
        del result[at : at + min(rng.randint(1, 8), len(result) // 4)]
    return result


def requote(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """Single quotes become double ones, or the other way where those are more."""
    text = "".join(lines)
    old, new = ("'", '"') if text.count("'") >= text.count('"') else ('"', "'")
    if kind == "json":
        return lines
    pattern = re.compile(rf"{old}([^'\"\n]*){old}")
    return [pattern.sub(rf"{new}\1{new}", line) for line in lines]


def reindent(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """Two spaces of indentation become four, or four become two."""
    indents = [len(indent_of(line)) for line in lines if line.startswith("  ")]
    if not indents:
        return lines
    to_two = sum(n % 4 == 0 for n in indents) > len(indents) * 0.8
    result = []
    for line in lines:
        indent = indent_of(line)
        spaces = " " * (len(indent) // 2 if to_two else len(indent) * 2)
        result.append(line if "\t" in indent else spaces + line[len(indent) :])
    return result


def truncate(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """A quarter to six tenths of the lines are a comment that the rest is unchanged, at the end or inside."""
    begin, end = _COMMENT.get(kind, ("", ""))
    size = int(len(lines) * rng.uniform(0.25, 0.6))
    at = len(lines) - size if rng.random() < 0.6 else rng.randrange(len(lines) - size + 1)
    remarks = "... rest unchanged", "... existing code ...", "(unchanged)", "... rest of the file ..."
    remark = rng.choice(remarks)
    return [*lines[:at], f"{indent_of(lines[at])}{begin}{remark}{end}\n", *lines[at + size :]]


def fence(lines: Lines, donor: Lines, kind: str, rng: random.Random) -> Lines:
    """A sentence and a fenced block around the text."""
    said = rng.choice(("Here is the updated file:", "Here's the modified version:", "Updated code:"))
    last = lines[-1] if lines[-1].endswith("\n") else lines[-1] + "\n"
    return [said + "\n", "\n", f"```{_FENCE.get(kind, kind)}\n", *lines[:-1], last, "```\n"]


#: What is done to a text, in this order, and the share of outputs that have it.
EDITS: dict[str, tuple[float, LineEdit]] = {
    "drop_comments": (0.30, drop_comments),
    "reorder_imports": (0.25, reorder_imports),
    "rename": (0.35, rename),
    "change_lines": (0.80, change_lines),
    "remove_lines": (0.35, remove_lines),
    "add_lines": (0.70, add_lines),
    "add_comments": (0.20, add_comments),
    "requote": (0.10, requote),
    "reindent": (0.05, reindent),
    "truncate": (0.12, truncate),
    "fence": (0.30, fence),
}
#: Fewest lines of a text that is edited.
MIN_LINES = 12


def model_output(text: str, donor: str, kind: str, rng: random.Random) -> str | None:
    """`text` after the edits that the rates of `EDITS` chose; None where it is too short or nothing changed."""
    lines, new = text.splitlines(keepends=True), donor.splitlines(keepends=True)
    if len(lines) < MIN_LINES or not new:
        return None
    for share, edit in EDITS.values():
        if rng.random() < share and len(lines) >= MIN_LINES:
            lines = edit(lines, new, kind, rng)
    changed = "".join(lines)
    return changed if changed != text else None


def wrong_lines(text: str, donor: str, share: float, rng: random.Random) -> str:
    """A first draft of `text`: this share of its lines is wrong, in runs of one to six.

    Of the wrong lines 55 % have one to three other words, 15 % are missing, 15 % are another text's, and 15 % are
    right but have a line of another text before them.
    """
    lines, new = text.splitlines(keepends=True), donor.splitlines(keepends=True) or ["\n"]
    result: Lines = []
    at = 0
    while at < len(lines):
        size = rng.randint(1, 6)
        run = lines[at : at + size]
        at += size
        if rng.random() >= share:
            result += run
            continue
        for line in run:
            what = rng.random()
            if what < 0.55:
                for _ in range(rng.randint(1, 3)):
                    line = change_word(line, text if rng.random() < 0.5 else donor, rng)
                result.append(line)
            elif 0.70 <= what < 0.85:
                result.append(rng.choice(new))
            elif what >= 0.85:
                result += [rng.choice(new), line]
    return "".join(result)


def badly_applied(before: str, after: str, rng: random.Random) -> str:
    """The diff from `before` to `after`, applied badly.

    Of its hunks 55 % are applied, 20 % left out, 15 % added without what they replace taken out, and 10 % applied
    one to four lines too far down.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    result: Lines = []
    late: list[tuple[int, Lines]] = []  # (line of the result at which it goes in, lines)
    for tag, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        what = rng.random()
        if tag == "equal" or 0.55 <= what < 0.75:
            result += old[i:j]
        elif what < 0.55:
            result += new[k:m]
        elif what < 0.90:
            result += [*new[k:m], *old[i:j]]
        else:
            late.append((len(result) + rng.randint(1, 4), new[k:m]))
    for at, lines in reversed(late):
        result[at:at] = lines
    return "".join(result)
