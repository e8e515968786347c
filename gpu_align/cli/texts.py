"""The texts under some files and folders, each with the source that it belongs to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Texts:
    """What `find_texts` found; `read` counts what becomes of it.

    Attributes:
        files: ``(source, path)``, every file once.
        num_read: files whose text was given out.
        num_bytes: their size.
        num_not_text: files that are not UTF-8, or hold a zero byte.
        num_unreadable: files that could not be opened.
        num_again: files with the same text as an earlier one of their source.
        sources: those that a text was given out of.
    """

    files: list[tuple[str, Path]]
    num_read: int = 0
    num_bytes: int = 0
    num_not_text: int = 0
    num_unreadable: int = 0
    num_again: int = 0
    sources: set[str] = field(default_factory=set)

    def read(self, told: Callable[[str, int], None]) -> Iterator[tuple[str, str]]:
        """``(source, text)`` of each file, line ends normalised to LF; `told` is called for each, text or not."""
        given = set()
        for source, path in self.files:
            told(Path(source).name, 1)
            try:
                content = path.read_bytes()
            except OSError:
                self.num_unreadable += 1
                continue
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                self.num_not_text += 1
                continue
            same = source, hashlib.sha256(content).digest()
            if same in given:
                self.num_again += 1
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
