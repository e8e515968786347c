"""The texts under some files and folders, each with the source that it belongs to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOT_TEXT, UNREADABLE, AGAIN = "not UTF-8 text", "not readable", "the same again"


@dataclass
class Texts:
    """The files that `find_texts` found, and the counts of `read`.

    Attributes:
        files: ``(source, path)``, every file once.
        num_read: files whose text was yielded.
        num_bytes: their size.
        skipped: counts of the other files by reason: not UTF-8 or with a zero byte, not readable, with the text of
            an earlier file of their source.
        sources: the sources of the texts that were yielded.
    """

    files: list[tuple[str, Path]]
    num_read: int = 0
    num_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys((NOT_TEXT, UNREADABLE, AGAIN), 0))
    sources: set[str] = field(default_factory=set)

    def read(self, told: Callable[[str, int], None]) -> Iterator[tuple[str, str]]:
        """``(source, text)`` of each file, line ends normalised to LF; `told` is called for each, text or not."""
        given = set()
        for source, path in self.files:
            told(Path(source).name, 1)
            try:
                content = path.read_bytes()
            except OSError:
                self.skipped[UNREADABLE] += 1
                continue
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                self.skipped[NOT_TEXT] += 1
                continue
            same = source, hashlib.sha256(content).digest()
            if same in given:
                self.skipped[AGAIN] += 1
                continue
            given.add(same)
            self.num_read += 1
            self.num_bytes += len(content)
            self.sources.add(source)
            yield source, text.replace("\r\n", "\n").replace("\r", "\n")


def find_texts(places: Sequence[Path], suffixes: Sequence[str] = ()) -> Texts:
    """The files among `places` and in the folders among them, each place a source.

    Of a folder, hidden files and folders are left out, links are not followed, and only names that end in one of
    `suffixes` are taken, if there are any. A file in two places belongs to the first.

    Raises:
        FileNotFoundError: a place is not there.
    """
    files: list[tuple[str, Path]] = []
    seen: set[Path] = set()
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place}: no such file or folder")
        source = str(place.resolve())
        for path in _inside(place, tuple(suffixes)) if place.is_dir() else [place]:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                files.append((source, path))
    return Texts(files)


def _inside(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            wanted = not name.startswith(".") and (not suffixes or name.endswith(suffixes))
            if wanted and path.is_file() and not path.is_symlink():
                yield path
