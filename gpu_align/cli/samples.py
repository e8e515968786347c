"""Reads a model's samples and outputs: JSON lines, plain or gzipped."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_GZIP_MAGIC = b"\x1f\x8b"


def read_samples(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """``{"task": str, "prompt": str, "samples": [str, …]}`` a line; task and prompt may be left out.

    Raises:
        ValueError: a line is none; the message has its number.
        OSError: the file cannot be read.
    """
    for number, line in _lines(path):
        samples = line.get("samples")
        if type(samples) is not list or not all(map(_is_text, samples)):
            raise ValueError(f"line {number}: samples: expected a list of texts, found {_kind(samples)}")
        yield _text(number, line, "task", ""), _text(number, line, "prompt", ""), samples


def read_outputs(path: Path) -> Iterator[tuple[str, str, str]]:
    """``{"task": str, "prompt": str, "output": str}`` a line; errors as in `read_samples`."""
    for number, line in _lines(path):
        fields = _text(number, line, "task", ""), _text(number, line, "prompt", "")
        yield (*fields, _text(number, line, "output"))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        opened: Callable[..., Any] = gzip.open if file.read(2) == _GZIP_MAGIC else open
    number = 0
    with opened(path, "rb") as lines:
        try:
            for number, raw in enumerate(lines, start=1):
                raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if raw.strip():
                    yield number, _object(number, raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"line {number + 1}: broken gzip ({error})") from error


def _object(number: int, raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: expected JSON ({str(error).splitlines()[0]})") from error
    if type(line) is not dict:
        raise ValueError(f"line {number}: expected an object, found {_kind(line)}")
    return line


def _text(number: int, line: dict[str, Any], name: str, default: str | None = None) -> str:
    found = line.get(name, default)
    if not _is_text(found):
        raise ValueError(f"line {number}: {name}: expected a text, found {_kind(found)}")
    return str(found)


def _is_text(found: Any) -> bool:
    """Whether it is a text that a tokenizer can read: JSON can write halves of characters."""
    if type(found) is not str:
        return False
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(found: Any) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"
