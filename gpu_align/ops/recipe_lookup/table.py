"""Recipes as tokens, and the table that a step looks them up in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import constants as c
from ..draft.tables import survival_units

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, repr=False)
class Recipes:
    """R recipes: what to draft after which tokens. Two are equal only if they are the same one.

    Attributes:
        context: [R, MAX_CONTEXT] int32: the last tokens that a recipe applies after, the very last one first;
            -1 behind them. Distinct.
        token_ids: [R, MAX_TOKENS] int32: the continuation; -1 behind it. Where it is empty nothing is drafted,
            whatever a shorter context says.
        survival: [R, MAX_TOKENS] float32: probability that the first k of them are all accepted; 0 behind them.
    """

    context: IntArray
    token_ids: IntArray
    survival: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.context)

    def __repr__(self) -> str:
        """One line: how many."""
        return f"Recipes(num_recipes={len(self)})"

    @classmethod
    def from_lists(cls, recipes: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> Recipes:
        """Recipes of one's own: ``(context, continuation, survival)`` each, the context in reading order.

        Raises:
            ValueError: a context that is empty, too long or there twice; a continuation that is too long; a
                token that is no id; survival that is not from 0 to 1, rises, or of another length.
        """
        rows = list(recipes)
        context = np.full((len(rows), c.MAX_CONTEXT), -1, dtype=np.int32)
        token_ids = np.full((len(rows), c.MAX_TOKENS), -1, dtype=np.int32)
        survival = np.zeros((len(rows), c.MAX_TOKENS), dtype=np.float32)
        taken = set()
        for i, (before, after, alive) in enumerate(rows):
            if not 1 <= len(before) <= c.MAX_CONTEXT:
                raise ValueError(
                    f"recipe {i}: expected a context of 1 to {c.MAX_CONTEXT} tokens, found {len(before)}"
                )
            if len(after) > c.MAX_TOKENS:
                raise ValueError(f"recipe {i}: expected at most {c.MAX_TOKENS} tokens, found {len(after)}")
            if bad := [t for t in (*before, *after) if not 0 <= t < 1 << 31]:
                raise ValueError(f"recipe {i}: expected token ids, found {bad[0]}")
            if tuple(before) in taken:
                raise ValueError(f"recipe {i}: the context {list(before)} is there twice")
            limits = [1.0, *alive]
            falls = all(0 <= b <= a for a, b in pairwise(limits))
            if len(alive) != len(after) or not falls:
                raise ValueError(
                    f"recipe {i}: expected {len(after)} probabilities from 1 down to 0 that never rise, "
                    f"found {list(alive)}"
                )
            taken.add(tuple(before))
            context[i, : len(before)] = before[::-1]
            token_ids[i, : len(after)] = after
            survival[i, : len(after)] = alive
        return cls(context, token_ids, survival)


class RecipeArrays(NamedTuple):
    """`RecipeTable` as NumPy sees it."""

    keys: npt.NDArray[np.signedinteger[Any]]
    rows: npt.NDArray[np.signedinteger[Any]]
    max_draft_len: npt.NDArray[np.signedinteger[Any]]
    expected_accepted: npt.NDArray[np.signedinteger[Any]]
    token_ids: npt.NDArray[np.signedinteger[Any]]
    confidence: npt.NDArray[np.float32]


class RecipeTable(NamedTuple):
    """R recipes as a step looks them up, for one drafter's K and threshold."""

    #: [buckets, RECIPE_WAYS] int32: `keys_of` the contexts, `NO_KEY` where there is none.
    keys: torch.Tensor
    #: The same shape: which recipe it is.
    rows: torch.Tensor
    #: [R] int32, 0 to K: drafts that are likely enough.
    max_draft_len: torch.Tensor
    #: [R] int32 in units of 1/`SURVIVAL_ONE`: how many of them are expected to be accepted.
    expected_accepted: torch.Tensor
    #: [R, MAX_TOKENS] int32.
    token_ids: torch.Tensor
    #: [R, MAX_TOKENS] float32: P(token k is accepted | those before it are).
    confidence: torch.Tensor

    @property
    def num_recipes(self) -> int:
        """How many can be found."""
        return int((self.keys != c.NO_KEY).sum())

    @property
    def shift(self) -> int:
        """A key's upper bits are its bucket."""
        return c.KEY_BITS + 1 - len(self.keys).bit_length()

    def numpy(self) -> RecipeArrays:
        """The same memory as arrays; on the CPU only."""
        return RecipeArrays(*(tensor.numpy() for tensor in self))

    @classmethod
    def build(
        cls,
        recipes: Recipes | None,
        num_draft_tokens: int,
        device: torch.device | str,
        min_survival: float = 0.0,
        vocab_size: int = 1 << 31,
    ) -> RecipeTable:
        """The table of these recipes, or one in which nothing is found.

        Args:
            recipes: None is none.
            num_draft_tokens: K.
            device: where the tensors live.
            min_survival: drafting stops where the survival falls below this.
            vocab_size: and before a token that is not below this.
        """
        if recipes is None or not len(recipes):
            recipes = Recipes.from_lists([((0,), (), ())])
            held = np.zeros(0, dtype=np.int64)
        else:
            held = np.arange(len(recipes))
        keys, rows = _hash(keys_of(recipes.context[held]), held)
        units = np.rint(recipes.survival.astype(np.float64) * c.SURVIVAL_ONE).astype(np.int32)
        likely = (recipes.token_ids >= 0) & (recipes.token_ids < vocab_size)
        likely &= units >= max(survival_units(min_survival), 1)
        max_draft_len = np.minimum(np.cumprod(likely, axis=1).sum(axis=1), num_draft_tokens).astype(np.int32)
        within = np.arange(c.MAX_TOKENS) < max_draft_len[:, None]
        before = np.concatenate([np.full((len(units), 1), c.SURVIVAL_ONE), units[:, :-1]], axis=1)
        arrays = (
            keys,
            rows,
            max_draft_len,
            np.where(within, units, 0).sum(axis=1, dtype=np.int32),
            recipes.token_ids,
            np.where(within, units / np.maximum(before, 1), 0).astype(np.float32),
        )
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


def keys_of(context: IntArray) -> npt.NDArray[np.int64]:
    """[R]: the key of each context, [R, MAX_CONTEXT] with the last token first.

    ::

        key = KEY_SEED
        for token in context:    key = (key ^ token) * HASH mod 2**31
    """
    key = np.full(len(context), c.KEY_SEED, dtype=np.int64)
    for column in context.T.astype(np.int64):
        key = np.where(column < 0, key, ((key ^ column) * c.HASH) & 0x7FFFFFFF)
    return key


def _hash(keys: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> tuple[IntArray, IntArray]:
    """Keys and rows by bucket: as many buckets as keys at least, and more until each key has its place.

    Of two recipes with one key the first has it.
    """
    _, first = np.unique(keys, return_index=True)
    keys, rows = keys[np.sort(first)], rows[np.sort(first)]
    bits = max(len(keys), 1).bit_length()
    while True:
        bucket = keys >> (c.KEY_BITS - bits)
        order = np.argsort(bucket, kind="stable")
        way = np.arange(len(keys)) - np.searchsorted(bucket[order], bucket[order])
        if not (way >= c.RECIPE_WAYS).any():
            break
        bits += 1
    table = np.full((2, 1 << bits, c.RECIPE_WAYS), c.NO_KEY, dtype=np.int32)
    table[0, bucket[order], way], table[1, bucket[order], way] = keys[order], rows[order]
    return table[0], table[1]
