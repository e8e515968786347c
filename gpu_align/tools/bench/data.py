"""The edits of a run: a file of pairs, a Git history, two files, or the set that is shipped."""

from __future__ import annotations

import difflib
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..inputs import EditError, Pair, RecordError, at_line, git_edits, json_lines, pair_of, text_file

#: Files of a Git history beyond this size are left out.
MAX_FILE_BYTES = 48 * 1024
SHIPPED = "the shipped set"


def read_pairs(path: Path, source: str = "") -> list[Pair]:
    """Read edits (`pair_of`), one JSON object a line, plain or gzipped.

    EditError calls the file `source`, or its path, and names the line. OSError: it cannot be read.
    """
    pairs: dict[str, tuple[int, Pair]] = {}
    try:
        for line, fields in json_lines(path):
            with at_line(line):
                pair = pair_of(fields)
            if pair.id in pairs:
                raise RecordError(line, f'"id": {pair.id!r} is also that of line {pairs[pair.id][0]}')
            pairs[pair.id] = line, pair
    except RecordError as error:
        raise EditError(f"{source or path}: {error}") from error
    if not pairs:
        raise EditError(f"{source or path}: expected at least one pair, found none")
    return [pair for _, pair in pairs.values()]


def shipped_pairs() -> list[Pair]:
    return read_pairs(Path(__file__).with_name("pairs.jsonl"), SHIPPED)


def pair_of_files(before: Path, after: Path | None, instruction: str | None) -> Pair:
    """EditError where one is no text, or both are the same, OSError."""
    old, new = text_file(before), None if after is None else text_file(after)
    if not old.strip():
        raise EditError(f"--before: {before}: expected a text, found an empty file")
    if new == old:
        raise EditError(f"--after: {after} is equal to {before}: there is no edit")
    if instruction is None and new is None:
        raise EditError("--before without --after needs --instruction")
    if not instruction:  # the edit itself, as a diff
        lines = old.splitlines(), (new or old).splitlines()
        diff = "\n".join(difflib.unified_diff(*lines, "before", "after", n=1, lineterm=""))
        instruction = f"Apply this diff to the text below.\n\n{diff}"
    return Pair(before.name, instruction, old, new)


def pairs_from_git(repo: Path, revisions: str, limit: int) -> list[Pair]:
    """The text files that commits modify (`git_edits`); the subject is the instruction."""
    return [
        Pair(f"{e.commit}:{e.path}", f"Change the file {e.path}: {e.subject}", e.before, e.after)
        for e in git_edits(revisions, repo, limit, MAX_FILE_BYTES)
    ]


Choice = Literal["auto", "before", "output"]
#: With `auto` the text before the edit is the prediction if this share of the output's word pairs is in it.
RESEMBLES = 0.5

_PIECE_CHARS = 48
_WORDS = re.findall(
    r"\w+",
    """
    amber anchor apricot barley beacon bishop bramble candle canvas cellar cinder clover copper cradle
    dapple drizzle ember fennel ferry flannel gable garnet ginger glacier gravel hamlet harbour hazel
    heather hollow indigo ivory jasmine juniper kestrel kettle ladder lantern lavender lichen linen maple
    marble meadow mitten mortar muslin nettle nickel oatmeal orchard otter paddle parsley pebble pewter
    pigeon plume poplar quarry quiver raven ribbon rivet russet saddle saffron sandal shutter sparrow
    spindle steeple sultan tallow tartan thimble thistle timber trellis turnip umber valley velvet vessel
    walnut warbler wicker willow winter yarrow yonder zephyr
""",
)


@dataclass(frozen=True)
class SentPredictions:
    """The predictions of each mode, and a sentence on their source."""

    #: mode → [P] one a pair, a text or the whole field; modes that send none are not there
    texts: Mapping[str, Sequence[str | Mapping[str, Any]]]
    sources: Sequence[str]  #: [P] of `prediction`: ``"before"`` or ``"output"``
    pair_of: Mapping[str, int] = field(default_factory=dict)  #: modes that one pair alone is measured with
    #: further fields of a mode's requests
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def sentence(self) -> str:
        total, edited = len(self.sources), self.sources.count("output")
        if not edited:
            return "Each prediction is the text before the edit, as a client would send it."
        real = "with the edits of its pair, or with typed ones where the pair has no text after the edit"
        if edited == total:
            return f"Each prediction is the output of the first run {real}."
        return (
            f"{total - edited} of {total} predictions are the text before the edit. {edited} are the output of "
            f"the first run {real}, because the output hardly resembled the text before the edit."
        )


def make_predictions(pairs: Sequence[Pair], outputs: Sequence[str], choice: Choice) -> SentPredictions:
    """Choose a prediction and a useless one of about its length for each pair and its output of the first run.

    ``"auto"``: the text before the edit where the output resembles it, else the output with edits. Beside the
    text before the edit go the pair's alternatives.
    """
    useful: list[str] = []
    sources: list[str] = []
    for pair, output in zip(pairs, outputs, strict=True):
        before = choice == "before" or (choice == "auto" and resemblance(output, pair.before) >= RESEMBLES)
        sources.append("before" if before else "output")
        useful.append(pair.before if before else edited(output, pair))
    unrelated = [unrelated_text(len(text), pair.id) for text, pair in zip(useful, pairs, strict=True)]
    sent = [
        {"type": "content", "content": text, "alternatives": pair.alternatives}
        if pair.alternatives and source == "before"
        else text
        for text, source, pair in zip(useful, sources, pairs, strict=True)
    ]
    return SentPredictions({"prediction": sent, "unrelated": unrelated}, sources)


def resemblance(output: str, text: str) -> float:
    """The share of the output's pairs of neighbouring words that are in the text, too, counted with repetition."""
    written, known = (Counter(pairwise(each.split())) for each in (output, text))
    return (written & known).total() / max(1, written.total())


def edited(output: str, pair: Pair) -> str:
    """The output as if it had still to be edited: the pair's own edits undone in it, at the same places.

    Each hunk of the diff from `after` back to `before` is carried to the same share of the output's lines. Without
    `after`, or if nothing changes, a few edits of a person are typed into it (`typed_edits`).
    """
    if pair.after is None:
        return typed_edits(output, pair.id)
    after, before = pair.after.splitlines(keepends=True), pair.before.splitlines(keepends=True)
    pieces = _pieces(output)
    share = min(1.0, len(pieces) / max(1, len(after)))
    hunks = difflib.SequenceMatcher(None, after, before, autojunk=False).get_opcodes()
    for kind, start, end, other_start, other_end in reversed(hunks):
        if kind == "equal":
            continue
        at = round(start / max(1, len(after)) * len(pieces))
        removed = math.ceil((end - start) * share)
        inserted = math.ceil((other_end - other_start) * share)
        pieces[at : at + removed] = before[other_start : other_start + inserted]
    changed = "".join(pieces)
    return changed if changed and changed != output else typed_edits(output, pair.id)


def typed_edits(text: str, seed: str) -> str:
    """A text with a few edits: a name changed, a number or a word, a line deleted, another inserted."""
    rng = random.Random(seed)
    names = Counter(re.findall(r"[A-Za-z_]\w{2,}", text))
    if names:
        name = rng.choice([name for name, _ in names.most_common(3)])
        text = re.sub(rf"\b{re.escape(name)}\b", f"{name}_{rng.choice(_WORDS)}", text, count=3)
    pieces = _pieces(text)
    for _ in range(max(1, len(pieces) // 40)):
        at = rng.randrange(len(pieces)) if pieces else 0
        pieces[at : at + 1] = rng.choice(([], [*pieces[at : at + 1], f"{rng.choice(_WORDS)}\n"]))
    return "".join(pieces) or rng.choice(_WORDS)


def unrelated_text(length: int, seed: str) -> str:
    """Random words, about `length` characters: a prediction that no answer follows."""
    rng = random.Random(f"unrelated {seed}")
    words: list[str] = []
    written = 0
    while written < max(length, 1):
        words.append(rng.choice(_WORDS) + (".\n" if rng.random() < 0.1 else ""))
        written += len(words[-1]) + 1
    return " ".join(words)


def _pieces(text: str) -> list[str]:
    """The lines of a text; for a text of few and long lines, pieces of some words each."""
    lines = text.splitlines(keepends=True)
    if len(lines) * 2 * _PIECE_CHARS > len(text):
        return lines
    return re.findall(rf"(?s).{{1,{_PIECE_CHARS}}}(?:\s+|$)|.{{1,{_PIECE_CHARS}}}", text)
