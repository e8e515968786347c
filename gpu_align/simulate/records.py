"""Reads edit pairs: JSON lines, plain or gzipped, with token ids or with text."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_align.errors import MissingExtraError
from gpu_align.simulate.tokenizers import TextTokenizer, load_tokenizer

#: Token ids travel as int32.
MAX_TOKEN_ID = 2**31 - 1

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Record:
    """One known generation to replay: token ids in ``[0, 2**31)``.

    Attributes:
        id: as in the file, a string.
        prompt: tokens before the output; may be empty.
        prediction: what the user expected; may be empty.
        output: what the model writes; at least one token.
        tokenizer: the tokenizer that the ids belong to, None where it is not known.
    """

    id: str
    prompt: list[int]
    prediction: list[int]
    output: list[int]
    tokenizer: str | None = None


class RecordError(ValueError):
    """A line is not a record.

    Attributes:
        line: its number in the file, from 1; 0 for an error of the whole file.
    """

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(f"line {line}: {message}" if line else message)


def read_records(path: Path, tokenizer: str | None = None) -> list[Record]:
    """Read a whole file of records, ``PAIRS.jsonl`` or ``PAIRS.jsonl.gz`` (told by its first two bytes).

    Each line is one JSON object; empty lines are skipped, unknown fields and a byte order mark ignored::

        {"id": str or int,
         "prediction": [ids]   or "prediction_text": str,
         "output": [ids]       or "output_text": str,
         "prompt": [ids]?      or "prompt_text": str?,
         "tokenizer": str?}

    Text is encoded without special tokens, its line ends normalised to LF, by the record's `tokenizer`, or
    else by the one given here.

    Args:
        path: the file.
        tokenizer: ``"tekken"``, or what transformers can load; for records that name none.

    Raises:
        RecordError: a line is not a record, and its number; or the file has no records, or damaged gzip data.
        OSError: the file cannot be read.
        MissingExtraError: a tokenizer's package is not installed.
    """
    records = [_parse(line, text, tokenizer) for line, text in _lines(path) if text.strip()]
    if not records:
        raise RecordError(0, f"{path}: expected at least one record, found none")
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP_MAGIC
    number = 0
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            for number, text in enumerate(stream, start=1):
                yield number, text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(number + 1, f"damaged gzip data ({error})") from error


def _parse(line: int, raw: bytes, default_tokenizer: str | None) -> Record:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(line, f"expected UTF-8, found byte 0x{raw[error.start]:02x}") from error
    except RecursionError as error:
        raise RecordError(line, "expected one JSON object, found brackets nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers with more digits than Python reads
        raise RecordError(line, f"expected one JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise RecordError(line, f"expected a JSON object, found {_kind(fields)}")

    identifier = fields.get("id")
    if "id" not in fields:
        raise RecordError(line, 'field "id" is missing')
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise RecordError(line, f'"id": expected a string or an integer, found {_kind(identifier)}')

    name = fields.get("tokenizer", default_tokenizer)
    if name is not None and (not isinstance(name, str) or not name):
        raise RecordError(line, f'"tokenizer": expected a tokenizer\'s name, found {_kind(name)}')

    def encoder() -> TextTokenizer:
        if name is None:
            raise RecordError(line, "a field with text needs a tokenizer: --tokenizer NAME_OR_PATH")
        try:
            return load_tokenizer(name)
        except MissingExtraError:
            raise
        except (ValueError, OSError) as error:
            raise RecordError(line, str(error)) from error

    output = _tokens(line, fields, "output", encoder)
    if not output:
        raise RecordError(line, '"output": expected at least one token, found none')
    return Record(
        id=str(identifier),
        prompt=_tokens(line, fields, "prompt", encoder, required=False),
        prediction=_tokens(line, fields, "prediction", encoder),
        output=output,
        tokenizer=name,
    )


def _tokens(
    line: int, fields: dict[str, Any], field: str, encoder: Callable[[], TextTokenizer], required: bool = True
) -> list[int]:
    """The token ids of `field`, or of ``field_text`` encoded; [] where an optional field is absent."""
    text_field = f"{field}_text"
    given = [name for name in (field, text_field) if name in fields]
    if len(given) == 2:
        raise RecordError(line, f'expected "{field}" or "{text_field}", found both')
    if not given and required:
        raise RecordError(line, f'field "{field}" (or "{text_field}") is missing')
    if text_field in given:
        return _encode(line, text_field, fields[text_field], encoder)
    value = fields.get(field)
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise RecordError(line, f'"{field}": expected a list of token ids, found {_kind(value)}')
    for index, token in enumerate(value):
        # type() and not isinstance(): True is an int in Python, but not a token id.
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID:
            continue
        expected, found = "an integer token id", _kind(token)
        if type(token) is int:
            expected = f"a token id from 0 to {MAX_TOKEN_ID}"
            found = str(token) if abs(token) < 10**30 else "a number of more than 30 digits"
        raise RecordError(line, f'"{field}"[{index}]: expected {expected}, found {found}')
    return value


def _encode(line: int, field: str, value: object, encoder: Callable[[], TextTokenizer]) -> list[int]:
    if not isinstance(value, str):
        raise RecordError(line, f'"{field}": expected a string, found {_kind(value)}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f'"{field}": expected text, found a lone surrogate at {error.start}'
        raise RecordError(line, message) from error
    return encoder().encode(value.replace("\r\n", "\n").replace("\r", "\n"))


def _kind(value: object) -> str:
    """`value` as a JSON author would call it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value[:20]!r}" + ("…" if len(value) > 20 else "")
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"the number {value}"
