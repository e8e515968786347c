"""From a package's two versions to the texts that changed between them."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

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
#: Attempts at a download, and the seconds to wait before each one after the first.
ATTEMPTS, PAUSE = 3, 3.0


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
        """The arguments of `Fetch` without the cache."""
        return [(self.name, version, self.sdist) for version in self.versions]

    def texts(self, cache: Path, fetch: Fetch) -> list[dict[str, str]]:
        """`texts_in` of each version."""
        return [texts_in(fetch(name, v, cache, sdist), self.sorts) for name, v, sdist in self.archives]


#: (package name, version, cache folder, sdist) → archive on disk
Fetch = Callable[[str, str, Path, bool], Path]


def fetch_all(wanted: Iterable[tuple[str, str, bool]], cache: Path, fetch: Fetch) -> list[Path]:
    """Several archives at a time: downloads wait for the network."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda one: fetch(one[0], one[1], cache, one[2]), wanted))


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


def _wheel(name: str, version: str, cache: Path) -> Path:
    """By pip, which knows the machine; the sdist where there is no wheel."""
    folder = cache / f"{name}-{version}"
    if found := _archives(folder):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    requirement = ["--dest", str(folder), f"{name}=={version}"]
    message = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        # Wheels first: to read an sdist's metadata, pip runs its build script.
        for choice in (["--only-binary=:all:"], []):
            done = subprocess.run(
                [*command, *choice, *requirement], capture_output=True, text=True, check=False
            )
            if done.returncode == 0 and (found := _archives(folder)):
                return found[0]
            message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "No matching distribution" in message:
            break
    raise RuntimeError(f"pip download {name}=={version} failed: {message}")


def _archives(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.name.endswith((".whl", ".tar.gz", ".zip")))


def changed_files(releases: Releases, cache: Path, fetch: Fetch) -> Iterator[Edit]:
    """The files that both versions have and that differ, by path; one that is in an archive twice is one edit."""
    before, after = releases.texts(cache, fetch)
    seen: set[tuple[str, str]] = set()
    for path in sorted(before.keys() & after.keys()):
        edit = before[path], after[path]
        if edit[0] != edit[1] and edit not in seen:
            seen.add(edit)
            sort = sort_of(path, releases.sorts) or ""
            yield Edit(
                f"{releases.name}/{'..'.join(releases.versions)}/{path}", sort, sort, releases.name, *edit
            )


def texts_in(archive: Path, sorts: Iterable[str] = ("python",)) -> dict[str, str]:
    """Path inside the package → text, for each file of these sorts that is UTF-8.

    The top folder of an sdist or of an archive of npm is stripped, and the ``src`` folder of an sdist. Python
    files of an sdist are kept where they belong to a package (a folder with an ``__init__.py``) that is not tests
    or documentation, so that an sdist and a wheel of one package give the same paths. The version is taken out of
    a wheel's ``dist-info`` folder, and of ``METADATA`` there only the description is kept.
    """
    sorts = tuple(sorts)
    if archive.name.endswith(".whl"):
        return dict(_texts(_zip_members(archive, sorts), _unversioned))
    members = _zip_members(archive, sorts) if archive.suffix == ".zip" else _tar_members(archive, sorts)
    texts = dict(_texts(members, _strip_top if archive.name.endswith(".tgz") else _strip_sdist))
    packages = {path.split("/")[0] for path in texts if re.fullmatch(r"[^/]+/__init__\.py", path)}
    packages -= {"test", "tests", "testing", "doc", "docs", "examples"}
    return {
        path: text
        for path, text in texts.items()
        if path.split("/")[0] in packages or sort_of(path, sorts) not in (None, "python")
    }


def sort_of(path: str, sorts: Iterable[str]) -> str | None:
    """Which of `sorts` a path is; None for another one, and for what build tools write."""
    if ".egg-info/" in path or path.endswith(("package-lock.json", "PKG-INFO")):
        return None
    name = path.removeprefix("dist-info/")
    return next((sort for sort in sorts if SORTS[sort].fullmatch(name)), None)


def _zip_members(archive: Path, sorts: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if sort_of(_unversioned(name), sorts):
                yield name, opened.read(name)


def _tar_members(archive: Path, sorts: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and sort_of(_strip_sdist(member.name), sorts):
                stream = opened.extractfile(member)
                if stream is not None:
                    yield member.name, stream.read()


def _unversioned(path: str) -> str:
    return re.sub(r"^[^/]+\.dist-info/", "dist-info/", re.sub(r"^[^/]+\.data/data/", "", path))


def _strip_top(path: str) -> str:
    return path.partition("/")[2]


def _strip_sdist(path: str) -> str:
    parts = PurePosixPath(path).parts[1:]
    return "/".join(parts[1:] if parts[:1] == ("src",) else parts)


def _texts(members: Iterable[tuple[str, bytes]], stripped: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    for name, content in members:
        try:
            text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            continue
        path = stripped(name)
        yield path, text.partition("\n\n")[2] if path == "dist-info/METADATA" else text


#: A package of the npm registry is written with this in front of its name.
NPM = "npm:"
_NPM_URL = "https://registry.npmjs.org"
_INDEX_URL = "https://pypi.org/simple"
_INDEX_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 180


def download(name: str, version: str, cache: Path, sdist: bool = False) -> Path:
    """The archive of exactly this release, or the one in its folder of `cache` when it is there.

    An sdist is taken from the index as it is: to name its metadata pip would run its build script, which for an
    extension wants the compiler of its language. A package of npm has one sort of archive.
    """
    if name.startswith(NPM):
        return _npm_archive(name.removeprefix(NPM), version, cache)
    return _sdist(name, version, cache) if sdist else _wheel(name, version, cache)


def _npm_archive(name: str, version: str, cache: Path) -> Path:
    plain = name.rpartition("/")[2]
    path = cache / f"npm-{name.replace('/', '-').removeprefix('@')}-{version}" / f"{plain}-{version}.tgz"
    if not path.is_file():
        _write(path, _get(f"{_NPM_URL}/{name}/-/{plain}-{version}.tgz", f"npm {name}@{version}"))
    return path


def _sdist(name: str, version: str, cache: Path) -> Path:
    folder = cache / f"{name}-{version}.sdist"
    if found := _archives(folder):
        return found[0]
    what = f"sdist {name}=={version}"
    index: dict[str, Any] = json.loads(_get(f"{_INDEX_URL}/{_normalized(name)}/", what, _INDEX_JSON))
    for entry in index["files"]:
        stem = re.sub(r"\.(tar\.gz|zip)$", "", entry["filename"])
        if stem != entry["filename"] and _normalized(stem) == _normalized(f"{name}-{version}"):
            content = _get(entry["url"], what)
            wanted = entry["hashes"].get("sha256")
            if wanted != (found_hash := hashlib.sha256(content).hexdigest()):
                raise RuntimeError(f"download of {what} failed: expected sha256 {wanted}, found {found_hash}")
            path = folder / str(entry["filename"])
            _write(path, content)
            return path
    raise RuntimeError(f"download of {what} failed: the index has no such sdist")


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _get(url: str, what: str, accept: str = "*/*") -> bytes:
    message = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        try:
            request = urllib.request.Request(url, headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            message = f"{url}: HTTP {error.code} {error.reason}"
            if error.code in (403, 404, 410):
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            message = f"{url}: {error}"
    raise RuntimeError(f"download of {what} failed: {message}")


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
