"""Reads edit pairs: JSON lines, plain or gzipped, with token ids or with text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ops.files import Text, TokenId, checked, expect
from ...ops.layout import TextKind
from ...texts import skeletons
from ...texts.several import joined
from ...texts.views import in_forms, texts_in
from .. import inputs
from ..inputs import EditError, Identifier, RecordError, text_file, with_line_feeds
from .tokenizers import load_tokenizer


@dataclass(frozen=True)
class Record:
    """One known generation to replay: token ids in ``[0, 2**31)``. Prompt and prediction may be empty."""

    id: str
    prompt: list[int]
    prediction: list[int]
    output: list[int]
    #: That the ids belong to, where it is known.
    tokenizer: str | None = None
    #: Of the prediction: a memory is texts of the prompt, a related one has skeletons of tools or a schema in it.
    kind: TextKind = TextKind.PREDICTION


def read_records(path: Path, tokenizer: str | None = None, with_views: bool = False) -> list[Record]:
    """Read a whole file of records, ``PAIRS.jsonl`` or ``PAIRS.jsonl.gz``; docs/simulator.md has its fields.

    Args:
        tokenizer: as `load_tokenizer` takes it; for records that name none.
        with_views: draft from other forms of the prediction, too (`gpu_align.texts.views`); without a prediction
            from those of the texts in the prompt. Records of ids stay as they are.

    RecordError: as `json_lines`, or a line is not a record, or the file has none. OSError, MissingExtraError: the
    file cannot be read, or a tokenizer's package is not installed.
    """
    records = []
    for line, fields in inputs.json_lines(path):
        with inputs.at_line(line):
            records.append(_parse(fields, tokenizer, with_views))
    if not records:
        raise RecordError(0, "expected at least one record, found none")
    return records


@dataclass
class RecordFields:
    """A line of a file of records."""

    id: Identifier
    output: list[TokenId] | None = None
    output_text: Text | None = None
    prediction: list[TokenId] | None = None
    prediction_text: Text | None = None
    #: Or several of either kind, each as one.
    predictions: list[list[TokenId]] | None = None
    predictions_text: list[Text] | None = None
    prompt: list[TokenId] | None = None
    prompt_text: Text | None = None
    tokenizer: str | None = None


def _parse(fields: dict[str, Any], default_tokenizer: str | None, with_views: bool) -> Record:
    if "before" in fields and not {"output", "output_text"} & fields.keys():
        # An edit, as `bench` reads it: its prompt is the message that `bench` sends.
        pair = inputs.pair_of(fields)
        expect(pair.after is not None, "after", "a text", None)
        (message,) = pair.messages()
        texts = {"prompt_text": message["content"], "prediction_text": pair.before, "output_text": pair.after}
        fields = {"id": pair.id, **texts, "tokenizer": fields.get("tokenizer")}
    found: RecordFields = checked(RecordFields, fields)
    name = found.tokenizer or default_tokenizer
    prompt, output = (_tokens(found, field, name) for field in ("prompt", "output"))
    several = found.predictions or [
        _encoded(text, "predictions_text", name) for text in found.predictions_text or ()
    ]
    if several:
        one = {"prediction", "prediction_text"} & fields.keys()
        expect(not one, "predictions", "one of prediction and predictions, or their texts", "both")
    prediction = joined(several) if several else _tokens(found, "prediction", name)
    expect(output, "output", "at least one token", output)
    memory = False
    if with_views and name is not None:
        if memory := not prediction:
            texts_to_draft = texts_in(with_line_feeds(found.prompt_text or ""))
        else:
            texts_to_draft = [*map(with_line_feeds, found.predictions_text or [found.prediction_text or ""])]
        views = in_forms(texts_to_draft)
        prediction = [token for view in views for token in load_tokenizer(name).encode(view)] or prediction
    alone = memory or not prediction
    if announced := _announced(fields, name, alone and not fields.get("tools")):
        memory = alone
        prediction = announced + prediction if memory else prediction + announced
    kind = TextKind.PREDICTION
    if memory and prediction:
        kind = skeletons.kind_of(prediction) if announced else TextKind.MEMORY
    return Record(str(found.id), prompt, prediction, output, name, kind)


def _announced(fields: dict[str, Any], tokenizer: str | None, forced: bool) -> list[int]:
    """The skeletons of a record's `tools` and `response_format`, as the plugin makes them."""
    if not skeletons.announces(fields):
        return []
    if tokenizer is None:
        raise ValueError("tools, response_format: expected a tokenizer: --tokenizer NAME_OR_PATH")
    loaded = load_tokenizer(tokenizer)
    try:
        pieces = skeletons.of_request(fields, lambda: skeletons.Calls(loaded.render))
    except skeletons.SkeletonError as error:
        raise ValueError(f"tools, response_format: no skeleton: {error.reason}") from None
    return skeletons.join(pieces, lambda texts: [*map(loaded.encode, texts)], forced) if pieces else []


def _tokens(found: RecordFields, field: str, tokenizer: str | None) -> list[int]:
    """The token ids of `field`, or of its text encoded; [] where there is no prompt."""
    ids: list[int] | None = getattr(found, field)
    text: str | None = getattr(found, f"{field}_text")
    either = f"{field} or {field}_text"
    expect(ids is None or text is None, field, either, "both")
    expect(ids is not None or text is not None or field == "prompt", field, either, None)
    return ids or [] if text is None else _encoded(text, f"{field}_text", tokenizer)


def _encoded(text: str, field: str, tokenizer: str | None) -> list[int]:
    if tokenizer is None:
        raise ValueError(f"{field}: text needs a tokenizer: --tokenizer NAME_OR_PATH")
    return load_tokenizer(tokenizer).encode(with_line_feeds(text))


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
    edits = inputs.git_edits(revisions, repo, 100 if limit is None else limit, MAX_FILE_BYTES, suffixes)
    return [_record(f"{e.commit}:{e.path}", e.before, e.after, tokenizer) for e in edits]


def _record(name: str, old: str, new: str, tokenizer: str) -> Record:
    encode = load_tokenizer(tokenizer).encode
    return Record(name, [], encode(old) if old else [], encode(new), tokenizer)
