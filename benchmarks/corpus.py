"""Edit pairs from real Python packages: the file before an upgrade, and the file after it.

``python -m benchmarks.corpus OUT.jsonl.gz`` downloads two pinned versions of each package, and writes one
record for each source file that changed::

    {"id": "flask/2.2.5..3.0.3/flask/app.py", "prediction": [ids], "output": [ids]}

The old file is the prediction, the new one what the model writes. Selection rule: ``.py`` files of the
package that both versions have, whose text differs, and whose *new* version has 200 to 8,000 tokens
(`MIN_TOKENS`, `MAX_TOKENS`); the old one may be of any length. Line ends are normalised to LF. Tokens are
Tekken's, so that nothing but PyPI is needed. Records are sorted by id, and the gzip header carries no time:
the same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpu_align.errors import MissingExtraError
from gpu_align.simulate.tokenizers import TextTokenizer, load_tokenizer

MIN_TOKENS = 200
MAX_TOKENS = 8_000
DEFAULT_CACHE = Path(".cache/corpus")


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

    def __str__(self) -> str:
        return f"{self.name} {self.old} → {self.new}"


DEFAULT_PACKAGES = (
    PackagePair("requests", "2.28.2", "2.32.3"),
    PackagePair("flask", "2.2.5", "3.0.3"),
    PackagePair("rich", "13.3.5", "13.9.4"),
    PackagePair("werkzeug", "2.2.3", "3.0.6"),
    PackagePair("jinja2", "3.0.3", "3.1.6"),
)

#: (package name, version, cache folder) → archive on disk
Fetch = Callable[[str, str, Path], Path]


@dataclass(frozen=True)
class EditPair:
    """One changed file as token ids."""

    id: str
    prediction: list[int]
    output: list[int]


def pip_download(name: str, version: str, cache: Path) -> Path:
    """The wheel of ``name==version``, or its sdist where there is no wheel; from `cache` when it is there.

    Raises:
        RuntimeError: pip could not get it; the message has pip's last line.
    """
    folder = cache / f"{name}-{version}"
    if found := _archives(folder):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    requirement = ["--dest", str(folder), f"{name}=={version}"]
    # Wheels first: to read an sdist's metadata, pip runs its build script.
    message = ""
    for choice in (["--only-binary=:all:"], []):
        done = subprocess.run([*command, *choice, *requirement], capture_output=True, text=True, check=False)
        if done.returncode == 0 and (found := _archives(folder)):
            return found[0]
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise RuntimeError(f"pip download {name}=={version} failed: {message}")


def _archives(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.name.endswith((".whl", ".tar.gz", ".zip")))


def python_files(archive: Path) -> dict[str, str]:
    """Path inside the package → text, for each ``.py`` file of a wheel or sdist that is UTF-8.

    An sdist's top folder and a ``src`` folder are stripped, and only folders with an ``__init__.py`` that
    are not tests or documentation are kept, so that an sdist and a wheel of one package give the same paths.
    """
    if archive.name.endswith(".whl"):
        return dict(_decoded(_zip_members(archive)))
    members = _zip_members(archive) if archive.suffix == ".zip" else _tar_members(archive)
    stripped = dict(_decoded((_strip_sdist(path), content) for path, content in members))
    packages = {path.split("/")[0] for path in stripped if re.fullmatch(r"[^/]+/__init__\.py", path)}
    packages -= {"test", "tests", "doc", "docs", "examples"}
    return {path: text for path, text in stripped.items() if path.split("/")[0] in packages}


def _zip_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.endswith(".py"):
                yield name, opened.read(name)


def _tar_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and member.name.endswith(".py"):
                stream = opened.extractfile(member)
                if stream is not None:
                    yield member.name, stream.read()


def _strip_sdist(path: str) -> str:
    parts = PurePosixPath(path).parts[1:]
    return "/".join(parts[1:] if parts[:1] == ("src",) else parts)


def _decoded(members: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    for path, content in members:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield path, text.replace("\r\n", "\n").replace("\r", "\n")


def package_pairs(
    package: PackagePair, tokenizer: TextTokenizer, cache: Path, fetch: Fetch = pip_download
) -> list[EditPair]:
    """The edit pairs of one package by the module's selection rule, sorted by id."""
    before = python_files(fetch(package.name, package.old, cache))
    after = python_files(fetch(package.name, package.new, cache))
    pairs = []
    for path in sorted(before.keys() & after.keys()):
        if before[path] == after[path]:
            continue
        output = tokenizer.encode(after[path])
        if MIN_TOKENS <= len(output) <= MAX_TOKENS:
            identifier = f"{package.name}/{package.old}..{package.new}/{path}"
            pairs.append(EditPair(identifier, tokenizer.encode(before[path]), output))
    return pairs


def write_pairs(pairs: Iterable[EditPair], path: Path) -> str:
    """Write `pairs` sorted by id as gzipped JSON lines; returns the SHA-256 of the lines.

    The digest is of the uncompressed text: compressed bytes repeat on one machine, but another zlib may
    pack the same text differently.
    """
    text = io.StringIO()
    for pair in sorted(pairs, key=lambda pair: pair.id):
        record = {"id": pair.id, "prediction": pair.prediction, "output": pair.output}
        text.write(json.dumps(record, separators=(",", ":")) + "\n")
    content = text.getvalue().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
    return hashlib.sha256(content).hexdigest()


def main(argv: list[str] | None = None, fetch: Fetch = pip_download) -> int:
    """Command line; returns the exit code (0, 1: a download failed, 2: bad arguments)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz")
    parser.add_argument(
        "--packages",
        action="append",
        nargs="+",
        metavar="NAME:OLD:NEW",
        help="instead of the default five; repeatable",
    )
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"downloads are kept here ({DEFAULT_CACHE})"
    )
    options = parser.parse_args(argv)
    try:
        chosen = [PackagePair.parse(text) for group in options.packages or () for text in group]
        packages = chosen or list(DEFAULT_PACKAGES)
        tokenizer = load_tokenizer("tekken")
    except (ValueError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    pairs: list[EditPair] = []
    print(f"{'package':<34} {'files':>6} {'prediction':>11} {'output':>9}   (tokens)")
    for package in packages:
        try:
            found = package_pairs(package, tokenizer, options.cache, fetch)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(_summary(str(package), found), flush=True)
        pairs += found
    print(_summary("all", pairs))
    digest = write_pairs(pairs, options.out)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, sha256 of the lines {digest}")
    return 0


def _summary(label: str, pairs: list[EditPair]) -> str:
    prediction = sum(len(pair.prediction) for pair in pairs)
    output = sum(len(pair.output) for pair in pairs)
    return f"{label:<34} {len(pairs):>6,} {prediction:>11,} {output:>9,}"


if __name__ == "__main__":
    raise SystemExit(main())
