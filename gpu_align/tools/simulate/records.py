"""Reads edit pairs: JSON lines, plain or gzipped, with token ids or with text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...views import in_forms, texts_in
from ..inputs import (
    EditError,
    RecordError,
    git_edits,
    identifier_of,
    json_lines,
    kind_of,
    pair_of,
    text_file,
    with_line_feeds,
)
from .tokenizers import load_tokenizer

#: Token ids travel as int32.
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Record:
    """One known generation to replay: token ids in ``[0, 2**31)``. Prompt and prediction may be empty."""

    id: str
    prompt: list[int]
    prediction: list[int]
    output: list[int]
    #: That the ids belong to, where it is known.
    tokenizer: str | None = None
    #: Whether the prediction is none, but texts of the prompt: nothing is drafted before the output matches them.
    memory: bool = False


def read_records(path: Path, tokenizer: str | None = None, with_views: bool = False) -> list[Record]:
    """Read a whole file of records, ``PAIRS.jsonl`` or ``PAIRS.jsonl.gz``; docs/simulator.md has its fields.

    Args:
        tokenizer: as `load_tokenizer` takes it; for records that name none.
        with_views: draft from other forms of a text, too (`gpu_align.views`): of the prediction, or where there is
            none of the texts in the prompt. Records of ids stay as they are.

    Raises:
        RecordError: as `json_lines`, or a line is not a record, or the file has none.
        OSError, MissingExtraError: the file cannot be read, or a tokenizer's package is not installed.
    """
    records = [_parse(line, fields, tokenizer, with_views) for line, fields in json_lines(path)]
    if not records:
        raise RecordError(0, "expected at least one record, found none")
    return records


def _parse(line: int, fields: dict[str, Any], default_tokenizer: str | None, with_views: bool) -> Record:
    identifier = identifier_of(line, fields)
    name = fields.get("tokenizer", default_tokenizer)
    if name is not None and (not isinstance(name, str) or not name):
        raise RecordError(line, f'"tokenizer": expected a tokenizer\'s name, found {kind_of(name)}')
    if "before" in fields and not {"output", "output_text"} & fields.keys():
        fields = _texts_of(line, fields)
    output = _tokens(line, fields, "output", name)
    if not output:
        raise RecordError(line, '"output": expected at least one token, found none')
    prompt = _tokens(line, fields, "prompt", name, required=False)
    prediction, memory = _tokens(line, fields, "prediction", name), False
    if with_views and name is not None:
        if memory := not prediction:
            texts = texts_in(with_line_feeds(fields.get("prompt_text", "")))
        else:
            texts = [with_line_feeds(fields.get("prediction_text", ""))]
        views = in_forms(texts)
        prediction = [token for view in views for token in load_tokenizer(name).encode(view)] or prediction
    return Record(identifier, prompt, prediction, output, name, memory and bool(prediction))


def _texts_of(line: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The texts of an edit, as `bench` reads it: its prompt is the message that `bench` sends."""
    pair = pair_of(line, fields)
    if pair.after is None:
        raise RecordError(line, 'field "after" is missing')
    (message,) = pair.messages()
    return {"prompt_text": message["content"], "prediction_text": pair.before, "output_text": pair.after}


def _tokens(
    line: int, fields: dict[str, Any], field: str, tokenizer: str | None, required: bool = True
) -> list[int]:
    """The token ids of `field`, or of ``field_text`` encoded; [] where an optional field is absent."""
    text_field = f"{field}_text"
    if field in fields and text_field in fields:
        raise RecordError(line, f'expected "{field}" or "{text_field}", found both')
    if text_field in fields:
        return _encode(line, text_field, fields[text_field], tokenizer)
    if field not in fields and required:
        raise RecordError(line, f'field "{field}" (or "{text_field}") is missing')
    value = fields.get(field)
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise RecordError(line, f'"{field}": expected a list of token ids, found {kind_of(value)}')
    for index, token in enumerate(value):
        # type() and not isinstance(): True is an int in Python, but not a token id.
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID:
            continue
        expected, found = "an integer token id", kind_of(token)
        if type(token) is int:
            expected = f"a token id from 0 to {MAX_TOKEN_ID}"
            found = str(token) if abs(token) < 10**30 else "a number of more than 30 digits"
        raise RecordError(line, f'"{field}"[{index}]: expected {expected}, found {found}')
    return value


def _encode(line: int, field: str, value: object, tokenizer: str | None) -> list[int]:
    if not isinstance(value, str):
        raise RecordError(line, f'"{field}": expected a string, found {kind_of(value)}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f'"{field}": expected text, found a lone surrogate at {error.start}'
        raise RecordError(line, message) from error
    if tokenizer is None:
        raise RecordError(line, "a field with text needs a tokenizer: --tokenizer NAME_OR_PATH")
    try:
        encode = load_tokenizer(tokenizer).encode
    except (ValueError, OSError) as error:
        raise RecordError(line, str(error)) from error
    return encode(with_line_feeds(value))


#: Larger files of a history are left out.
MAX_FILE_BYTES = 256 * 1024


def records_of_files(before: Path, after: Path, tokenizer: str) -> list[Record]:
    """One record: the text of `before` is the prediction, that of `after` the output.

    Raises what `text_file` and `load_tokenizer` raise, and EditError where `after` is empty.
    """
    old, new = text_file(before), text_file(after)
    if not new:
        raise EditError(f"{after}: expected text, found an empty file")
    return [_record(after.name, old, new, tokenizer)]


def records_of_git(
    revisions: str, repo: Path, tokenizer: str, suffixes: Sequence[str] = (), limit: int | None = None
) -> list[Record]:
    """The text files that the commits of a range modified, as `git_edits` finds them, 100 if `limit` is None.

    revisions: what ``git log`` takes, ``v1.0..v1.1`` or ``HEAD~20..``. repo: a work tree, a folder in it, or a
    bare repository. Raises what `git_edits` and `load_tokenizer` raise.
    """
    edits = git_edits(revisions, repo, 100 if limit is None else limit, MAX_FILE_BYTES, suffixes)
    return [_record(f"{e.commit}:{e.path}", e.before, e.after, tokenizer) for e in edits]


def _record(name: str, old: str, new: str, tokenizer: str) -> Record:
    encode = load_tokenizer(tokenizer).encode
    return Record(name, [], encode(old) if old else [], encode(new), tokenizer)
