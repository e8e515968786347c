"""Files of packs and misses: round trips, and one clear error for whatever else stands in a file."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Misses, Observed, PackError, Recipe, fingerprint
from gpu_align.recipes.misses import parse_misses
from gpu_align.recipes.pack import MAX_BYTES, parse_pack, read_file
from tests.gpu_align.recipes.oracle import Words

PACK = RecipePack(
    {"ab": 4, " c": 3},
    [Recipe(("ab",), " c", 3, 4)],
    made_by="a test",
    task="triage",
    tokenizer="sha256:0",
    observed=(Observed(True, (-6, 7, -2), 3, 9, 9, 4), Observed(False, (1,), -1, 0, 5, 0)),
    kept=(3, 7),
)


@pytest.fixture(params=["pack.json", "pack.json.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    found: Path = tmp_path / request.param
    return found


def text_of(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.name.endswith(".gz") else raw


def put(path: Path, text: bytes) -> None:
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)


def sealed(data: dict[str, Any]) -> bytes:
    """The data as a file, with a content hash that fits."""
    body = {key: value for key, value in data.items() if key != "content_hash"}
    canonical = json.dumps(body, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
    digest = f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"
    whole = {**data, "content_hash": digest}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


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


def test_the_shipped_pack_is_of_format_1_and_has_a_hash() -> None:
    assert RecipePack.load().content_hash.startswith("sha256:")
    assert RecipePack.load().observed == ()


def test_a_changed_byte_is_refused(path: Path) -> None:
    PACK.save(path)
    text = text_of(path)
    rng = random.Random(0)
    for at in rng.sample(range(len(text)), 120):
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


def test_a_file_cut_short(path: Path) -> None:
    PACK.save(path)
    raw = path.read_bytes()
    for length in {0, 1, 2, 10, len(raw) // 2, len(raw) - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises(PackError, match=f"^{path}: expected JSON, plain or gzipped [^\n]*$"):
            RecipePack.load(path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\x89PNG\r\n", b"[" * 10**6, b'{"a":' * 10**5, b"9" * 10**5, b"\xff\xfe", b"{}",
     b'{"format":2}', b'{"format":2,"kind":"misses"}', b'{"format":true}', b'{"format":2,"content_hash":1e999}',
     b'{"format":2,"content_hash":"\\ud800"}'],
)  # fmt: skip
def test_other_files(path: Path, raw: bytes) -> None:
    put(path, raw)
    with pytest.raises(PackError, match=f"^{path}: expected [^\n]*$") as caught:
        RecipePack.load(path)
    assert len(str(caught.value)) < len(str(path)) + 300
    with pytest.raises(PackError, match=f"^{path}: expected [^\n]*$"):
        Misses.load(path)


def test_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pack.json"
    with path.open("wb") as file:
        file.truncate(2**30)  # takes no place on the disk
    tracemalloc.start()
    with pytest.raises(PackError, match=f"expected at most {MAX_BYTES} bytes, found more"):
        RecipePack.load(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BYTES
    tracemalloc.stop()


def test_whatever_stands_in_the_place_of_whatever(path: Path) -> None:
    """A pack, or a `PackError`: each value becomes each of these, with a content hash that fits."""
    words = Words()
    words.encode(["a b c d e f g h"])
    PACK.save(path)
    data = json.loads(text_of(path))
    data["tokenizer"] = fingerprint(words.encode)
    odd: list[Any] = [None, True, -1, -7, 0, 1, 2, 1 << 31, 10**30, 0.5, "", "ab", [], [[]], {}, {"a": 1}]

    def places(value: Any) -> Any:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield value, key
            yield from places(value[key])

    loaded = refused = 0
    for holder, key in list(places(data)):
        was = holder[key]
        for value in odd:
            holder[key] = value
            put(path, sealed(data))
            try:
                pack = RecipePack.load(path)
            except PackError:
                refused += 1
                continue
            loaded += 1
            if pack.tokenizer == fingerprint(words.encode):
                pack.tokenize(words.encode, words.texts)
            pack.merge(pack).shapes_only()
        holder[key] = was
    assert (loaded > 60, refused > 500) == (True, True)


class TestMisses:
    def test_round_trip(self, path: Path) -> None:
        misses = Misses("sha256:0", made_by="a test")
        misses.refuted(range(20), [5, -2], 3, 4, 2, start_tokens=[1], start_items=[-6], first=7)
        misses.accepted([1], [-6], 3)
        misses.save(path)
        first = path.read_bytes()
        again = Misses.load(path)
        assert again.counts == misses.counts
        again.save(path)
        assert path.read_bytes() == first
        ((miss, count), _) = sorted(again.counts.items(), key=lambda item: -item[1])
        assert (miss.literal, miss.shape, count) == (tuple(range(12, 20)), (-2, 5), 2)
        assert (miss.literal_start, miss.shape_start, miss.first) == ((1,), (-6,), 7)
        assert again.num_refuted == 2

    def test_shapes_only_has_no_text(self) -> None:
        misses = Misses("sha256:0", shapes_only=True)
        misses.refuted([1, 2, 3], [7, -2], 3, 4, start_tokens=[1], start_items=[-6], first=7)
        misses.refuted([1, 2, 3], [], 3, 4)  # nothing is left of it
        (miss,) = misses.counts
        assert (miss.literal, miss.literal_start) == ((), ())

    def test_a_pack_is_no_file_of_misses(self, path: Path) -> None:
        PACK.save(path)
        with pytest.raises(PackError, match=r"expected a file of misses .*found 'pack'"):
            Misses.load(path)
        assert read_file(path, pack=parse_pack, misses=parse_misses) == PACK
        Misses("sha256:0").save(path)
        with pytest.raises(PackError, match=r"expected a recipe pack .*found 'misses'"):
            RecipePack.load(path)

    def test_odd_values(self, path: Path) -> None:
        misses = Misses("sha256:0")
        misses.refuted([1], [-2], 3, 4)
        misses.save(path)
        data = json.loads(text_of(path))
        for at in range(8):
            for value in (None, "a", [None], [-1], [-9], [0] * 9, 1 << 31, -2, 0.5, {}):
                if (at, value) == (7, 1 << 31):  # a count
                    continue
                row = [[1], [-2], 3, 4, [], [], -1, 1]
                row[at] = value
                put(path, sealed({**data, "misses": [row]}))
                with pytest.raises(PackError, match=rf"^{path}: expected a file of misses .*misses\[0\]"):
                    Misses.load(path)
