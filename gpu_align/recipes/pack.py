"""Recipe packs, the misses that a merge makes better packs of, and their files, of which nothing is trusted."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.recipes import MAX_CONTEXT, SHAPE_IDENTIFIER, SHAPE_START, SHAPE_WINDOW
from ..ops.recipes.table import Recipes
from .tokenize import (
    Chains,
    Encode,
    Observed,
    Recipe,
    TokenTexts,
    fingerprint,
    shape_of_output,
    shape_of_tokens,
    tokenize,
)

#: The pack that comes with the library.
SHIPPED = Path(__file__).with_name("base.json.gz")
#: The calibration has one offset for each of so many bins of equal width, by the probability that the counts give.
NUM_BINS = 20
#: The most words of a recipe's context.
MAX_WORDS = 3
#: Of files that are written.
FORMAT = 2
#: Of files that grow: a head, then a row a line.
LINES_FORMAT = 3
#: Kind → what a file of it is called, and the formats that are read. 1: words alone, without a content hash.
KINDS = {"pack": ("a recipe pack", (1, FORMAT)), "misses": ("a file of misses", (FORMAT, LINES_FORMAT))}
#: A file is not read further: its text is 30 times as long as that of the pack that comes with the library.
MAX_BYTES = 1 << 25
#: The largest count: floats hold all up to here. Token ids are below the other one.
MAX_COUNT, MAX_TOKEN = 1 << 53, 1 << 31
#: Different misses that are held; of further ones only the number is.
MAX_MISSES = 100_000

_CLASSES = range(SHAPE_START, SHAPE_IDENTIFIER + 1)
_GZIP_MAGIC = b"\x1f\x8b"
_LINES = b'{"format":%d,' % LINES_FORMAT
_HALF = re.compile("[\ud800-\udfff]")
_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


class PackError(ValueError):
    """A file is not a recipe pack, or a pack does not fit."""


@dataclass(frozen=True, repr=False)
class RecipePack:
    """What usually follows what: in words, for any tokenizer, and in the tokens of one."""

    words: Mapping[str, int]  # how often each was seen
    recipes: Sequence[Recipe]  # by context, shorter ones first
    #: [NUM_BINS], added to a probability in the middle of a bin; interpolated between middles.
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""  # the command
    task: str = ""  # what it was observed in
    tokenizer: str = ""  # the `fingerprint` of the tokenizer whose ids it holds, if it holds any
    observed: Sequence[Observed] = ()  # by falling frequency
    kept: Sequence[int] = ()  # the ids that stay themselves in shapes, ascending: keywords and punctuation

    def __repr__(self) -> str:
        """One line: how many words, recipes and entries."""
        counts = f"num_words={len(self.words)}, num_recipes={len(self.recipes)}"
        return f"RecipePack({counts}{f', num_observed={len(self.observed)}' if self.observed else ''})"

    @classmethod
    def load(cls, path: Path | str | None = None) -> RecipePack:
        """Read a pack, plain or gzipped; None stands for the one that comes with the library.

        At most `MAX_BYTES` of the file and of its text are read. PackError says why it is none, or was changed.
        """
        if path is not None and not isinstance(path, (str, Path)):
            raise TypeError(f"path: expected a str or Path, found {type(path).__name__}")
        pack: RecipePack = read_file(SHIPPED if path is None else Path(path), "pack")
        return pack

    def save(self, path: Path | str) -> None:
        """Write the pack, gzipped if the name ends in ``.gz``; the same pack is the same bytes."""
        write_file(Path(path), self._data())

    @property
    def content_hash(self) -> str:
        """``"sha256:…"`` over all that its file holds besides."""
        return str(self._data()["content_hash"])

    def _data(self) -> dict[str, Any]:
        number = {word: i for i, word in enumerate(self.words)}
        return with_hash(
            "pack",
            {
                "task": self.task,
                "tokenizer": self.tokenizer,
                "made_by": self.made_by,
                "calibration": list(self.calibration),
                "words": [[word, count] for word, count in self.words.items()],
                "recipes": [
                    [r.hits, r.seen, *(number[word] for word in (*r.context, r.word))] for r in self.recipes
                ],
                "kept": list(self.kept),
                "observed": [
                    [int(e.is_shape), e.token, e.hits, e.seen, e.groups, *e.context] for e in self.observed
                ],
            },
        )

    def tokenize(self, encode: Encode, token_texts: TokenTexts | None = None) -> Recipes:
        """The pack in the tokens of one model, as `gpu_align.Drafter` takes it.

        Args:
            encode: gives the token ids of each text, without special tokens.
            token_texts: the text of each token id; needed where something was observed. It is asked for all ids
                from 0 on until it raises an error or has no more texts.

        A recipe is left out where the tokenizer joins the end of its context and its word into one token.

        Raises:
            PackError: the pack holds ids of another tokenizer.
            TypeError: something was observed and there is no `token_texts`.
        """
        words = tokenize(self.words, self.recipes, self.calibration, encode)
        if not self.observed:
            return words
        if (found := fingerprint(encode)) != self.tokenizer:
            raise PackError(
                f"tokenizer: expected {self.tokenizer}, as the pack was observed with, found {found}"
            )
        if token_texts is None:
            raise TypeError("token_texts: expected a function, as the pack holds shapes, found None")
        shape_of = shape_of_tokens(token_texts, self.kept)
        chains = Chains(self.observed, dict(enumerate(shape_of.tolist())))
        rows: tuple[list[Any], list[Any]] = [], []
        for entry in self.observed:
            run = chains.run(entry.is_shape, entry.context) if entry.token >= 0 else ((), ())
            rows[entry.is_shape].append((entry.context, *run))
        literal, shapes = Recipes.from_lists(rows[False]), Recipes.from_lists(rows[True], shape_of=shape_of)
        # Of two literal contexts that are equal the observed one.
        known = {row.tobytes() for row in literal.context}
        words = words.select(np.array([row.tobytes() not in known for row in words.context], dtype=np.bool_))
        context, token_ids, survival, is_shape = (
            np.concatenate([getattr(part, name) for part in (literal, words, shapes)])
            for name in ("context", "token_ids", "survival", "is_shape")
        )
        return Recipes(context, token_ids, survival, is_shape, shape_of=shape_of, indents=words.indents)

    def calibrated(self, calibration: Sequence[float]) -> RecipePack:
        """With another calibration."""
        return replace(self, calibration=tuple(calibration))

    def shapes_only(self, min_groups: int = 2) -> RecipePack:
        """A pack to share: shapes alone, and only with tokens that `min_groups` groups agreed on.

        Words, recipes and literal prefixes, which are text, are left out, and so are tokens that stay themselves
        in no shape that is left.
        """
        left = tuple(e for e in self.observed if e.is_shape and (e.groups >= min_groups or e.token < 0))
        named = {item for entry in left for item in entry.context}
        kept = tuple(token for token in self.kept if token in named)
        return replace(self, words={}, recipes=[], observed=left, kept=kept)

    @classmethod
    def learn(cls, texts: Iterable[tuple[str, str]], made_by: str = "") -> RecipePack:
        """Learn from pairs of a source, a project for example, and a text of it.

        Recipes that only one source writes are left out, unless there is only one source. The order of the texts
        does not matter.
        """
        words, recipes = _tool("learn").learn(texts)
        return cls(words, recipes, made_by=made_by)

    @classmethod
    def observe(
        cls,
        groups: Iterable[tuple[str, str, Sequence[str]]],
        encode: Encode,
        token_texts: TokenTexts,
        *,
        agree: float = 1.0,
        task: str = "",
        made_by: str = "",
        progress: Callable[[str, int], None] | None = None,
    ) -> RecipePack:
        """Learn from what a model answers: k samples for each prompt of a task; see `recipes/README.md`.

        Args:
            groups: ``(task, prompt, samples)`` each. Of one sample nothing is determined.
            encode, token_texts: as in `tokenize`.
            agree: the share of the samples that must agree; above 0, at most 1.
            task: of the pack; if empty, the groups' tasks, joined by ``+``.
            made_by, progress: the command; called as ``progress(task, 1)`` after each group.
        """
        found = _tool("learn").observe(groups, encode, token_texts, agree, progress)
        return replace(found, task=task or found.task, made_by=made_by)  # type: ignore[no-any-return]

    def merge(self, *others: RecipePack | Misses) -> RecipePack:
        """One pack of several, and of where their tokens were refuted; see `recipes/README.md`."""
        merged: RecipePack = _tool("merge").merge([self, *others])
        return merged

    def report(
        self,
        outputs: Iterable[tuple[str, str, str]],
        encode: Encode,
        token_texts: TokenTexts,
        num_draft_tokens: int = 16,
        *,
        misses: Misses | None = None,
        progress: Callable[[str, int], None] | None = None,
        draft_model: Any = None,
    ) -> Any:
        """Replay outputs with this pack alone, and with a drafter that has the context as well.

        Args:
            outputs: ``(task, prompt, output)`` each; encode, token_texts: as in `tokenize`; num_draft_tokens: K.
            misses: counts what was refuted and accepted with the pack alone.
            progress: called as ``progress(task, 1)`` after each output.
            draft_model: a `DraftModelTokenPredictor` to replay them with as well.
        """
        recipes = self.tokenize(encode, token_texts)
        return _tool("report").report(
            recipes, outputs, encode, num_draft_tokens, misses, progress, draft_model
        )


def _tool(name: str) -> Any:
    """A module of `gpu_align.tools.recipes`. By name: the core imports no tool."""
    return importlib.import_module(f"gpu_align.tools.recipes.{name}")


class Miss(NamedTuple):
    """Where a recipe's token was checked. Contexts are in reading order, of `MAX_CONTEXT` items at most.

    The last three say the same of the beginning of the draft; empty and -1 where this token was its first.
    """

    literal: tuple[int, ...]  # the last tokens, prompt included; none where only shapes are kept
    shape: tuple[int, ...]
    expected: int  # the token that was drafted
    said: int  # what the model wrote; `expected` where the token was accepted
    literal_start: tuple[int, ...] = ()
    shape_start: tuple[int, ...] = ()
    first: int = -1


@dataclass(eq=False, repr=False)
class Misses:
    """How often which recipe token was refuted, or accepted, behind which contexts."""

    tokenizer: str = ""  # `fingerprint` of the one that the ids are of
    shapes_only: bool = False  # hold no literal contexts, so that no text of a request is
    made_by: str = ""
    counts: Counter[Miss] = field(default_factory=Counter)
    left_out: int = 0  # misses that were not held, because `MAX_MISSES` others are

    def __len__(self) -> int:
        return len(self.counts)

    def count(self, miss: Miss, count: int = 1) -> bool:
        """Count it so often. Returns whether it is held."""
        if self.shapes_only:
            miss = miss._replace(literal=(), literal_start=())
        if count < 1 or not (miss.literal or miss.shape):
            return False
        if miss not in self.counts and len(self.counts) >= MAX_MISSES:
            self.left_out += count
            return False
        self.counts[miss] += count
        return True

    def head(self) -> bytes:
        """The first line of a file that grows; behind it `line_of` each miss, as often as it is counted."""
        about = {"kind": "misses", "tokenizer": self.tokenizer, "made_by": self.made_by}
        return json_text({"format": LINES_FORMAT, **about}) + b"\n"

    def save(self, path: Path | str) -> None:
        """Write them for this user alone, at once or not at all; gzipped if the name ends in ``.gz``."""
        rows = sorted((*miss, count) for miss, count in self.counts.items())
        data = {"tokenizer": self.tokenizer, "made_by": self.made_by, "misses": rows}
        write_file(Path(path), with_hash("misses", data), 0o600)

    @classmethod
    def load(cls, path: Path | str) -> Misses:
        """Read a file of misses. PackError says why it is none."""
        misses: Misses = read_file(Path(path), "misses")
        return misses


def count_misses(
    misses: Misses,
    before: Sequence[int],
    num_output: int,
    draft: Sequence[int],
    wrote: Sequence[int],
    shape_of: npt.NDArray[np.signedinteger[Any]] | None,
    accepted_count: int = 1,
) -> None:
    """Count a recipe's draft that was verified.

    Its first tokens are accepted, `accepted_count` times, up to the one that is refuted; no more are counted.

    Args:
        before: the tokens before the draft, prompt and output; the last `SHAPE_WINDOW` + 1 of them are enough.
        num_output: how many of the output's tokens are before the draft.
        draft, wrote: what was drafted, and what the model wrote from there on, accepted tokens and its own.
        shape_of: [V], `Recipes.shape_of`; None where there are no shapes.
        accepted_count: 0 leaves accepted tokens out. To count one draft in n, give n for it and 0 for the others.

    On the host, about 10 µs for each token that is counted.
    """
    checked = min(len(draft), len(wrote))
    accepted = next((k for k in range(checked) if draft[k] != wrote[k]), checked)
    tokens = [int(token) for token in before[-(SHAPE_WINDOW + 1) :]]
    end, output = len(tokens), min(num_output, len(tokens))
    tokens += [int(token) for token in draft[:accepted]]

    def contexts(k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The last tokens before draft token k, and their shape."""
        behind = tokens[: end + k]
        shape = [] if shape_of is None else shape_of_output(behind[end - output :], shape_of)
        return tuple(behind[-MAX_CONTEXT:]), tuple(shape[::-1])

    for k in range(accepted if accepted_count else 0):
        misses.count(Miss(*contexts(k), tokens[end + k], tokens[end + k]), accepted_count)
    if accepted < checked:
        start = (*contexts(0), int(draft[0])) if accepted else ()
        misses.count(Miss(*contexts(accepted), int(draft[accepted]), int(wrote[accepted]), *start))


def read_file(path: Path, *kinds: str) -> Any:
    """Read a file of one of these kinds; PackError tells why it is none, of the first of them."""
    with path.open("rb") as file:
        text = packed = file.read(MAX_BYTES + 1)
    try:
        if len(packed) <= MAX_BYTES and packed.startswith(_GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
                text = file.read(MAX_BYTES + 1)
        if max(len(packed), len(text)) > MAX_BYTES:
            raise PackError(f"expected at most {MAX_BYTES} bytes, found more")
        if text.startswith(_LINES):
            head, *lines = text.split(b"\n")[:-1]  # without a last line that a killed process began
            data = {**json.loads(head), "lines": list(map(json.loads, lines))}
        else:
            data = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise PackError(f"{path}: expected JSON, plain or gzipped ({_first_line(error)})") from error
    kind = data.get("kind") if type(data) is dict else None
    expected = kind if kind in kinds else kinds[0]
    what, formats = KINDS[expected]
    try:
        if type(data) is not dict:
            raise PackError(f"expected an object, found {shown(data)}")
        if data.get("kind", "pack") != expected:
            raise PackError(f"found {shown(kind)}")
        number = data.get("format")
        if type(number) is not int or number not in formats:
            raise PackError(f"found format {shown(number)}")
        if number == FORMAT:
            _check_hash(data, text)
        return (parse_pack if expected == "pack" else parse_misses)(data)
    except PackError as error:
        numbers = " or ".join(map(str, formats))
        raise PackError(f"{path}: expected {what} of format {numbers} ({error})") from error


def write_file(path: Path, data: dict[str, Any], mode: int = 0o666) -> None:
    """Write the file at once or not at all; gzipped if its name ends in ``.gz``. mode: as in `write_at_once`."""
    content = json_text(data)
    write_at_once(path, [gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content], mode)


def write_at_once(path: Path, parts: Iterable[bytes], mode: int = 0o666) -> None:
    """Write the file at once or not at all. mode: its permissions from its first byte on, less the umask."""
    passing = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    passing.unlink(missing_ok=True)  # of a process that ended while it wrote
    try:
        # What somebody puts there meanwhile, a link as well, is not written to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(passing, flags, mode), "wb") as file:
            file.writelines(parts)
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)


def with_hash(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a file, with what stands before it."""
    data = {"format": FORMAT, "kind": kind, **data}
    return {"format": FORMAT, "kind": kind, "content_hash": _hash(data), **data}


def _check_hash(data: dict[str, Any], text: bytes) -> None:
    """Whether not a byte of the text differs from what was written."""
    said = data.get("content_hash")
    try:
        found = _hash({key: value for key, value in data.items() if key != "content_hash"})
        same = json_text(data) == text
    except (ValueError, RecursionError) as error:  # numbers and characters that are in no file of ours
        raise PackError(f"content_hash: the file was changed ({_first_line(error)})") from error
    if said != found or not same:
        named = said if type(said) is str and len(said) == len(found) else shown(said)
        raise PackError(f"content_hash: the file was changed: expected {named}, found {found}")


def _hash(data: dict[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(json_text(data, sort_keys=True)).hexdigest()}"


def json_text(data: Any, sort_keys: bool = False) -> bytes:
    """JSON in one line, as in all files."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, sort_keys=sort_keys, allow_nan=False)
    return text.encode()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def parse_pack(data: dict[str, Any]) -> RecipePack:
    """A pack of format 1 or 2."""
    words: dict[str, int] = {}
    for i, entry in enumerate(list_of(data, "words")):
        is_word = type(entry) is list and len(entry) == 2 and is_text(entry[0]) and entry[0]
        expect(is_word, f"words[{i}]", "a word and a count", entry)
        expect(entry[0] not in words, f"words[{i}]", "each word once", entry[0], "again")
        words[entry[0]] = count_of(f"words[{i}]", entry[1])
    names = list(words)
    recipes = [_recipe(f"recipe {i}", names, entry) for i, entry in enumerate(list_of(data, "recipes"))]
    calibration = list_of(data, "calibration")
    is_offsets = len(calibration) == NUM_BINS and all(
        type(number) in (int, float) and -1 <= number <= 1 for number in calibration
    )
    expect(is_offsets, "calibration", f"{NUM_BINS} numbers from -1 to 1", calibration)
    pack = RecipePack(words, recipes, tuple(map(float, calibration)), text_of(data, "made_by"))
    if data["format"] == 1:
        return pack
    kept = list_of(data, "kept")
    expect(all(is_token(token) for token in kept), "kept", "token ids", kept)
    expect(all(a < b for a, b in pairwise(kept)), "kept", "each token once, ascending", kept)
    observed: dict[tuple[bool, tuple[int, ...]], Observed] = {}
    for i, entry in enumerate(list_of(data, "observed")):
        one = _observed(f"observed[{i}]", entry)
        key = one.is_shape, one.context
        expect(key not in observed, f"observed[{i}]", "each context once", entry, "again")
        observed[key] = one
    tokenizer = text_of(data, "tokenizer")
    what = "the fingerprint of the one that the token ids are of"
    if (observed or kept) and not tokenizer:
        raise PackError(f"tokenizer: expected {what}, found none")
    task = text_of(data, "task")
    return replace(pack, task=task, tokenizer=tokenizer, observed=tuple(observed.values()), kept=tuple(kept))


def line_of(miss: Miss, count: int) -> bytes:
    """A line of a file that grows."""
    return json_text((*miss, count)) + b"\n"


def parse_misses(data: dict[str, Any]) -> Misses:
    """A file of misses; the counts of one that stands there again add up."""
    counts: Counter[Miss] = Counter()
    kind = "lines" if data["format"] == LINES_FORMAT else "misses"
    for i, row in enumerate(list_of(data, kind)):
        name = f"{kind}[{i}]"
        expect(type(row) is list and len(row) == 8, name, "8 values", row)
        literal, shape, expected, said, literal_start, shape_start, first, count = row
        literal, shape, literal_start, shape_start = (
            items_of(name, context, is_shape, least=0)
            for context, is_shape in ((literal, 0), (shape, 1), (literal_start, 0), (shape_start, 1))
        )
        is_known = is_token(expected) and is_token(said) and is_token(first, -1)
        expect(is_known, name, "token ids", [expected, said, first])
        miss = Miss(literal, shape, expected, said, literal_start, shape_start, first)
        counts[miss] = count_of(name, counts[miss] + count_of(name, count))
    return Misses(text_of(data, "tokenizer"), made_by=text_of(data, "made_by"), counts=counts)


def _recipe(name: str, names: Sequence[str], entry: Any) -> Recipe:
    expect(type(entry) is list and len(entry) >= 2, name, "two counts and words", entry)
    hits, seen, *numbers = entry
    is_known = all(type(number) is int and 0 <= number < len(names) for number in numbers)
    what = f"2 to {MAX_WORDS + 1} numbers of the {len(names)} words"
    expect(is_known and 2 <= len(numbers) <= MAX_WORDS + 1, name, what, numbers)
    *context, word = (names[number] for number in numbers)
    return Recipe(tuple(context), word, *_hits_of(name, hits, seen, least=1))


def _observed(name: str, entry: Any) -> Observed:
    is_entry = type(entry) is list and len(entry) >= 6
    expect(is_entry, name, "a kind, a token, three counts and a context", entry)
    kind, token, hits, seen, groups, *context = entry
    expect(type(kind) is int and kind in (0, 1), name, "kind 0 or 1", kind)
    expect(is_token(token, -1), name, "a token id or -1", token)
    items = items_of(name, context, kind, least=1)
    return Observed(
        bool(kind), items, token, *_hits_of(name, hits, seen, least=0), count_of(name, groups, least=0)
    )


def _hits_of(name: str, hits: Any, seen: Any, least: int) -> tuple[int, int]:
    if count_of(name, hits, least) > count_of(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    return hits, seen


def expect(is_right: Any, name: str, expected: str, found: Any, more: str = "") -> None:
    """Refuse a value of a file that is not right."""
    if not is_right:
        raise PackError(f"{name}: expected {expected}, found {shown(found)}{more and ' ' + more}")


def shown(found: Any) -> str:
    """One short line, however large it is."""
    text = _REPR.repr(found)
    return text if len(text) <= 120 else f"{text[:117]}..."


def items_of(name: str, context: Any, is_shape: int, least: int) -> tuple[int, ...]:
    """A context: token ids, or items of a shape."""
    is_known = type(context) is list and all(
        is_token(item) or (type(item) is int and is_shape == 1 and item in _CLASSES) for item in context
    )
    what = "items of a shape" if is_shape else "token ids"
    is_right = is_known and least <= len(context) <= MAX_CONTEXT
    expect(is_right, name, f"{least} to {MAX_CONTEXT} {what}", context)
    return tuple(context)


def list_of(data: dict[str, Any], name: str) -> list[Any]:
    expect(type(data.get(name)) is list, name, "a list", data.get(name))
    return data[name]  # type: ignore[no-any-return]


def text_of(data: dict[str, Any], name: str) -> str:
    expect(is_text(data.get(name)), name, "a text", data.get(name))
    return str(data[name])


def count_of(name: str, number: Any, least: int = 1) -> int:
    expect(type(number) is int and least <= number <= MAX_COUNT, name, "a count", number)
    return int(number)


def is_token(found: Any, least: int = 0) -> bool:
    return type(found) is int and least <= found < MAX_TOKEN


def is_text(found: Any) -> bool:
    """Whether it is a text that a tokenizer can read: JSON can write halves of characters."""
    return type(found) is str and not _HALF.search(found)
