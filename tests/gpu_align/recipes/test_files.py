"""Files of packs: round trips, one clear error for whatever else is in a file; and packs by name."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpu_align import RecipePack
from gpu_align.ops.files import MAX_BYTES, NUM_BINS, write_at_once
from gpu_align.recipes import Observed, PackError, Recipe
from gpu_align.recipes.pack import SHIPPED
from gpu_align.recipes.registry import find_pack

PACK = RecipePack(
    {"ab": 4, " c": 3},
    [Recipe(("ab",), " c", 3, 4)],
    (0.125,) * NUM_BINS,
    made_by="a test",
    task="triage",
    tokenizer="sha256:0",
    observed=(Observed(True, (-6, 7, -2), 3, 9, 9, 4), Observed(False, (1,), -1, 0, 5, 0)),
    kept=(3, 7),
)
PACKED = SHIPPED.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack.json.gz"


def text_of(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.name.endswith(".gz") else raw


def put(path: Path, text: bytes) -> None:
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)


def sealed(data: dict[str, Any]) -> bytes:
    """The data as a file, with a content hash that fits."""
    body = {key: value for key, value in data.items() if key != "content_hash"}
    canonical = json.dumps(body, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
    digest = f"sha256:{hashlib.sha256(canonical.encode(errors='replace')).hexdigest()}"
    whole = {**data, "content_hash": digest}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii="\ud800" in canonical).encode()


def test_round_trip_and_the_same_bytes(path: Path) -> None:
    PACK.save(path)
    first = path.read_bytes()
    assert RecipePack.load(path) == PACK
    PACK.save(path)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]  # nothing is left beside it
    data = json.loads(text_of(path))
    assert (data["format"], data["task"], data["tokenizer"]) == (2, "triage", "sha256:0")
    assert data["content_hash"] == PACK.content_hash == RecipePack.load(path).content_hash
    assert sealed(data) == text_of(path)


def test_the_shipped_pack_has_a_hash() -> None:
    pack = RecipePack.load()
    assert pack.content_hash.startswith("sha256:")
    assert (pack.made_by, pack.observed) == ("python -m benchmarks.learn.recipes", ())
    assert len(pack.recipes) > 80_000
    assert SHIPPED.stat().st_size < 1 << 20


def test_a_changed_byte_is_refused(path: Path) -> None:
    PACK.save(path)
    text = text_of(path)
    rng = random.Random(0)
    for at in rng.sample(range(len(text)), 60):
        for byte in (text[at] ^ 1, ord(" "), ord("0")):
            if byte == text[at]:
                continue
            put(path, text[:at] + bytes([byte]) + text[at + 1 :])
            with pytest.raises(PackError, match=f"^{path}: expected [^\n]+$"):
                RecipePack.load(path)
    put(path, text.replace(b",[0,-1,0,5,0,1]", b""))
    said = r"content_hash: the file was changed: expected sha256:\w+, found sha256:\w+"
    with pytest.raises(PackError, match=said):
        RecipePack.load(path)
    put(path, text + b"\n")
    with pytest.raises(PackError, match="content_hash: the file was changed"):
        RecipePack.load(path)


OTHER = [
    b"", b"[]", b"\x89PNG\r\n", b"[" * 10**6, b'{"a":' * 10**5, b"9" * 10**5, b"\xff\xfe", b'{"format":2}',
    b'{"format":2,"kind":"table"}', b'{"format":true}', b'{"format":2,"content_hash":1e999}', b"plain", b"{}",
    b'{"format":2,"content_hash":"\\ud800"}', b"{", b'{"words":' + b"9" * 10**5, b"[1]", b"null", PACKED[:9],
    PACKED[: len(PACKED) // 2], PACKED[:-5], PACKED[:12] + b"\xff" * 40 + PACKED[52:], PACKED[:-8] + bytes(8),
    PACKED + b"more",
]  # fmt: skip


@pytest.mark.parametrize("raw", OTHER, ids=range(len(OTHER)))
def test_other_files(path: Path, raw: bytes) -> None:
    if raw.startswith(PACKED[:2]):
        path.write_bytes(raw)
    else:
        put(path, raw)
    with pytest.raises(PackError, match=f"^{path}: expected a [^\n]*$") as caught:
        RecipePack.load(path)
    assert len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize("size", [2**40, 0], ids=["a terabyte", "unpacked a gigabyte"])
def test_what_is_too_large_is_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "pack.json.gz"
    if not size:
        path.write_bytes(gzip.compress(b" " * 2**20) * 2**10)  # spaces, as a thousand members
    with path.open("ab") as file:
        file.truncate(size or None)  # takes no place on the disk
    tracemalloc.start()
    with pytest.raises(PackError, match=f"{path}.*expected at most {MAX_BYTES} bytes, found more"):
        RecipePack.load(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BYTES
    tracemalloc.stop()


#: Field → values that are refused, beside those of other types.
WRONG: dict[str, list[Any]] = {
    "format": [3, True, "1\n" * 10**6],
    "words": [[["", 1]], [["a", 0]], [["a", 1], ["a", 2]], [["a"]], [["a", 1, 2]]],
    "recipes": [
        None, [[1]], *([[1, 2, 0, *more]] for more in ([99_999], [], [-1], [0] * 10**5)),
        [[0, 2, 0, 1]], [[1, 10**400, 0, 1]], [[3, 2, 0, 1]],
    ],
    "calibration": [[0.0], [-1.5] * NUM_BINS],
    "kept": [[3, 3], [1 << 31]],
    "observed": [
        [[0, 1, 2, 2, 1, 5]] * 2, [[0, 1, 3, 2, 1, 5]], [[2, 1, 2, 2, 1, 5]], [[0, 1, 2, 2, 1]],
        [[0, 1, 2, 2, 1, -2]], [[1, -2, 2, 2, 1, 5]], [[1, 1, 2, 2, 1, -99]], [[0, 1, 2, 2, 1, *range(9)]],
        [[0, 1, 0, 0, 1, 5]],
    ],
    "tokenizer": [""],
}  # fmt: skip
WRONG_ROWS = [
    pytest.param(field, value, id=f"{field}-{i}") for field in WRONG for i, value in enumerate(WRONG[field])
]


@pytest.mark.parametrize(("field", "value"), WRONG_ROWS)
def test_a_file_that_is_no_pack(path: Path, field: str, value: Any) -> None:
    PACK.save(path)
    put(path, sealed({**json.loads(text_of(path)), field: value}))
    expected = rf"^{path}: expected a recipe pack of format 2 \(.*{field}.*: expected [^\n]*, found [^\n]*\)$"
    with pytest.raises(PackError, match=expected) as caught:
        RecipePack.load(path)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_file_is_for_its_user_alone_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is asked for; and a link in its place, or that of the passing file, is not followed."""
    modes, replace = [], Path.replace

    def recorded(path: Path, target: Path) -> Path:
        modes.append(path.stat().st_mode & 0o777)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", recorded)
    path, victim = tmp_path / "x.json", tmp_path / "victim"
    victim.write_text("theirs")
    for link in (path, tmp_path / f"x.json.{os.getpid()}.tmp"):
        link.symlink_to(victim)
    umask = os.umask(0)
    try:
        write_at_once(path, [b"ours"], 0o600)
        write_at_once(tmp_path / "y.json", [])
    finally:
        os.umask(umask)
    assert (modes, path.stat().st_mode & 0o777) == ([0o600, 0o666], 0o600)
    assert (victim.read_text(), path.read_text()) == ("theirs", "ours")
    assert not path.is_symlink()


def pack(task: str, token: int = 1) -> RecipePack:
    return RecipePack({}, [], task=task, tokenizer="x", observed=(Observed(False, (5,), token, 2, 2, 2),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "registry"
    found.mkdir()
    for version in (1, 2, 10):
        pack("triage", version).save(found / f"triage@{version}.json{'.gz' * (version % 2)}")
    pack("").save(found / "mine.json.gz")
    (found / "notes.txt").write_text("no pack")
    return found


@pytest.mark.parametrize(
    ("wanted", "name", "token"),
    [("triage", "triage", 10), ("triage@2", "triage", 2), ("triage@1", "triage", 1), ("mine", "mine", 1)],
)
def test_a_name_is_the_largest_version_or_the_one_that_is_named(
    folder: Path, wanted: str, name: str, token: int
) -> None:
    assert find_pack(wanted, folder) == (name, pack("" if name == "mine" else name, token))


def test_a_path_and_the_shipped_pack(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other@3.json"
    pack("").save(path)
    for registry in (None, folder):
        assert find_pack(str(path), registry) == ("other", pack(""))
        assert find_pack("base", registry)[0] == "base"


@pytest.mark.parametrize("wanted", ["triage@3", "other", "triage@", "../registry/triage@2", "notes", ""])
def test_what_is_not_there(folder: Path, wanted: str) -> None:
    with pytest.raises(
        PackError, match=r"expected a pack of this folder \(mine\.json\.gz, triage.*\), found"
    ):
        find_pack(wanted, folder)


def test_without_a_folder(tmp_path: Path) -> None:
    for registry in (None, tmp_path / "none"):
        with pytest.raises(FileNotFoundError):
            find_pack("triage", registry)
