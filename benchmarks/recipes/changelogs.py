"""Changelog prose: what a release changed, in passages of a few paragraphs; and its first sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.recipes.groups import Group, Output, Task, fives, shuffled
from benchmarks.recipes.packages import PROSE, Package, Shelf

NAME = "changelog"
#: The last is of outputs, so that a long changelog does not make most of them.
MOST_GROUPS, MOST_OUTPUTS, MOST_OF_A_PACKAGE = 300, 240, 100
#: Characters of a passage.
SHORTEST, LONGEST = 420, 1_600

_FILES = re.compile(r"(.*/)?(change(s|log)|whatsnew)[^/]*\.(rst|md)", re.IGNORECASE)
#: Links, each with what stays of it.
_LINKS = (
    (re.compile(r"`([^`<>]+?) ?<[^`>]*>`__?"), r"\1"),
    (re.compile(r"\[([^\]]*)\]\((?:[^()]|\([^()]*\))*\)"), r"\1"),
    (re.compile(r"\[`?[0-9a-f]{7,}`?\] - "), ""),
    (re.compile(r"`[0-9a-f]{7,}` - "), ""),
    (re.compile(r" ?\*\((PR|commit) [^)]*\)\*"), ""),
    (re.compile(r"<?https?://\S+>?"), ""),
)
_RULE = re.compile(r"^[=\-~^.*+#\"]{3,}$", re.MULTILINE)


def task(shelf: Shelf) -> Task:
    """Groups of consecutive passages of one package, and single passages."""
    groups = [Group(NAME, _ask(p), five) for p in PROSE["train"] for five in fives(passages(shelf, p))]
    outputs = [
        Output(NAME, _ask(p), text)
        for p in PROSE["test"]
        for text in shuffled(passages(shelf, p), NAME)[:MOST_OF_A_PACKAGE]
    ]
    return Task(shuffled(groups, NAME)[:MOST_GROUPS], shuffled(outputs, NAME)[:MOST_OUTPUTS])


def _ask(package: Package) -> str:
    return f"Write the release notes of {package.name}.\n"


def paragraphs(shelf: Shelf, package: Package) -> list[str]:
    """The paragraphs of a package's changelogs without links, each once, in their order."""
    found: dict[str, None] = {}
    for path, text in shelf.texts(package, "document").items():
        if _FILES.fullmatch(path) and len(text) > 1_000:
            for paragraph in re.split(r"\n\s*\n", _RULE.sub("", _unlinked(text))):
                if len(paragraph.strip()) >= 30:
                    found[paragraph.strip("\n")] = None
    return list(found)


def _unlinked(text: str) -> str:
    for pattern, stays in _LINKS:
        text = pattern.sub(stays, text)
    return text


def passages(shelf: Shelf, package: Package) -> list[str]:
    """Consecutive paragraphs of `SHORTEST` to `LONGEST` characters together."""
    found, taken = [], ""
    for paragraph in paragraphs(shelf, package):
        taken += paragraph + "\n\n"
        if len(taken) > LONGEST:
            taken = ""
        elif len(taken) >= SHORTEST:
            found.append(taken)
            taken = ""
    return found


def sentences(shelf: Shelf, packages: Iterable[Package]) -> list[tuple[str, str]]:
    """``(package, sentence)``: first sentences of changelog entries that read like a ticket's title."""
    found: dict[str, str] = {}
    for package in packages:
        for paragraph in paragraphs(shelf, package):
            for entry in re.split(r"^\s*[-*] +", paragraph, flags=re.MULTILINE):
                plain = " ".join(re.sub(r"^(#\d+:?|\*\*[\w ]+\*\*:?)\s*", "", entry.strip()).split())
                plain = re.sub(r":\w+:`([^`]*)`", r"\1", plain).replace("`", "")
                sentence = re.split(r"(?<=[a-z)])\. |: $|\.$| \(#|, PR#", plain)[0].strip(" .:")
                if 25 <= len(sentence) <= 80 and re.match(r"[A-Z]", sentence) and '"' not in sentence:
                    found.setdefault(sentence, package.name)
    return sorted((package, sentence) for sentence, package in found.items())
