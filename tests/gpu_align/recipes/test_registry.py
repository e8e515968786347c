"""Registries: versions, hashes, and what a server is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Observed, PackError, add_pack, learn, update_index
from gpu_align.recipes.registry import INDEX, Registry, resolve_packs


def pack(task: str, token: int = 1) -> RecipePack:
    return RecipePack({}, [], task=task, tokenizer="x", observed=(Observed(False, (5,), token, 2, 2, 2),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "registry"
    found.mkdir()
    return found


def test_versions(folder: Path, tmp_path: Path) -> None:
    for token in (1, 2, 3):
        pack("triage", token).save(tmp_path / f"{token}.json.gz")
    registry = Registry(folder)
    assert add_pack(registry, tmp_path / "1.json.gz").version == 1
    assert add_pack(registry, tmp_path / "2.json.gz").version == 2
    assert add_pack(registry, tmp_path / "1.json.gz").version == 1  # the same again
    again = Registry(folder)
    assert [p.version for p in again.packs] == [1, 2]
    assert again.resolve("triage") == again.resolve("triage@2") == folder / "triage@2.json.gz"
    assert again.resolve("triage@1") == folder / "triage@1.json.gz"
    assert again.resolve(str(tmp_path / "3.json.gz")) == tmp_path / "3.json.gz"
    assert again.load("triage@1") == ("triage", pack("triage", 1))
    for name in ("triage@3", "other", "triage@", "../triage", ""):
        with pytest.raises(PackError, match=r"expected a pack of its index \(triage@1, triage@2\), found"):
            again.load(name)


def test_the_index_of_a_folder(folder: Path) -> None:
    pack("triage", 1).save(folder / "triage@7.json")
    pack("triage", 2).save(folder / "mine.json.gz")
    learn([("a", "x y " * 9)]).save(folder / "words.json.gz")
    (folder / "broken.json").write_text("{")
    registry = Registry(folder)
    ((path, why),) = update_index(registry)
    assert path == folder / "broken.json"
    assert "no JSON" in why
    found = [(p.task, p.version, p.file) for p in Registry(folder).packs]
    assert found == [
        ("triage", 1, "mine.json.gz"), ("triage", 7, "triage@7.json"), ("words", 1, "words.json.gz"),
    ]  # fmt: skip
    before = (folder / INDEX).read_bytes()
    update_index(Registry(folder))
    assert (folder / INDEX).read_bytes() == before
    (folder / "mine.json.gz").unlink()
    update_index(Registry(folder))
    assert [p.file for p in Registry(folder).packs] == ["triage@7.json", "words.json.gz"]


def test_another_pack_in_its_place(folder: Path, tmp_path: Path) -> None:
    pack("triage", 1).save(tmp_path / "a.json")
    add_pack(Registry(folder), tmp_path / "a.json")
    pack("triage", 2).save(folder / "triage@1.json")
    with pytest.raises(PackError, match=r"expected sha256:\w+, as the index says, found sha256:\w+"):
        Registry(folder).load("triage")


NO_INDEX = ("", "[]", "{", "null", '{"format":1}', '{"format":2,"packs":[]}', '{"format":1,"packs":[1]}')


@pytest.mark.parametrize("text", [*NO_INDEX, "[" * 10**5])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(PackError, match=f"^{folder / INDEX}: expected the index of a registry [^\n]*$"):
        Registry(folder)


@pytest.mark.parametrize(
    "change",
    [{"task": 1}, {"task": "a/b"}, {"version": 0}, {"version": "1"}, {"file": "../x.json"}, {"file": "/etc/x"},
     {"file": ".."}, {"content_hash": None}],
)  # fmt: skip
def test_an_entry_that_is_none(folder: Path, change: dict[str, Any]) -> None:
    entry = {"task": "a", "version": 1, "file": "a.json", "content_hash": "sha256:0"}
    (folder / INDEX).write_text(json.dumps({"format": 1, "packs": [entry | change]}))
    with pytest.raises(PackError, match=rf"packs\[0\].{next(iter(change))}: expected"):
        Registry(folder)


def test_what_a_server_is_asked_for(folder: Path, tmp_path: Path) -> None:
    pack("triage", 1).save(tmp_path / "a.json")
    pack("triage", 2).save(tmp_path / "b.json")
    pack("").save(tmp_path / "mine.json.gz")
    registry = Registry(folder)
    add_pack(registry, tmp_path / "a.json")
    add_pack(registry, tmp_path / "b.json")
    assert resolve_packs("off") == resolve_packs("", folder) == {}
    found = resolve_packs(f" triage@1, {tmp_path / 'mine.json.gz'},base", folder)
    assert list(found) == ["triage", "mine", "base"]
    assert (found["triage"], found["mine"]) == (pack("triage", 1), pack(""))
    assert resolve_packs("triage", folder) == {"triage": pack("triage", 2)}
    assert resolve_packs(str(tmp_path / "a.json")) == {"triage": pack("triage", 1)}
    with pytest.raises(PackError, match="expected packs of different names, found 'triage' twice"):
        resolve_packs("triage@1,triage@2", folder)
    with pytest.raises(FileNotFoundError):
        resolve_packs("triage")
    with pytest.raises(FileNotFoundError):
        resolve_packs("triage", tmp_path / "none")
