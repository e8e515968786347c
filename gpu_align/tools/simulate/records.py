"""Reads edit pairs: JSON lines, plain or gzipped, with token ids or with text."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .tokenizers import TextTokenizer, load_tokenizer

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


#: Larger files of a history are left out.
MAX_FILE_BYTES = 256 * 1024
#: Edits of a history that are taken where nobody sets a limit.
DEFAULT_LIMIT = 100


class EditError(ValueError):
    """There is no edit to replay; the message names the file or the range, and why."""


def records_of_files(before: Path, after: Path, tokenizer: str) -> list[Record]:
    """One record: the text of `before` is the prediction, that of `after` the output.

    Raises:
        EditError: a file is not UTF-8 text, or `after` is empty.
        OSError: a file cannot be read.
        ValueError: the tokenizer cannot be loaded.
        MissingExtraError: the tokenizer's package is not installed.
    """
    old, new = _text_of(before), _text_of(after)
    if not new:
        raise EditError(f"{after}: expected text, found an empty file")
    return [_record(after.name, old, new, tokenizer)]


def records_of_git(
    revisions: str, repo: Path, tokenizer: str, suffixes: Sequence[str] = (), limit: int | None = None
) -> list[Record]:
    """The text files that the commits of a range changed, newest first; merges are left out.

    Args:
        revisions: what ``git log`` takes, ``v1.0..v1.1`` or ``HEAD~20..``.
        repo: a work tree, a folder in it, or a bare repository.
        tokenizer: ``"tekken"``, or what transformers can load.
        suffixes: only files whose names end in one of these, if there are any.
        limit: at most so many records, `DEFAULT_LIMIT` if None.

    Raises:
        EditError: Git is missing or refuses the range, or the range changes no text file.
        ValueError: the tokenizer cannot be loaded.
        MissingExtraError: the tokenizer's package is not installed.
    """
    if not revisions or revisions.startswith("-"):
        raise EditError(f"--git: expected a range such as HEAD~20.., found {revisions!r}")
    edits = list(
        itertools.islice(_edits(revisions, repo, tuple(suffixes)), DEFAULT_LIMIT if limit is None else limit)
    )
    if not edits:
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise EditError(f"--git: {revisions} changes no text file{ending}")
    return [_record(name, old, new, tokenizer) for name, old, new in edits]


def _record(name: str, old: str, new: str, tokenizer: str) -> Record:
    encode = load_tokenizer(tokenizer).encode
    return Record(name, [], encode(old) if old else [], encode(new), tokenizer)


def _edits(revisions: str, repo: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """``(commit:path, old text, new text)``."""
    log = _git(repo, "log", "--no-merges", "--format=%H", "--end-of-options", revisions, "--")
    for commit in log.decode().split():
        raw = _git(repo, "diff-tree", "-r", "-z", "--no-commit-id", "--diff-filter=M", commit)
        fields = raw.decode("utf-8", "surrogateescape").split("\0")
        for meta, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, *blobs, _ = meta.lstrip(":").split()
            if not (old_mode.startswith("100") and new_mode.startswith("100")):
                continue  # a link or a submodule
            if suffixes and not path.endswith(suffixes):
                continue
            old, new = (_blob(repo, blob) for blob in blobs)
            if old and new and old != new:
                shown = path.encode("utf-8", "replace").decode()
                yield f"{commit[:10]}:{shown}", old, new


def _blob(repo: Path, name: str) -> str | None:
    """The text of a blob; None where it is too large or not text."""
    if int(_git(repo, "cat-file", "-s", name)) > MAX_FILE_BYTES:
        return None
    return _decoded(_git(repo, "cat-file", "blob", name))


def _git(repo: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(repo), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise EditError(f"--git needs git: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise EditError(f"--git: {said[0].removeprefix('fatal: ')}")
    return done.stdout


def _text_of(path: Path) -> str:
    text = _decoded(path.read_bytes())
    if text is None:
        raise EditError(f"{path}: expected UTF-8 text, found other bytes")
    return text


def _decoded(content: bytes) -> str | None:
    """UTF-8 text without its byte order mark, line ends as LF; None where it is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")
