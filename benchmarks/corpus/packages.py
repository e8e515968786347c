"""Whole packages of a split as texts: what recipes are learned from, and what must not be learned from."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from benchmarks.corpus.files import NPM, SETS, SORTS, Fetch, download, fetch_all, sort_of, texts_in
from benchmarks.corpus.kinds import RELEASES, is_written

#: Most characters of a text, and of all texts of one sort in one package.
MAX_CHARACTERS, MAX_OF_SORT = 400_000, 3_000_000
#: Folders of other projects' code, all that begin with one of these words. It says nothing about what this package
#: writes, and it may be of a package of the other split: grpcio has upb, which is protobuf's.
VENDORED = ("third_party", "vendor", "_vendor", "vendored", "node_modules", "upb")


def package_texts(
    split: str, cache: Path, fetch: Fetch = download, everything: bool = False
) -> Iterator[tuple[str, str]]:
    """``(package, text)`` of the first and the last release of every package of a split, sorted by package.

    Every file that is of one of `SORTS`, not `VENDORED`, at most `MAX_CHARACTERS` long and with lines as short as
    people write them; of a package each text once. Of a package and sort at most `MAX_OF_SORT` characters, in the
    order of a hash of release and path: of a large package more files are taken than both releases of some.
    everything: every file of every release, whatever its length and whoever wrote it.
    """
    chosen = [*RELEASES[split], *(releases for _, releases in SETS[split])]
    wanted = sorted(
        {a for r in chosen for a in (r.archives if everything else (r.archives[0], r.archives[-1]))}
    )
    by_package: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for (name, version, _), archive in zip(wanted, fetch_all(wanted, cache, fetch), strict=True):
        by_package[name.removeprefix(NPM)].append((version, archive))
    for package in sorted(by_package):
        seen: set[str] = set()
        left = dict.fromkeys(SORTS, MAX_OF_SORT)
        for path, text in _files(by_package[package]):
            sort = sort_of(path, SORTS)
            if text in seen or sort is None:
                continue
            if not everything:
                is_whole = 0 < len(text) <= min(MAX_CHARACTERS, left[sort]) and is_written(text)
                if is_vendored(path) or not is_whole:
                    continue
                left[sort] -= len(text)
            seen.add(text)
            yield package, text


def is_vendored(path: str) -> bool:
    """Whether a file is in a folder of another project's code.

    >>> is_vendored("core/ext/upb-generated/a.h"), is_vendored("vendor.py")
    (True, False)
    """
    return any(folder.startswith(VENDORED) for folder in PurePosixPath(path).parts[:-1])


def _files(archives: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """``(path, text)`` of all releases, in the order of a hash."""
    found = [
        (hashlib.sha256(f"{version}/{path}".encode()).digest(), path, text)
        for version, archive in archives
        for path, text in texts_in(archive, SORTS).items()
    ]
    for _, path, text in sorted(found):
        yield path, text
