"""A recipe pack from one's own traffic, and the parts of the traffic that it is tried on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...ops.recipe_lookup import Recipes, RecipeTable
from ...recipes.pack import NUM_BINS, RecipePack
from ..simulate.policies import SHIPPED_PACK, tokenized_pack
from ..simulate.records import Record
from ..simulate.tokenizers import TextTokenizer, load_tokenizer
from .fit import NUM_DRAFT_TOKENS, rising

#: Parts of the requests, of which each is replayed with what the others taught.
NUM_PARTS = 4
#: The calibration of the shipped pack counts as so many drafts of each bin.
PRIOR = 30
MADE_BY = "gpu-align tune"


def key_of(record: Record) -> str:
    """The same for requests with the same prediction: they are about the same text."""
    return hashlib.sha256(np.array(record.prediction, dtype=np.int64).tobytes()).hexdigest()


def in_parts(records: Sequence[Record]) -> list[list[Record]]:
    """Up to `NUM_PARTS`; requests with the same prediction are in the same one."""
    keys = [key_of(record) for record in records]
    part_of = {key: i % NUM_PARTS for i, key in enumerate(sorted(set(keys)))}
    return [
        [record for record, key in zip(records, keys, strict=True) if part_of[key] == part]
        for part in sorted(set(part_of.values()))
    ]


class Tokens:
    """A tokenizer, as packs and requests need it; `name` loads it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.name = tokenizer.name
        self._tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def of(cls, records: Iterable[Record], name: str | None) -> Tokens:
        """The tokenizer of these requests, which they name, or else `name`; ValueError where that is not one."""
        names: set[str] = set()
        highest = -1
        for record in records:
            found = record.tokenizer or name
            if found is None:
                raise ValueError(
                    f"--pack: expected --tokenizer, as request {record.id[:40]!r} has token ids and no texts"
                )
            names.add(found)
            highest = max(highest, *record.prediction, *record.output)
        if len(names) != 1:
            found = " and ".join(sorted(names)[:2]) or "none"
            raise ValueError(f"--pack: expected requests of one tokenizer, found {found}")
        tokenizer = load_tokenizer(names.pop())
        if highest >= tokenizer.vocab_size:
            raise ValueError(
                f"--tokenizer: expected the one of the requests, which have token {highest}, "
                f"found {tokenizer.name} with {tokenizer.vocab_size} tokens"
            )
        return cls(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text) for text in texts]

    def text(self, ids: Iterable[int]) -> str:
        """The text of these tokens, without special ones."""
        return b"".join(map(self._piece, ids)).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._tokenizer.token_bytes(token)
            # A special token is shown as its name, which stands for other tokens where it is text.
            named = len(piece) > 2 and (piece[:1], piece[-1:]) in ((b"<", b">"), (b"[", b"]"))
            if named and self._tokenizer.encode(piece.decode("utf-8", "replace"))[-1:] != [token]:
                piece = b""
            self._pieces[token] = piece
        return piece


#: The parts share the tables of the recipes that they are replayed with.
_table_of = lru_cache(maxsize=2 * NUM_PARTS)(RecipeTable.build)


class Part(NamedTuple):
    """Requests, and the recipes that they are replayed with."""

    records: Sequence[Record]
    recipes: Recipes | None = None  #: of several packs, the requests' own first
    counts: RecipeTable | None = None  #: the own pack by its counts alone, not calibrated

    def table(self, min_survival: float) -> RecipeTable | None:
        """The recipes as a step looks them up."""
        recipes = self.recipes
        return None if recipes is None else _table_of(recipes, NUM_DRAFT_TOKENS, "cpu", min_survival)


class OwnPack:
    """A pack of some requests, in front of the shipped one.

    No request is replayed with what it taught: `parts` has a pack for each part of the requests, learned from the
    other parts. calibration: of the own packs; at first that of the shipped one.
    """

    def __init__(self, records: Sequence[Record], tokens: Tokens) -> None:
        self._tokens = tokens
        self.calibration = list(RecipePack.load().calibration)
        self._prior = np.array(self.calibration)
        self.shipped = tokenized_pack(SHIPPED_PACK, tokens.name)
        texts = [(key_of(r), tokens.text(ids)) for r in records for ids in (r.prediction, r.output)]
        self._pack = _learn(texts)
        self._records = in_parts(records)
        inside = [{key_of(record) for record in part} for part in self._records]
        self._packs = [_learn([text for text in texts if text[0] not in part]) for part in inside]

    @property
    def pack(self) -> RecipePack:
        """What is learned from all of them, calibrated."""
        return self._pack.calibrated(self.calibration)

    def joined(self, pack: RecipePack) -> Recipes:
        """A pack, and behind it the shipped one."""
        return Recipes.join({"own": pack.tokenize(self._tokens.encode), "base": self.shipped})

    def parts(self) -> list[Part]:
        """The requests in parts, each with the recipes of the others."""
        parts = []
        for pack, records in zip(self._packs, self._records, strict=True):
            counts = pack.calibrated([0.0] * NUM_BINS).tokenize(self._tokens.encode)
            table = RecipeTable.build(counts, NUM_DRAFT_TOKENS, "cpu") if len(counts) else None
            parts.append(Part(records, self.joined(pack.calibrated(self.calibration)), table))
        return parts

    def calibrate(self, counted: npt.NDArray[np.float64]) -> None:
        """Take over how many drafts were accepted by what the counts promised, `counted` of all parts."""
        offsets = (counted[1] + PRIOR * self._prior) / (counted[0] + PRIOR)
        self.calibration = rising(offsets)


def _learn(texts: Sequence[tuple[str, str]]) -> RecipePack:
    """Each text once; what only one request writes is left out."""
    return RecipePack.learn(sorted(set(texts)), made_by=MADE_BY)
