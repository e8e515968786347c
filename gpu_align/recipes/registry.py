"""A registry: a folder of packs with an index, from which a server takes them by name and version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..files import Domain, checked, expect, json_of, read_text, shown
from .pack import PackError, RecipePack

INDEX = "index.json"
#: What may stand for a pack's name: the pack that comes with the library, and none.
BASE, OFF = "base", "off"
NAME = re.compile(r"[\w.+-]{1,128}")
_VERSIONED = re.compile(r"([\w.+-]{1,128})@(\d{1,9})")
ENDINGS = (".json.gz", ".json")


_Task = Annotated[str, Domain("letters, digits and any of _ . + -", NAME.fullmatch)]
_FileName = Annotated[
    str, Domain("a file's name", lambda name: name == Path(name).name and name not in ("", ".", ".."))
]


_Version = Annotated[int, Domain("a version", lambda version: 1 <= version < 10**9)]


@dataclass(frozen=True)
class Listed:
    """A pack of a registry."""

    task: _Task
    version: _Version  # the largest one of a task is taken where none is asked for
    file: _FileName  # in the registry's folder
    content_hash: str


class Registry:
    """The packs of a folder, by the index that is in it; PackError if that is invalid."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.packs: list[Listed] = []
        if not self.folder.is_dir():
            raise FileNotFoundError(2, "no such folder", str(self.folder))
        if (self.folder / INDEX).exists():
            self.packs = _read_index(self.folder / INDEX)

    def find(self, name: str) -> Listed:
        """The pack ``task@version``, or the latest ``task``; PackError if there is none."""
        task, version = split_name(name)
        found = [pack for pack in self.packs if pack.task == task and version in (None, pack.version)]
        if not found:
            have = ", ".join(f"{pack.task}@{pack.version}" for pack in self.packs) or "none"
            raise PackError(
                f"{self.folder}: expected a pack of its index ({have[:200]}), found {shown(name)}"
            )
        return max(found, key=lambda pack: pack.version)

    def resolve(self, name: str) -> Path:
        """The file of ``task@version``, of the latest ``task``, or of a path, which is returned as it is."""
        is_task = any(pack.task == name.partition("@")[0] for pack in self.packs)
        return Path(name) if not is_task and Path(name).is_file() else self.folder / self.find(name).file

    def load(self, name: str) -> tuple[str, RecipePack]:
        """A pack and what it is called: its task, or the stem of its file; PackError if it is another."""
        path = self.resolve(name)
        pack = RecipePack.load(path)
        listed = [entry for entry in self.packs if self.folder / entry.file == path]
        if listed and listed[0].content_hash != pack.content_hash:
            raise PackError(
                f"{path}: expected {listed[0].content_hash}, as the index says, found {pack.content_hash}"
            )
        return pack.task or stem(path), pack


def resolve_packs(spec: str, registry: Path | str | None = None) -> dict[str, RecipePack]:
    """The packs that a server is asked for, by name.

    Args:
        spec: ``off``, or separated by commas: ``base``, names in the registry with or without ``@version``, paths.
        registry: a folder with an index, or None.

    Returns name → pack, in this order: ``base``, a pack's task, or the stem of its file. PackError: a pack that is
    not there, is none, or has the name of another one.
    """
    found: dict[str, RecipePack] = {}
    index = None if registry is None else Registry(registry)
    for wanted in (part.strip() for part in spec.split(",")):
        if wanted in ("", OFF):
            continue
        if wanted == BASE:
            name, pack = BASE, RecipePack.load()
        elif index is not None:
            name, pack = index.load(wanted)
        else:
            pack = RecipePack.load(wanted)
            name = pack.task or stem(Path(wanted))
        if name in found:
            raise PackError(f"{wanted}: expected packs of different names, found {shown(name)} twice")
        found[name] = pack
    return found


def split_name(name: str) -> tuple[str, int | None]:
    """Of ``task@version`` the two; of another name itself, and no version."""
    versioned = _VERSIONED.fullmatch(name)
    return (versioned[1], int(versioned[2])) if versioned else (name, None)


def stem(path: Path) -> str:
    """The name of a file without its ending."""
    return next((path.name[: -len(end)] for end in ENDINGS if path.name.endswith(end)), path.stem)


def _read_index(path: Path) -> list[Listed]:
    try:
        data = checked(dict, json_of(read_text(path)))
        expect(data.get("format") == 1, "format", "1", data.get("format"))
        packs: list[Listed] = checked(list[Listed], data.get("packs"), "packs")
        different = {(pack.task, pack.version) for pack in packs}
        expect(len(different) == len(packs), "packs", "each version of a task once", data["packs"])
    except ValueError as error:
        raise PackError(f"{path}: expected the index of a registry ({error})") from error
    return packs
