"""Recipe packs and their files, of which nothing is trusted."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from ..ops import files
from ..ops.errors import check_type
from ..ops.recipes import MAX_CONTEXT
from ..ops.recipes.table import SHAPE_ITEMS, Recipes, concatenated
from .tokenize import Chains, Encode, Observed, Recipe, TokenTexts, fingerprint, shape_of_tokens, tokenize

#: The pack that comes with the library.
SHIPPED = Path(__file__).with_name("base.json.gz")
#: The most words of a recipe's context.
MAX_WORDS = 3
#: What a file says of itself.
FORMAT, KIND = 2, "pack"


class PackError(ValueError):
    """A file is not a recipe pack, or a pack does not fit."""


@dataclass(frozen=True, repr=False)
class RecipePack:
    """Likely continuations: in words, for any tokenizer, and in the tokens of one."""

    words: Mapping[str, int]  # how often each was seen
    recipes: Sequence[Recipe]  # by context, shorter ones first
    #: [files.NUM_BINS], added to a probability in the middle of a bin; interpolated between middles.
    calibration: Sequence[float] = (0.0,) * files.NUM_BINS
    made_by: str = ""  # the command
    task: str = ""  # what it was observed in
    tokenizer: str = ""  # the `fingerprint` of the tokenizer whose ids it holds, if it holds any
    observed: Sequence[Observed] = ()  # by falling frequency
    kept: Sequence[int] = ()  # the ids that stay themselves in shapes, ascending: keywords and punctuation

    @classmethod
    def load(cls, path: Path | str | None = None) -> RecipePack:
        """Read a pack, plain or gzipped; None stands for the one that comes with the library.

        At most `files.MAX_BYTES` of the file and of its text are read. PackError: it is no pack, or was changed.
        """
        check_type("path", path, str | Path | None, "a str or Path")
        file = SHIPPED if path is None else Path(path)
        try:
            text, data = files.read_json(file)
            files.expect(data.get("kind", KIND) == KIND, "kind", KIND, data.get("kind"))
            files.expect(data.get("format") == FORMAT, "format", str(FORMAT), data.get("format"))
            _check_hash(data, text)
            return parse_pack(data)
        except ValueError as error:
            raise PackError(f"{file}: expected a recipe pack of format {FORMAT} ({error})") from error

    def save(self, path: Path | str) -> None:
        """Write the pack, gzipped if the name ends in ``.gz``; the same pack is the same bytes."""
        content, path = files.json_text(self._data()), Path(path)
        files.write_at_once(path, [gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content])

    @property
    def content_hash(self) -> str:
        """``"sha256:…"`` over all that its file holds besides."""
        return str(self._data()["content_hash"])

    def _data(self) -> dict[str, Any]:
        number = {word: i for i, word in enumerate(self.words)}
        recipes = [[r.hits, r.seen, *(number[word] for word in (*r.context, r.word))] for r in self.recipes]
        observed = [[int(e.is_shape), e.token, e.hits, e.seen, e.groups, *e.context] for e in self.observed]
        data = {
            "format": FORMAT,
            "kind": KIND,
            "content_hash": "",
            "task": self.task,
            "tokenizer": self.tokenizer,
            "made_by": self.made_by,
            "calibration": list(self.calibration),
            "words": [[word, count] for word, count in self.words.items()],
            "recipes": recipes,
            "kept": list(self.kept),
            "observed": observed,
        }
        return {**data, "content_hash": _hash(data)}

    def tokenize(self, encode: Encode, token_texts: TokenTexts | None = None) -> Recipes:
        """The pack in the tokens of one model, as `gpu_align.Drafter` takes it.

        Args:
            encode: gives the token ids of each text, without special tokens.
            token_texts: the text of each token id; needed where something was observed (TypeError without it). It
                is asked for all ids from 0 on until it raises an error or has no more texts.

        A recipe is left out where the tokenizer joins the end of its context and its word into one token.
        PackError: the pack holds ids of another tokenizer.
        """
        words = tokenize(self.words, self.recipes, self.calibration, encode)
        if not self.observed:
            return words
        if (found := fingerprint(encode)) != self.tokenizer:
            expected = f"{self.tokenizer}, as the pack was observed with"
            raise PackError(f"tokenizer: expected {expected}, found {found}")
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
        return Recipes(**concatenated([literal, words, shapes]), shape_of=shape_of, indents=words.indents)


def _check_hash(data: dict[str, Any], text: bytes) -> None:
    """Refuse a text of which a byte differs from what was written."""
    try:
        found = _hash(data)
        same = files.json_text(data) == text
    except (ValueError, RecursionError) as error:  # numbers and characters that are in no file of ours
        raise ValueError(f"content_hash: the file was changed: {files.first_line(error)}") from error
    if (said := data.get("content_hash")) != found or not same:
        named = said if type(said) is str and len(said) == len(found) else files.shown(said)
        raise ValueError(f"content_hash: the file was changed: expected {named}, found {found}")


def _hash(data: dict[str, Any]) -> str:
    return f"sha256:{files.content_hash(data, 'content_hash')}"


class WordCount(NamedTuple):
    """A word of a pack's file."""

    word: Annotated[files.Text, files.Domain("a word", bool)]
    times: files.Count


@dataclass
class PackFile:
    """A pack as its file has it; `README.md` describes each field."""

    words: list[WordCount]
    recipes: list[list[int]]
    calibration: files.Calibration
    kept: list[files.TokenId]
    observed: list[list[int]]
    made_by: files.Text = ""
    task: files.Text = ""
    tokenizer: files.Text = ""


def parse_pack(data: dict[str, Any]) -> RecipePack:
    """The pack of a file's data; ValueError for a value that is not right."""
    file: PackFile = files.checked(PackFile, data)
    words = dict(file.words)
    files.expect(len(words) == len(file.words), "words", "each word once", [word for word, _ in file.words])
    names, recipes = list(words), []
    for i, row in enumerate(file.recipes):
        hits, seen, *numbers = row if len(row) > 3 else [0, 0]
        is_right = 1 <= hits <= seen <= files.MAX_COUNT and 2 <= len(numbers) <= MAX_WORDS + 1
        if not is_right or min(numbers) < 0 or max(numbers) >= len(names):
            expected = f"hits, how often it was seen, and 2 to {MAX_WORDS + 1} of the {len(names)} words"
            files.expect(False, f"recipes[{i}]", expected, row)
        *context, word = (names[number] for number in numbers)
        recipes.append(Recipe(tuple(context), word, hits, seen))
    files.expect(all(a < b for a, b in pairwise(file.kept)), "kept", "each token once, ascending", file.kept)
    observed: dict[tuple[bool, tuple[int, ...]], Observed] = {}
    expected = f"a kind, a token, hits, seen, groups and 1 to {MAX_CONTEXT} items of a context, each once"
    for i, row in enumerate(file.observed):
        kind, token, hits, seen, groups, *items = row if len(row) > 5 else [-1] * 5
        key = bool(kind), tuple(items)
        are_counts = 0 <= hits <= seen <= files.MAX_COUNT and seen > 0 and 0 <= groups <= files.MAX_COUNT
        are_items = all(0 <= item < files.MAX_TOKEN or (kind == 1 and item in SHAPE_ITEMS) for item in items)
        is_context = are_items and 1 <= len(items) <= MAX_CONTEXT and key not in observed
        is_right = are_counts and is_context and kind in (0, 1) and -1 <= token < files.MAX_TOKEN
        files.expect(is_right, f"observed[{i}]", expected, row)
        observed[key] = Observed(*key, token, hits, seen, groups)
    is_known = file.tokenizer or not (file.observed or file.kept)
    files.expect(is_known, "tokenizer", "the fingerprint of the ids' tokenizer", file.tokenizer)
    return RecipePack(
        words, recipes, tuple(map(float, file.calibration)), file.made_by, file.task, file.tokenizer,
        tuple(observed.values()), tuple(file.kept),
    )  # fmt: skip
