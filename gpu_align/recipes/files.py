"""Files of packs and of misses: JSON with a content hash, plain or gzipped, of which nothing is trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .content import Content, MissContent, PackError
from .parse import parse_misses, parse_pack, shown

#: Of files that are written. Packs of format 1 are read: words alone, without a content hash.
FORMAT = 2
#: A file is not read further: its text is 30 times as long as that of the pack that comes with the library.
MAX_BYTES = 1 << 25
PACK, MISSES = "pack", "misses"

_GZIP_MAGIC = b"\x1f\x8b"
T = TypeVar("T")


def pack_data(pack: Content) -> dict[str, Any]:
    """A pack as JSON, its content hash included."""
    number = {word: i for i, word in enumerate(pack.words)}
    return _with_hash(
        PACK,
        {
            "task": pack.task,
            "tokenizer": pack.tokenizer,
            "made_by": pack.made_by,
            "calibration": list(pack.calibration),
            "words": [[word, count] for word, count in pack.words.items()],
            "recipes": [[r.hits, r.seen, *(number[w] for w in (*r.context, r.word))] for r in pack.recipes],
            "kept": list(pack.kept),
            "observed": [
                [int(e.is_shape), e.token, e.hits, e.seen, e.groups, *e.context] for e in pack.observed
            ],
        },
    )


def misses_data(misses: MissContent) -> dict[str, Any]:
    """Misses as JSON, their content hash included."""
    rows = sorted((*(list(part) if isinstance(part, tuple) else part for part in miss), count)
                  for miss, count in misses.counts.items())  # fmt: skip
    return _with_hash(
        MISSES,
        {"tokenizer": misses.tokenizer, "made_by": misses.made_by, "misses": [list(row) for row in rows]},
    )


def write(path: Path, data: dict[str, Any]) -> None:
    """Write the file at once or not at all; gzipped if its name ends in ``.gz``."""
    content = _text(data)
    if path.name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    passing = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        passing.write_bytes(content)
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)


def read_pack(path: Path) -> Content:
    """Read a pack of format 1 or 2; see `RecipePack.load`."""
    return _read(path, PACK, "a recipe pack", parse_pack)


def read_misses(path: Path) -> MissContent:
    """Read a file of misses."""
    return _read(path, MISSES, "a file of misses", parse_misses)


def read_either(path: Path) -> Content | MissContent:
    """Read whichever of the two it is."""
    data, text = _load(path)
    if type(data) is dict and data.get("kind") == MISSES:
        return _checked(path, data, text, MISSES, "a file of misses", parse_misses)
    return _checked(path, data, text, PACK, "a recipe pack", parse_pack)


def _read(path: Path, kind: str, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
    data, text = _load(path)
    return _checked(path, data, text, kind, what, parse)


def _load(path: Path) -> tuple[Any, bytes]:
    with path.open("rb") as file:
        packed = file.read(MAX_BYTES + 1)
    try:
        text = _unpack(packed)
        return json.loads(text), text
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise PackError(f"{path}: expected JSON, plain or gzipped ({_first_line(error)})") from error


def _unpack(packed: bytes) -> bytes:
    text = packed
    if len(packed) <= MAX_BYTES and packed.startswith(_GZIP_MAGIC):
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            text = file.read(MAX_BYTES + 1)
    if max(len(packed), len(text)) > MAX_BYTES:
        raise PackError(f"expected at most {MAX_BYTES} bytes, found more")
    return text


def _checked(
    path: Path, data: Any, text: bytes, kind: str, what: str, parse: Callable[[dict[str, Any]], T]
) -> T:
    """What the data says, if it is of this kind and as it was written."""
    try:
        if type(data) is not dict:
            raise PackError(f"expected an object, found {shown(data)}")
        if data.get("kind", PACK) != kind:
            raise PackError(f"found {shown(data.get('kind'))}")
        number = data.get("format")
        if type(number) is not int or number not in ((1, FORMAT) if kind == PACK else (FORMAT,)):
            raise PackError(f"found format {shown(number)}")
        if number == FORMAT:
            _check_hash(data, text)
        return parse(data)
    except PackError as error:
        formats = f"1 or {FORMAT}" if kind == PACK else FORMAT
        raise PackError(f"{path}: expected {what} of format {formats} ({error})") from error


def _check_hash(data: dict[str, Any], text: bytes) -> None:
    """Whether not a byte of the text differs from what was written."""
    said = data.get("content_hash")
    try:
        found = _hash({key: value for key, value in data.items() if key != "content_hash"})
        same = _text(data) == text
    except (ValueError, RecursionError) as error:  # numbers and characters that are in no file of ours
        raise PackError(f"content_hash: the file was changed ({_first_line(error)})") from error
    if said != found or not same:
        named = said if type(said) is str and len(said) == len(found) else shown(said)
        raise PackError(f"content_hash: the file was changed: expected {named}, found {found}")


def _with_hash(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    data = {"format": FORMAT, "kind": kind, **data}
    return {"format": FORMAT, "kind": kind, "content_hash": _hash(data), **data}


def _hash(data: dict[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(_text(data, sort_keys=True)).hexdigest()}"


def _text(data: dict[str, Any], sort_keys: bool = False) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, sort_keys=sort_keys, allow_nan=False)
    return text.encode()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
