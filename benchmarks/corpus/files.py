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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

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
class PackagePair:
    """Two versions of one package."""

    name: str
    old: str
    new: str

    @classmethod
    def parse(cls, text: str) -> PackagePair:
        """Read ``NAME:OLD:NEW``."""
        parts = text.split(":")
        # pip reads options and URLs from the same argument, so only plain names and versions pass.
        if len(parts) != 3 or not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", part) for part in parts):
            raise ValueError(f"--packages: expected NAME:OLD:NEW, like flask:2.2.5:3.0.3, got {text!r}")
        return cls(*parts)

    @property
    def versions(self) -> tuple[str, str]:
        return self.old, self.new

    def __str__(self) -> str:
        return f"{self.name} {self.old} → {self.new}"


@dataclass(frozen=True)
class Source:
    """What is taken from one package.

    Attributes:
        package: its two versions.
        sorts: of `SORTS`.
        sdist: read the source distribution (documents, configuration) instead of the wheel.
        most: files of a sort.
    """

    package: PackagePair
    sorts: tuple[str, ...] = ("python",)
    sdist: bool = False
    most: int = 10_000


#: (package name, version, cache folder, sdist) → archive on disk
Fetch = Callable[[str, str, Path, bool], Path]


def pip_download(name: str, version: str, cache: Path, sdist: bool = False) -> Path:
    """An archive of ``name==version`` from the package index, or from `cache` when it is there.

    Args:
        name: the package.
        version: exactly this one.
        cache: each archive is in a folder of its own here.
        sdist: the source distribution; else the wheel, and the sdist where there is no wheel.
    """
    folder = cache / (f"{name}-{version}.sdist" if sdist else f"{name}-{version}")
    if found := _archives(folder):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    requirement = ["--dest", str(folder), f"{name}=={version}"]
    # Wheels first: to read an sdist's metadata, pip runs its build script.
    choices = [[f"--no-binary={name}"]] if sdist else [["--only-binary=:all:"], []]
    message = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        for choice in choices:
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


def changed_files(source: Source, cache: Path, fetch: Fetch) -> dict[str, tuple[str, str, str]]:
    """Path → ``(sort, text before, text after)`` of the files that both versions have and that differ."""
    package = source.package
    before, after = (
        texts_in(fetch(package.name, version, cache, source.sdist), source.sorts)
        for version in package.versions
    )
    changed: dict[str, tuple[str, str, str]] = {}
    seen: set[tuple[str, str]] = set()
    for path in sorted(before.keys() & after.keys()):
        edit = before[path], after[path]
        # A file that is in an archive twice is one edit.
        if edit[0] != edit[1] and edit not in seen:
            seen.add(edit)
            changed[path] = (sort_of(path, source.sorts) or "", *edit)
    return changed


def texts_in(archive: Path, sorts: Iterable[str] = ("python",)) -> dict[str, str]:
    """Path inside the package → text, for each file of these sorts that is UTF-8.

    The top folder of an sdist or of an archive of npm is stripped, and the ``src`` folder of an sdist. Python
    files of an sdist are kept where they belong to a package (a folder with an ``__init__.py``) that is not tests
    or documentation, so that an sdist and a wheel of one package give the same paths. The version is taken out of
    a wheel's ``dist-info`` folder, and of ``METADATA`` there only the description is kept.
    """
    sorts = tuple(sorts)
    if archive.name.endswith(".whl"):
        return dict(_decoded((_unversioned(path), content) for path, content in _zip_members(archive, sorts)))
    members = _zip_members(archive, sorts) if archive.suffix == ".zip" else _tar_members(archive, sorts)
    strip = _strip_top if archive.name.endswith(".tgz") else _strip_sdist
    stripped = dict(_decoded((strip(path), content) for path, content in members))
    packages = {path.split("/")[0] for path in stripped if re.fullmatch(r"[^/]+/__init__\.py", path)}
    packages -= {"test", "tests", "testing", "doc", "docs", "examples"}
    return {
        path: text
        for path, text in stripped.items()
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


def _decoded(members: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    for path, content in members:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        yield path, text.partition("\n\n")[2] if path == "dist-info/METADATA" else text


#: A package of the npm registry is written with this in front of its name.
NPM = "npm:"
_NPM_URL = "https://registry.npmjs.org"
_INDEX_URL = "https://pypi.org/simple"
_INDEX_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 180


def download(name: str, version: str, cache: Path, sdist: bool = False) -> Path:
    """An archive of one release, or the one in `cache` when it is there.

    A wheel comes through pip. An sdist is taken from the index as it is: to name its metadata pip would run its
    build script, which for an extension wants the compiler of its language.

    Args:
        name: of a package on PyPI, or `NPM` and the name of one in the npm registry.
        version: exactly this one.
        cache: each archive is in a folder of its own here.
        sdist: the source distribution; a package of npm has nothing else.
    """
    if name.startswith(NPM):
        return _npm_archive(name.removeprefix(NPM), version, cache)
    return _sdist(name, version, cache) if sdist else pip_download(name, version, cache)


def _npm_archive(name: str, version: str, cache: Path) -> Path:
    plain = name.rpartition("/")[2]
    path = cache / f"npm-{name.replace('/', '-').removeprefix('@')}-{version}" / f"{plain}-{version}.tgz"
    if not path.is_file():
        _write(path, _get(f"{_NPM_URL}/{name}/-/{plain}-{version}.tgz", f"npm {name}@{version}"))
    return path


def _sdist(name: str, version: str, cache: Path) -> Path:
    folder = cache / f"{name}-{version}.sdist"
    if found := sorted(p for p in folder.glob("*") if p.name.endswith((".tar.gz", ".zip"))):
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


#: The packages whose ``.py`` files the published table of draft quality is about.
FIVE = (
    PackagePair("requests", "2.28.2", "2.32.3"),
    PackagePair("flask", "2.2.5", "3.0.3"),
    PackagePair("rich", "13.3.5", "13.9.4"),
    PackagePair("werkzeug", "2.2.3", "3.0.6"),
    PackagePair("jinja2", "3.0.3", "3.1.6"),
)
_DOCUMENTS = ("document", "config", "json")


def _wheel(text: str, *sorts: str, most: int = 25) -> Source:
    return Source(PackagePair.parse(text), sorts or ("python", "document"), most=most)


def _pair_of_sdists(text: str, *sorts: str, most: int = 20) -> Source:
    return Source(PackagePair.parse(text), sorts or _DOCUMENTS, sdist=True, most=most)


_TUNE = (
    _wheel("click:8.0.4:8.1.7"),
    _wheel("attrs:22.1.0:23.2.0"),
    _wheel("urllib3:1.26.15:2.2.1"),
    _wheel("packaging:21.3:24.0"),
    _wheel("httpx:0.23.3:0.27.0"),
    _wheel("starlette:0.27.0:0.37.2"),
    _wheel("pydantic:2.0:2.7.0"),
    _wheel("tqdm:4.62.0:4.66.4"),
    # Neighbouring releases: few lines change.
    _wheel("fastapi:0.109.0:0.110.0"),
    _wheel("trio:0.24.0:0.25.0"),
    _wheel("sqlfluff:2.3.0:3.0.0", most=20),
    _wheel("textual:0.47.0:0.60.0", most=20),
    _wheel("ansible-core:2.15.0:2.17.0", "python", "config", most=20),
    _wheel("check-jsonschema:0.26.3:0.29.0", "json"),
    _wheel("dbt-adapters:1.1.0:1.10.0", "sql"),
    _pair_of_sdists("click:8.0.4:8.1.7"),
    _pair_of_sdists("structlog:22.3.0:24.1.0"),
    _pair_of_sdists("celery:5.2.7:5.4.0"),
)
_TEST = (
    *(Source(package) for package in FIVE),
    _wheel("anyio:3.7.1:4.4.0", most=10),
    _wheel("marshmallow:3.19.0:3.21.3", most=10),
    _wheel("typer:0.9.0:0.12.3", most=10),
    _wheel("django:4.2:5.0", "python", most=10),
    _wheel("jupyterlab:4.0.0:4.2.0", "json"),
    _pair_of_sdists("flask:2.2.5:3.0.3", most=12),
    _pair_of_sdists("werkzeug:2.2.3:3.0.6", most=12),
    _pair_of_sdists("jinja2:3.0.3:3.1.6", most=12),
    _pair_of_sdists("pytest:7.2.2:8.2.0", "python", *_DOCUMENTS, most=12),
    _pair_of_sdists("tox:4.4.0:4.15.0"),
    _pair_of_sdists("sqlglot:20.0.0:25.0.0", "sql"),
)

#: Name on the command line -> ``(split, source)``.
SETS: dict[str, list[tuple[str, Source]]] = {
    "five": [("test", Source(package)) for package in FIVE],
    "tune": [("tune", source) for source in _TUNE],
    "test": [("test", source) for source in _TEST],
}
SETS["all"] = SETS["tune"] + SETS["test"]
