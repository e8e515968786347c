"""From a package's two versions to the texts that changed between them."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
        """Read ``NAME:OLD:NEW``.

        Raises:
            ValueError: not three parts, or a part that pip would not take as a plain name or version.
        """
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

    Raises:
        RuntimeError: pip could not get it in `ATTEMPTS` attempts; the message has pip's last line.
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
