"""Files that others may have written: read up to a limit, checked value by value, and written whole or not at all.

`checked` is the one validator. The schema of a file is a class; its annotations say what is allowed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from reprlib import Repr
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

#: A file, and its text, is not read further: 30 times the text of the pack that comes with the library.
MAX_BYTES = 1 << 25
#: The largest count: floats hold all integers up to here. Token ids are below the other one.
MAX_COUNT, MAX_TOKEN = 1 << 53, 1 << 31

_GZIP_MAGIC = b"\x1f\x8b"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 40  # little of a text that should not be shown


class Domain(NamedTuple):
    """The values of a type that are allowed, as ``Annotated[int, Domain("a count", ...)]``."""

    expected: str
    holds: Callable[[Any], bool]


Natural = Annotated[int, Domain("an integer from 0 on", lambda n: 0 <= n <= MAX_COUNT)]
Count = Annotated[int, Domain("a count", lambda n: 1 <= n <= MAX_COUNT)]
TokenId = Annotated[int, Domain("a token id", lambda n: 0 <= n < MAX_TOKEN)]
#: What a calibration adds to a probability, by the bin of equal width that it is in; between middles interpolated.
NUM_BINS = 20
_Offset = Annotated[float, Domain("a number from -1 to 1", lambda offset: -1 <= offset <= 1)]
Calibration = Annotated[list[_Offset], Domain(f"{NUM_BINS} numbers", lambda found: len(found) == NUM_BINS)]
#: JSON can write halves of characters, which no tokenizer reads.
Text = Annotated[str, Domain("a text", lambda text: not _HALF_CHARACTER.search(text))]

_PLAIN: dict[Any, Domain] = {
    int: Domain("an integer", lambda value: type(value) is int),
    float: Domain("a number", lambda value: type(value) in (int, float)),
    str: Domain("a text", lambda value: type(value) is str),
    dict: Domain("an object", lambda value: type(value) is dict),
    Any: Domain("anything", lambda value: True),
}


def checked(kind: Any, value: Any, where: str = "") -> Any:
    """`value`, as JSON or YAML has it, as `kind`; ValueError names the place, and what it expects and finds there.

    kind: int, float, str, dict or Any; ``Annotated[kind, Domain]``, ``kind | None``, ``list[kind]``; a NamedTuple,
    of a list of its fields; a dataclass, of an object. A field of that with a default may be null or missing.
    """
    base, domains = _parts(kind)
    if domains:
        value = value if base is None else checked(base, value, where)
        for domain in domains:
            expect(domain.holds(value), where, domain.expected, value)
        return value
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if value is None else checked(arguments[0], value, where)
    if not is_dataclass(kind):
        expect(type(value) is list, where, "a list", value)
    if get_origin(kind) is list:
        base, domains = _parts(arguments[0])
        if base is None and all(all(map(domain.holds, value)) for domain in domains):
            return value
        return [checked(arguments[0], one, f"{where}[{i}]") for i, one in enumerate(value)]
    hints, make = _hints(kind), kind
    if not is_dataclass(kind):
        expect(len(value) == len(hints), where, f"{len(hints)} values", value)
        return make(*(checked(*pair, where) for pair in zip(hints.values(), value, strict=True)))
    expect(type(value) is dict, where, "an object", value)
    found = {}
    for field in fields(kind):
        has_default = (field.default, field.default_factory) != (MISSING, MISSING)
        if has_default and value.get(field.name) is None:
            continue
        place = f"{where}.{field.name}" if where else field.name
        expect(field.name in value, place, "a value", None, "; is the file whole?")
        found[field.name] = checked(hints[field.name], value[field.name], place)
    return make(**found)


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@lru_cache(maxsize=256)
def _parts(kind: Any) -> tuple[Any, tuple[Domain, ...]]:
    """A type without its domains, and these; of a plain type None, and its own domain first."""
    base, *domains = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    plain = _PLAIN.get(get_origin(base) or base)
    return (base, tuple(domains)) if plain is None else (None, (plain, *domains))


def expect(is_right: Any, where: str, expected: str, found: Any, more: str = "") -> None:
    """Refuse a value of a file that is not right: ValueError."""
    if not is_right:
        raise ValueError(f"{where}{where and ': '}expected {expected}, found {shown(found)}{more}")


def shown(found: Any) -> str:
    """A value as one short line, however large it is."""
    text = _REPR.repr(found)
    return text if len(text) <= 120 else f"{text[:117]}..."


def first_line(error: Exception) -> str:
    """The first line of a message, or the error's name."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file's text, unpacked if it is gzipped, and its JSON object.

    ValueError: it is torn, longer than `MAX_BYTES`, or holds no object.
    """
    with path.open("rb") as file:
        text = packed = file.read(MAX_BYTES + 1)
    try:
        if len(packed) <= MAX_BYTES and packed.startswith(_GZIP_MAGIC):
            text = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged gzip data: {first_line(error)}") from error
    if max(len(packed), len(text)) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes, found more")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {first_line(error)}") from error
    return text, checked(dict, value)


def json_text(data: Any, sort_keys: bool = False) -> bytes:
    """JSON in one line."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, sort_keys=sort_keys, allow_nan=False)
    return text.encode()


def content_hash(data: Mapping[str, Any], name: str) -> str:
    """SHA-256 of the data of a file, but for the entry of this name, which holds it."""
    content = {key: value for key, value in data.items() if key != name}
    return hashlib.sha256(json_text(content, sort_keys=True)).hexdigest()


def write_at_once(path: Path, parts: Iterable[bytes], mode: int = 0o666) -> None:
    """Write the file whole or not at all. mode: its permissions from its first byte on, less the umask."""
    passing = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    passing.unlink(missing_ok=True)  # of a process that ended while it wrote
    try:
        # x: a file or link that another process puts there meanwhile is not written to.
        with open(passing, "xb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(parts)
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)
