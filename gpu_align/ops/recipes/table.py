"""Recipes as tokens, and the table that a step looks them up in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import recipes as numbers
from ..choose import SURVIVAL_ONE, survival_units
from ..files import expect
from ..layout import HASH
from . import MAX_CONTEXT, MAX_TOKENS, RECIPE_WAYS, SHAPE_STRING

#: Packs that a drafter holds, bits of `ALL_PACKS`; bits of a key.
_MAX_PACKS = _KEY_BITS = 31
IntArray = npt.NDArray[np.int32]
#: A table has at most four times the buckets that its keys need, or ``1 << _SMALL_BITS`` where that is more.
_SMALL_BITS = 16
#: Of `Recipes`, what has a row for each.
_COLUMNS = "context", "token_ids", "survival", "is_shape", "packs"
#: Items of a shape that are no tokens.
SHAPE_ITEMS = range(numbers.SHAPE_START, numbers.SHAPE_IDENTIFIER + 1)
#: Held while a table is made: drafters that are made at once share one.
_lock = threading.Lock()


@dataclass(frozen=True, eq=False, repr=False)
class Recipes:
    """R recipes: what to draft after which tokens. Two are equal only if they are the same one.

    A recipe applies after a *literal context*, the last tokens as they are, or after a *shape*: the last tokens of
    the output, of which only those that structure a text stay themselves; see README.md.

    Attributes:
        context: [R, MAX_CONTEXT] int32: the last tokens, or items of a shape, that a recipe applies after, the
            very last one first; -1 after them. Distinct among those of one kind and one pack.
        token_ids: [R, MAX_TOKENS] int32: the continuation; -1 after it. Where it is empty nothing is drafted,
            whatever a shorter context says.
        survival: [R, MAX_TOKENS] float32: probability that the first k of them are all accepted; 0 after them.
        is_shape: [R] bool: whether the context is a shape; by default none is.
        packs: [R] int32: bit i: the recipe belongs to pack i; by default all belong to pack 0.
        names: of the packs, at most 31. The first of a request's packs that has a recipe decides.
        shape_of: [V] int32: the item of a shape that each token is: itself, or one of the classes
            `SHAPE_IDENTIFIER`, `SHAPE_NUMBER`, `SHAPE_SPACE` and `SHAPE_STRING`; also that of tokens from V on.
            None where there are no shapes.
        indents: [NUM_RUNS + V] int32: the token of each run of spaces or tabs, then what each token does to a
            line, 0 from V on; see `gpu_align.ops.compose`. None where nothing is known of that.
    """

    context: IntArray
    token_ids: IntArray
    survival: npt.NDArray[np.float32]
    is_shape: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    packs: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    names: tuple[str, ...] = ("",)
    shape_of: IntArray | None = None
    indents: IntArray | None = None
    _tables: dict[tuple[Any, ...], RecipeTable] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Fill in what was left out; ValueError for shapes without `shape_of`, or another number of packs."""
        if not len(self.is_shape):
            object.__setattr__(self, "is_shape", np.zeros(len(self.context), dtype=np.bool_))
        if not len(self.packs):
            object.__setattr__(self, "packs", np.ones(len(self.context), dtype=np.int32))
        if not 1 <= len(self.names) <= _MAX_PACKS:
            raise ValueError(f"names: expected 1 to {_MAX_PACKS} packs, found {len(self.names)}")
        if self.is_shape.any() and self.shape_of is None:
            raise ValueError("shape_of: expected the item of each token, as there are shapes, found None")

    def __len__(self) -> int:
        return len(self.context)

    @classmethod
    def from_lists(
        cls,
        recipes: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]],
        *,
        shape_of: IntArray | None = None,
    ) -> Recipes:
        """Recipes of one's own: ``(context, continuation, survival)`` each, the context in reading order.

        Args:
            recipes: with literal contexts, or with shapes where `shape_of` is given.
            shape_of: [V] int32: the item of a shape that each token is.

        ValueError: a context that is empty, too long or there twice; a continuation that is too long; a token that
        is no id; survival that is not from 0 to 1, rises, or of another length.
        """
        is_item = SHAPE_ITEMS if shape_of is not None else ()
        rows = list(recipes)
        context = np.full((len(rows), MAX_CONTEXT), -1, dtype=np.int32)
        token_ids = np.full((len(rows), MAX_TOKENS), -1, dtype=np.int32)
        survival = np.zeros((len(rows), MAX_TOKENS), dtype=np.float32)
        taken = set()
        for i, (before, after, alive) in enumerate(rows):
            where, ids = f"recipe {i}", (*(t for t in before if t not in is_item), *after)
            is_right = 1 <= len(before) <= MAX_CONTEXT
            expect(is_right, where, f"a context of 1 to {MAX_CONTEXT} tokens", len(before))
            expect(len(after) <= MAX_TOKENS, where, f"at most {MAX_TOKENS} tokens", len(after))
            for token in ids:
                expect(0 <= token < 1 << 31, where, "token ids", token)
            expect(tuple(before) not in taken, where, "each context once", list(before))
            falls = len(alive) == len(after) and all(0 <= b <= a for a, b in pairwise([1.0, *alive]))
            expect(falls, where, f"{len(after)} probabilities from 1 down to 0 that never rise", list(alive))
            taken.add(tuple(before))
            context[i, : len(before)] = before[::-1]
            token_ids[i, : len(after)] = after
            survival[i, : len(after)] = alive
        return cls(context, token_ids, survival, np.full(len(rows), shape_of is not None), shape_of=shape_of)

    @classmethod
    def join(cls, packs: Mapping[str, Recipes]) -> Recipes:
        """Several packs as one, each under its name, in this order. A token that stays itself in the shapes of one
        pack does so in all. ValueError: no packs, more than 31, or one that holds several already."""
        if wrong := [name for name, recipes in packs.items() if len(recipes.names) != 1]:
            num = len(packs[wrong[0]].names)
            raise ValueError(f"packs: expected one pack each, found {num} in {wrong[0]!r}")
        each = list(packs.values())
        shapes = [recipes.shape_of for recipes in each if recipes.shape_of is not None]
        indents = [recipes.indents for recipes in each if recipes.indents is not None]
        columns = concatenated(each)
        columns["packs"] = np.repeat(1 << np.arange(len(each), dtype=np.int32), list(map(len, each)))
        return cls(
            **columns,
            names=tuple(packs),
            # A token that stays itself in one does so; the others are what the first that knows them says.
            shape_of=_joined(shapes[::-1], SHAPE_STRING, lambda here: here >= 0),
            # Packs of one tokenizer differ only in the line ends that they know.
            indents=_joined(indents, 0, lambda here: here != 0),
        )

    def table(
        self, num_draft_tokens: int, device: torch.device, min_survival: float, vocab_size: int = 1 << 31
    ) -> RecipeTable:
        """`RecipeTable.build` of these arguments, made once: it lives as long as the recipes, and is only read."""
        key = num_draft_tokens, device, min_survival, vocab_size
        with _lock:
            if key not in self._tables:
                self._tables[key] = RecipeTable.build(self, *key)
            return self._tables[key]

    def select(self, kept: npt.NDArray[np.bool_]) -> Recipes:
        """Those of them that are kept. kept: [R] bool."""
        return replace(self, **{name: getattr(self, name)[kept] for name in _COLUMNS})

    def pack_bits(self, names: Iterable[str] | None) -> int:
        """Bit i for each pack i that is named; None names all. ValueError for a name that no pack has."""
        if names is None:
            return numbers.ALL_PACKS
        bits = 0
        for name in names:
            if name not in self.names:
                known = ", ".join(map(repr, self.names))
                raise ValueError(f"recipes: expected names of {known}, found {name!r}")
            bits |= 1 << self.names.index(name)
        return bits


def concatenated(parts: Sequence[Recipes]) -> dict[str, Any]:
    """The rows of all parts, one after the other, as arguments of `Recipes`."""
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}


def _joined(
    parts: Sequence[IntArray], empty: int, is_kept: Callable[[IntArray], npt.NDArray[np.bool_]]
) -> IntArray | None:
    """One value for each token: that of the first part, and of further ones where it is not kept."""
    if not parts:
        return None
    joined = np.full(max(map(len, parts)), empty, dtype=np.int32)
    for part in parts:
        here = joined[: len(part)]
        here[:] = np.where(is_kept(here), here, part)
    return joined


class RecipeTable(NamedTuple):
    """R recipes as a step looks them up, for one drafter's K and threshold."""

    #: [buckets, RECIPE_WAYS] int64: in the upper half `keys_of` the context, in the lower one a bit for each pack
    #: with the recipe; -1 in an empty way.
    keys: torch.Tensor
    #: [buckets, RECIPE_WAYS, RECIPE_COLUMNS] int32: which recipe it is; 0 to K: drafts that are likely enough; in
    #: units of 1/`SURVIVAL_ONE`: how many of them are expected to be accepted.
    ways: torch.Tensor
    #: [R * MAX_TOKENS] int32.
    token_ids: torch.Tensor
    #: [R, MAX_TOKENS] float32: P(token k is accepted | those before it are).
    confidence: torch.Tensor
    #: [V + 1] int32: the item of a shape that each token is, the last for all from V on; [0] without shapes.
    shape_of: torch.Tensor
    #: [NUM_RUNS + V + 1] int32: the token of each run, then what each token does to a line, the last for all from
    #: V on; [0] where nothing is known of that.
    indents: torch.Tensor
    #: A key, shifted by this, is its bucket.
    shift: int
    #: V + 1, or 0 where there are no shapes; V + 1, or 0 where nothing is known of white space.
    num_shapes: int
    num_indents: int

    @classmethod
    def build(
        cls,
        recipes: Recipes,
        num_draft_tokens: int,
        device: torch.device | str,
        min_survival: float = 0.0,
        vocab_size: int = 1 << 31,
    ) -> RecipeTable:
        """The table of these recipes for K and for tensors on a device.

        min_survival: drafting stops where the survival falls below this; vocab_size: and before a token that is
        not below this. ValueError: 2**23 recipes or more, whose ways a kernel would not reach with 32 bits.
        """
        expect(len(recipes) < 1 << 23, "recipes", "fewer than 2**23", len(recipes))
        keys, rows = _hash(keys_of(recipes.context, recipes.is_shape), recipes.packs)
        units = np.rint(recipes.survival.astype(np.float64) * SURVIVAL_ONE).astype(np.int32)
        likely = (recipes.token_ids >= 0) & (recipes.token_ids < vocab_size)
        likely &= units >= max(survival_units(min_survival), 1)
        max_draft_len = np.minimum(np.cumprod(likely, axis=1).sum(axis=1), num_draft_tokens)
        within = np.arange(MAX_TOKENS) < max_draft_len[:, None]
        before = np.concatenate([np.full((len(units), 1), SURVIVAL_ONE), units[:, :-1]], axis=1)
        expected = np.where(within, units, 0).sum(axis=1)
        # A way without a recipe, row -1, has no drafts.
        num_drafts, accepted = (np.append(values, 0)[rows] for values in (max_draft_len, expected))
        shape_of = _and_beyond(recipes.shape_of if recipes.is_shape.any() else None, SHAPE_STRING)
        indents = _and_beyond(recipes.indents, 0)
        arrays = (
            keys,
            np.stack([rows, num_drafts, accepted, np.zeros_like(rows)], axis=2).astype(np.int32),
            recipes.token_ids.reshape(-1),
            np.where(within, units / np.maximum(before, 1), 0).astype(np.float32),
            shape_of,
            indents,
        )
        tensors = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
        # A key's upper bits are its bucket.
        shift = _KEY_BITS + 1 - len(keys).bit_length()
        return cls._make([*tensors, shift, len(shape_of), max(len(indents) - numbers.NUM_RUNS, 0)])


def keys_of(context: IntArray, is_shape: npt.NDArray[np.bool_] | bool = False) -> npt.NDArray[np.int64]:
    """[R]: the key of each context, [R, MAX_CONTEXT] with the last token or item first; see README.md."""
    shape = np.zeros(len(context), dtype=np.int64)
    key = shape + numbers.KEY_SEED
    for column in context.T.astype(np.int64):
        is_item = column != -1
        key = np.where(is_item, ((key ^ column) * HASH) & 0x7FFFFFFF, key)
        next_shape = ((shape + column + numbers.KEY_SEED) * numbers.SHAPE_HASH) & 0xFFFFFFFF
        shape = np.where(is_item, next_shape, shape)
    return np.where(is_shape, shape >> 1, key)


def _hash(keys: npt.NDArray[np.int64], packs: IntArray) -> tuple[npt.NDArray[np.int64], IntArray]:
    """Keys with packs, and rows by bucket: as many buckets as keys at least, and more until each has its place.
    A key that has none when the table may not grow any more is left out, last packs first.

    Of two recipes with one key the first has it, for the packs that it belongs to.
    """
    rows, packs = _first_of_each(keys, packs)
    keys, packs = keys[rows], packs[rows]
    least = max(len(keys), 1).bit_length()
    for bits in range(least, max(least + 2, _SMALL_BITS) + 1):
        bucket = keys >> (_KEY_BITS - bits)
        order = np.lexsort((packs & -packs, bucket))
        way = np.arange(len(keys)) - np.searchsorted(bucket[order], bucket[order])
        has_way = way < RECIPE_WAYS
        if has_way.all():
            break
    order = order[has_way]
    shape, place = (1 << bits, RECIPE_WAYS), (bucket[order], way[has_way])
    held, row_of = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int32)
    held[place], row_of[place] = (keys << 32 | packs)[order], rows[order]
    return held, row_of


def _first_of_each(keys: npt.NDArray[np.int64], packs: IntArray) -> tuple[npt.NDArray[np.int64], IntArray]:
    """Which recipes can be found, and for which packs, [R]; at most `RECIPE_WAYS` of a key, first packs first."""
    packs = np.array(packs)
    order = np.lexsort((np.arange(len(keys)), packs & -packs, keys))
    _, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        taken = num = 0
        for row in order[start : start + count]:
            packs[row] &= ~taken if num < RECIPE_WAYS else 0
            taken |= int(packs[row])
            num += bool(packs[row])
    return order[packs[order] != 0], packs


def _and_beyond(values: IntArray | None, beyond: int) -> IntArray:
    """The values, and one for all tokens beyond them; [0] without."""
    return np.zeros(0, dtype=np.int32) if values is None else np.append(values, beyond).astype(np.int32)
