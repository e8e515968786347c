"""Packs by name: the one that comes with the library, files, and a registry: a folder of packs with versions."""

from __future__ import annotations

import re
from pathlib import Path

from ..ops.files import shown
from .pack import PackError, RecipePack

#: The name of the pack that comes with the library.
BASE = "base"
ENDINGS = (".json.gz", ".json")
_VERSIONED = re.compile(r"(.+)@(\d{1,9})")


def find_pack(wanted: str, registry: Path | str | None = None) -> tuple[str, RecipePack]:
    """A pack and what it is called: ``base``, its task, or the name of its file.

    Args:
        wanted: ``base``; the name of a file in the registry without its ending, ``triage@2`` for example, or
            ``triage``, which is its largest version; or a path.
        registry: a folder of packs.

    PackError: it is no pack, or the registry has none of this name. OSError: it cannot be read.
    """
    if wanted == BASE:
        return BASE, RecipePack.load()
    path = Path(wanted) if registry is None else _file_of(wanted, Path(registry))
    pack = RecipePack.load(path)
    return pack.task or _named(path)[0], pack


def _file_of(name: str, registry: Path) -> Path:
    files = {_named(path): path for path in sorted(registry.iterdir()) if path.name.endswith(ENDINGS)}
    found = [key for key in files if name in (key[0], f"{key[0]}@{key[1]}")]
    if found:
        return files[max(found)]
    if Path(name).is_file():
        return Path(name)
    have = ", ".join(path.name for path in files.values()) or "none"
    raise PackError(f"{registry}: expected a pack of this folder ({have[:200]}), found {shown(name)}")


def _named(path: Path) -> tuple[str, int]:
    """The name of a file without its ending, and its version, 0 without one."""
    name = path.name.removesuffix(next((end for end in ENDINGS if path.name.endswith(end)), path.suffix))
    versioned = _VERSIONED.fullmatch(name)
    return (versioned[1], int(versioned[2])) if versioned else (name, 0)
