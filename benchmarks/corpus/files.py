"""From a package's releases to the texts that changed between them."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
from packaging.utils import canonicalize_name

#: Where archives, and what is made of them, are kept.
CACHE = Path(".cache/corpus")
#: Sort of text -> the file names that hold it. `METADATA` of a wheel carries the project's description.
SORTS = {
    "python": re.compile(r".*\.pyi?"),
    "document": re.compile(r".*\.(md|rst)|(docs?|Doc)/.*\.txt|METADATA"),
    "json": re.compile(r".*\.(json|ipynb|webmanifest)"),
    "config": re.compile(r".*\.(toml|ini|cfg|ya?ml|conf)"),
    "sql": re.compile(r".*\.(sql|sql\.jinja)"),
    "javascript": re.compile(r".*(?<!\.min)\.[cm]?jsx?"),
    "typescript": re.compile(r".*\.[cm]?tsx?"),
    "c": re.compile(r".*\.[ch]"),
    "cpp": re.compile(r".*\.(cc|cpp|cxx|hh|hpp|hxx|h)"),
    "rust": re.compile(r".*\.rs"),
    "markup": re.compile(r".*(?<!\.min)\.(ya?ml|toml|css|scss|html?)"),
}


@dataclass(frozen=True)
class Releases:
    """Releases of one package, and what is taken from them.

    Attributes:
        name: of the package, with `NPM` before it if it is in that registry.
        versions: oldest first.
        sorts: of `SORTS`.
        sdist: read the source distribution (documents, configuration) instead of the wheel.
        most: files of a sort.
        cut: take longer files, in parts.
    """

    name: str
    versions: tuple[str, ...]
    sorts: tuple[str, ...] = ("python",)
    sdist: bool = False
    most: int = 10_000
    cut: bool = False

    @property
    def archives(self) -> list[tuple[str, str, bool]]:
        """The arguments of `download`."""
        return [(self.name, version, self.sdist) for version in self.versions]

    def texts(self) -> list[dict[str, str]]:
        """`texts_in` of each version."""
        return [texts_in(download(*archive), self.sorts) for archive in self.archives]


class Edit(NamedTuple):
    """One edit as text: what it is, the sort of text, where it is from. num_tokens: of `after`, if counted."""

    id: str
    kind: str
    text: str
    package: str
    before: str
    after: str
    num_tokens: int = 0


def hash_of(*parts: str) -> int:
    """A number in ``[0, 2**64)``, the same on every machine."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


#: A package of the npm registry is written with this in front of its name.
NPM = "npm:"


def download(name: str, version: str, sdist: bool = False, cache: Path = CACHE) -> Path:
    """The archive of exactly this release, or the one in its folder of `cache` when it is there.

    Of PyPI the wheel for every machine, or the sdist: where there is no such wheel, or it is asked for. Of npm
    there is one sort of archive.
    """
    is_npm, plain = name.startswith(NPM), name.removeprefix(NPM)
    folder = f"npm-{plain.replace('/', '-').removeprefix('@')}" if is_npm else plain
    path = cache / f"{folder}-{version}{'.sdist' * (sdist and not is_npm)}"
    if found := sorted(p for p in path.glob("*") if p.name.endswith((".whl", ".tgz", ".tar.gz", ".zip"))):
        return found[0]
    with httpx.Client(transport=httpx.HTTPTransport(retries=3), follow_redirects=True, timeout=180) as client:
        url, sha256 = f"https://registry.npmjs.org/{plain}/-/{plain.rpartition('/')[2]}-{version}.tgz", None
        if not is_npm:
            url, sha256 = _pypi_url(client, plain, version, sdist)
        content = client.get(url).raise_for_status().content
    if sha256 not in (None, found_hash := hashlib.sha256(content).hexdigest()):
        raise RuntimeError(f"{url}: expected sha256 {sha256}, found {found_hash}")
    path.mkdir(parents=True, exist_ok=True)
    part = path / "part"
    part.write_bytes(content)
    return part.rename(path / url.rpartition("/")[2])


def _pypi_url(client: httpx.Client, name: str, version: str, sdist: bool) -> tuple[str, str]:
    """Address and SHA-256 of the file."""
    kind = {"Accept": "application/vnd.pypi.simple.v1+json"}
    index = client.get(f"https://pypi.org/simple/{canonicalize_name(name)}/", headers=kind).raise_for_status()
    found = {}
    for entry in index.json()["files"]:
        stem = re.sub(r"(-[^-]+-none-any\.whl|\.tar\.gz|\.zip)$", "", entry["filename"])
        if stem != entry["filename"] and canonicalize_name(stem) == canonicalize_name(f"{name}-{version}"):
            found[entry["filename"].endswith(".whl")] = entry
    entry = found.get(not sdist) or found.get(False)
    if entry is None:
        raise RuntimeError(f"{name}=={version}: the index has no such archive")
    return entry["url"], entry["hashes"]["sha256"]


def fetch_all(wanted: Iterable[tuple[str, str, bool]]) -> list[Path]:
    """Several archives at a time: downloads wait for the network."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda archive: download(*archive), wanted))


def changed_files(releases: Releases) -> Iterator[Edit]:
    """The files that both versions have and that differ, by path; one that is in an archive twice is one edit."""
    before, after = releases.texts()
    seen: set[tuple[str, str]] = set()
    for path in sorted(before.keys() & after.keys()):
        edit = before[path], after[path]
        if edit[0] != edit[1] and edit not in seen:
            seen.add(edit)
            sort = sort_of(path, releases.sorts) or ""
            where = f"{releases.name}/{'..'.join(releases.versions)}/{path}"
            yield Edit(where, sort, sort, releases.name, *edit)


def texts_in(archive: Path, sorts: Iterable[str] = ("python",)) -> dict[str, str]:
    """Path inside the package → text, for each file of these sorts that is UTF-8.

    The top folder of an sdist or of an archive of npm is stripped, and the ``src`` folder of an sdist. Python
    files of an sdist are kept where they belong to a package (a folder with an ``__init__.py``) that is not tests
    or documentation, so that an sdist and a wheel of one package give the same paths. The version is taken out of
    a wheel's ``dist-info`` folder, and of ``METADATA`` there only the description is kept.
    """
    sorts, name = tuple(sorts), archive.name
    is_wheel = name.endswith(".whl")
    texts = {}
    for member, read in _members(archive):
        if is_wheel:
            path = re.sub(r"^[^/]+\.data/data/", "", member)
            path = re.sub(r"^[^/]+\.dist-info/", "dist-info/", path)
        else:
            path = member.partition("/")[2].removeprefix("" if name.endswith(".tgz") else "src/")
        if sort_of(path, sorts):
            with suppress(UnicodeDecodeError):
                text = read().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
                texts[path] = text.partition("\n\n")[2] if path == "dist-info/METADATA" else text
    if is_wheel:
        return texts
    packages = {path.split("/")[0] for path in texts if re.fullmatch(r"[^/]+/__init__\.py", path)}
    packages -= {"test", "tests", "testing", "doc", "docs", "examples"}
    return {
        path: text
        for path, text in texts.items()
        if path.split("/")[0] in packages or sort_of(path, sorts) != "python"
    }


def sort_of(path: str, sorts: Iterable[str]) -> str | None:
    """Which of `sorts` a path is; None for another one, and for what build tools write."""
    if ".egg-info/" in path or path.endswith(("package-lock.json", "PKG-INFO")):
        return None
    name = path.removeprefix("dist-info/")
    return next((sort for sort in sorts if SORTS[sort].fullmatch(name)), None)


def _members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Name of each file, and what reads it."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, partial(wheel.read, name)) for name in wheel.namelist())
    else:
        with tarfile.open(archive) as opened:
            for member in filter(tarfile.TarInfo.isfile, opened):
                if (stream := opened.extractfile(member)) is not None:
                    yield member.name, stream.read


def releases_in(name: str) -> tuple[Releases, ...]:
    """The rows of releases.txt of this name: sorts, form, files of a sort, package, versions."""
    rows = map(str.split, Path(__file__).with_name("releases.txt").read_text(encoding="utf-8").splitlines())
    return tuple(
        Releases(package, tuple(versions), tuple(sorts.split(",")), form != "wheel", int(most), form == "cut")
        for row, sorts, form, most, package, *versions in rows
        if row == name
    )


#: The packages whose ``.py`` files the published table of draft quality is about.
FIVE = releases_in("five")
#: Name on the command line -> ``(split, releases)``.
SETS: dict[str, list[tuple[str, Releases]]] = {
    "five": [("test", releases) for releases in FIVE],
    "tune": [("tune", releases) for releases in releases_in("tune")],
    "test": [("test", releases) for releases in (*FIVE, *releases_in("test"))],
}
