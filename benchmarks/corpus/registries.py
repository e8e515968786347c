"""Archives of pinned releases: from PyPI through pip or its index, and from the npm registry."""

from __future__ import annotations

import hashlib
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.corpus.files import ATTEMPTS, PAUSE, pip_download

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

    Raises:
        RuntimeError: it could not be had; the message names package and version.
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
