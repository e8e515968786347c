"""The index of a registry: written here, and read by `gpu_align.recipes.registry`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from ...files import shown, write_at_once
from ...recipes.pack import PackError, RecipePack
from ...recipes.registry import ENDINGS, INDEX, NAME, Listed, Registry, split_name, stem


def add_pack(registry: Registry, pack_path: Path | str) -> Listed:
    """Put a pack into the folder, as the next version of its task, and into the index, unless that has it."""
    path = Path(pack_path)
    pack = RecipePack.load(path)
    named, wanted = split_name(stem(path))
    task = pack.task or named
    if not NAME.fullmatch(task):
        raise PackError(f"{path}: task: expected letters, digits and any of _ . + -, found {shown(task)}")
    same = (p for p in registry.packs if (p.task, p.content_hash) == (task, pack.content_hash))
    if listed := next(same, None):
        return listed
    taken = {p.version for p in registry.packs if p.task == task}
    if not wanted or wanted in taken or path.parent != registry.folder:
        wanted = max(taken, default=0) + 1
    file = path.name
    if path.parent.resolve() != registry.folder.resolve():
        file = f"{task}@{wanted}{next((e for e in ENDINGS if path.name.endswith(e)), '.json')}"
        shutil.copyfile(path, registry.folder / file)
    listed = Listed(task, wanted, file, pack.content_hash)
    registry.packs.append(listed)
    _save(registry)
    return listed


def update_index(registry: Registry) -> list[tuple[Path, str]]:
    """Make the index of all packs in the folder; the files that are none, each with the reason.

    A file named ``task@version`` keeps its version; what the index knew of packs that are still there stays.
    """
    known = {pack.file: pack for pack in registry.packs}
    files = [p for p in registry.folder.iterdir() if p.name.endswith(ENDINGS) and p.name != INDEX]
    registry.packs = []
    wrong = []
    for path in sorted(files, key=lambda path: (path.name not in known, path.name)):
        before = known.get(path.name)
        try:
            if before is not None and before.content_hash == RecipePack.load(path).content_hash:
                registry.packs.append(before)
            else:
                add_pack(registry, path)
        except (PackError, OSError) as error:
            wrong.append((path, str(error)))
    _save(registry)
    return wrong


def _save(registry: Registry) -> None:
    registry.packs.sort(key=lambda pack: (pack.task, pack.version))
    text = json.dumps({"format": 1, "packs": [asdict(pack) for pack in registry.packs]}, indent=2) + "\n"
    write_at_once(registry.folder / INDEX, [text.encode()])
