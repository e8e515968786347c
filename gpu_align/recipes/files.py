"""Files of packs and of misses: JSON with a content hash, plain or gzipped, of which nothing is trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple, TypeVar

from ..ops.constants import MAX_CONTEXT, SHAPE_IDENTIFIER, SHAPE_START
from .chains import Observed
from .learn import MAX_WORDS
from .words import Recipe

#: The calibration has one offset for each of so many bins of equal width, by the probability that the counts give.
NUM_BINS = 20


class PackError(ValueError):
    """A file is not a recipe pack, or a pack does not fit."""


class Content(NamedTuple):
    """The fields of a `RecipePack`."""

    words: Mapping[str, int]
    recipes: Sequence[Recipe]
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""
    task: str = ""
    tokenizer: str = ""
    observed: Sequence[Observed] = ()
    kept: Sequence[int] = ()


class Miss(NamedTuple):
    """Where a recipe's token was checked: behind `literal` and `shape` the recipes said `expected`.

    Attributes:
        literal: the last tokens, prompt included; none where only shapes are kept.
        shape: the last items of the shape. Both in reading order, with `MAX_CONTEXT` of them at most.
        expected: the token that was drafted.
        said: what the model wrote; `expected` where the token was accepted.
        literal_start, shape_start, first: the same contexts at the beginning of the draft, and its first token;
            empty and -1 where this token was the first.
    """

    literal: tuple[int, ...]
    shape: tuple[int, ...]
    expected: int
    said: int
    literal_start: tuple[int, ...] = ()
    shape_start: tuple[int, ...] = ()
    first: int = -1


class MissContent(NamedTuple):
    """What a file of misses holds: how often each was counted."""

    tokenizer: str
    counts: Mapping[Miss, int]
    made_by: str = ""


#: The largest count: floats hold all up to here.
MAX_COUNT = 1 << 53
#: Token ids are below it.
MAX_TOKEN = 1 << 31
_CLASSES = range(SHAPE_START, SHAPE_IDENTIFIER + 1)


def parse_pack(data: dict[str, Any]) -> Content:
    """A pack of format 1 or 2."""
    words: dict[str, int] = {}
    for i, entry in enumerate(_list(data, "words")):
        if not (type(entry) is list and len(entry) == 2 and _is_text(entry[0]) and entry[0]):
            raise PackError(f"words[{i}]: expected a word and a count, found {shown(entry)}")
        word, count = entry
        if word in words:
            raise PackError(f"words[{i}]: expected each word once, found {shown(word)} again")
        words[word] = _count(f"words[{i}]", count)
    names = list(words)
    recipes = [_recipe(f"recipe {i}", names, entry) for i, entry in enumerate(_list(data, "recipes"))]
    calibration = _list(data, "calibration")
    if len(calibration) != NUM_BINS or not all(map(_is_offset, calibration)):
        raise PackError(f"calibration: expected {NUM_BINS} numbers from -1 to 1, found {shown(calibration)}")
    made_by = _string(data, "made_by")
    offsets = tuple(map(float, calibration))
    if data["format"] == 1:
        return Content(words, recipes, offsets, made_by)
    kept = _list(data, "kept")
    if not all(type(token) is int and 0 <= token < MAX_TOKEN for token in kept):
        raise PackError(f"kept: expected token ids, found {shown(kept)}")
    if any(a >= b for a, b in pairwise(kept)):
        raise PackError(f"kept: expected each token once, ascending, found {shown(kept)}")
    observed: dict[tuple[bool, tuple[int, ...]], Observed] = {}
    for i, entry in enumerate(_list(data, "observed")):
        one = _observed(f"observed[{i}]", entry)
        if (one.is_shape, one.context) in observed:
            raise PackError(f"observed[{i}]: expected each context once, found {shown(entry)} again")
        observed[one.is_shape, one.context] = one
    tokenizer = _string(data, "tokenizer")
    if (observed or kept) and not tokenizer:
        raise PackError(
            "tokenizer: expected the fingerprint of the one that the token ids are of, found none"
        )
    return Content(
        words,
        recipes,
        offsets,
        made_by,
        _string(data, "task"),
        tokenizer,
        tuple(observed.values()),
        tuple(kept),
    )


def parse_misses(data: dict[str, Any]) -> MissContent:
    """A file of misses."""
    counts: dict[Miss, int] = {}
    for i, row in enumerate(_list(data, "misses")):
        name = f"misses[{i}]"
        if type(row) is not list or len(row) != 8:
            raise PackError(f"{name}: expected 8 values, found {shown(row)}")
        *fields, count = row
        literal, shape, expected, said, literal_start, shape_start, first = fields
        for context, is_shape in ((literal, 0), (shape, 1), (literal_start, 0), (shape_start, 1)):
            _items(name, context, is_shape, least=0)
        least = ((expected, 0), (said, 0), (first, -1))
        if not all(type(token) is int and lowest <= token < MAX_TOKEN for token, lowest in least):
            raise PackError(f"{name}: expected token ids, found {shown([expected, said, first])}")
        miss = Miss(
            tuple(literal), tuple(shape), expected, said, tuple(literal_start), tuple(shape_start), first
        )
        if miss in counts:
            raise PackError(f"{name}: expected each once, found {shown(row)} again")
        counts[miss] = _count(name, count)
    return MissContent(_string(data, "tokenizer"), counts, _string(data, "made_by"))


def shown(found: Any) -> str:
    """One short line, however large it is."""
    text = _REPR.repr(found)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _observed(name: str, entry: Any) -> Observed:
    if type(entry) is not list or len(entry) < 6:
        raise PackError(f"{name}: expected a kind, a token, three counts and a context, found {shown(entry)}")
    kind, token, hits, seen, groups, *context = entry
    if type(kind) is not int or kind not in (0, 1):
        raise PackError(f"{name}: expected kind 0 or 1, found {shown(kind)}")
    if type(token) is not int or not -1 <= token < MAX_TOKEN:
        raise PackError(f"{name}: expected a token id or -1, found {shown(token)}")
    _items(name, context, kind, least=1)
    for number in (hits, groups):
        if type(number) is not int or not 0 <= number <= MAX_COUNT:
            raise PackError(f"{name}: expected a count, found {shown(number)}")
    if hits > _count(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    return Observed(bool(kind), tuple(context), token, hits, seen, groups)


def _items(name: str, context: Any, is_shape: int, least: int) -> None:
    is_known = type(context) is list and all(
        type(item) is int and (0 <= item < MAX_TOKEN or (is_shape == 1 and item in _CLASSES))
        for item in context
    )
    if not is_known or not least <= len(context) <= MAX_CONTEXT:
        what = "items of a shape" if is_shape else "token ids"
        raise PackError(f"{name}: expected {least} to {MAX_CONTEXT} {what}, found {shown(context)}")


def _recipe(name: str, names: Sequence[str], entry: Any) -> Recipe:
    if type(entry) is not list or len(entry) < 2:
        raise PackError(f"{name}: expected two counts and words, found {shown(entry)}")
    hits, seen, *numbers = entry
    is_known = all(type(number) is int and 0 <= number < len(names) for number in numbers)
    if not (2 <= len(numbers) <= MAX_WORDS + 1 and is_known):
        raise PackError(
            f"{name}: expected 2 to {MAX_WORDS + 1} numbers of the {len(names)} words, found {shown(numbers)}"
        )
    if _count(name, hits) > _count(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    *context, word = (names[number] for number in numbers)
    return Recipe(tuple(context), word, hits, seen)


def _list(data: dict[str, Any], name: str) -> list[Any]:
    found = data.get(name)
    if type(found) is not list:
        raise PackError(f"{name}: expected a list, found {shown(found)}")
    return found


def _string(data: dict[str, Any], name: str) -> str:
    found = data.get(name)
    if not _is_text(found):
        raise PackError(f"{name}: expected a text, found {shown(found)}")
    return str(found)


def _count(name: str, number: Any) -> int:
    if type(number) is not int or not 1 <= number <= MAX_COUNT:
        raise PackError(f"{name}: expected a count, found {shown(number)}")
    return number


def _is_text(found: Any) -> bool:
    """Whether it is a text that a tokenizer can read: JSON can write halves of characters."""
    return type(found) is str and not _HALF.search(found)


def _is_offset(number: Any) -> bool:
    return type(number) in (int, float) and -1 <= number <= 1


_HALF = re.compile("[\ud800-\udfff]")
_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


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
