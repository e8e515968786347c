"""Recipe speculative decoding: drafts from a table of what usually follows what."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_align.policies._sequence import SequencePolicy


class RecipeRows(Protocol):
    """`gpu_align.Recipes`, without what it imports."""

    @property
    def context(self) -> npt.NDArray[np.signedinteger[Any]]:
        """[R, tokens]: the last tokens that a recipe applies after, the very last one first; -1 behind them."""

    @property
    def token_ids(self) -> npt.NDArray[np.signedinteger[Any]]:
        """[R, tokens]: the continuation; -1 behind it."""

    @property
    def survival(self) -> npt.NDArray[np.floating[Any]]:
        """[R, tokens]: probability that the first k of them are all accepted."""


class RecipeLookup(SequencePolicy):
    """A lookup table and nothing else: the prediction is not used.

    ::

        tokens = prompt + output
        for n in longest context, …, 1:                  # the last n tokens
            if tokens[-n:] has a recipe:
                return its continuation, as far as survival >= min_survival

    The longest context decides, also where its continuation is empty or not likely enough. A continuation is as
    long as the table has it, a few tokens; its end is not looked up again.

    Args:
        recipes: the table, of `gpu_align.RecipePack.tokenize`.
        min_survival: drafting stops where the probability that all drafts up to here are accepted falls below
            this; 0 to 1.
        name: the name in reports.

    Cost: one dictionary probe for each length of a context, a step.

    Source: "Recipe speculative decoding", https://kolm.ai/articles/speculative-decoding-recipes. Its packs are
    collected from what a model writes and are not published; ours are learned from texts.
    """

    def __init__(self, recipes: RecipeRows, min_survival: float = 0.2, name: str = "recipe_pack") -> None:
        super().__init__(name)
        if not 0 <= min_survival <= 1:
            raise ValueError(f"min_survival: expected 0 <= p <= 1, got {min_survival}")
        lengths = (recipes.context >= 0).sum(axis=1)
        likely = (recipes.token_ids >= 0) & (recipes.survival >= min_survival)
        drafts = np.cumprod(likely, axis=1).sum(axis=1)
        # The context in reading order -> what to draft.
        self._continuations: dict[tuple[int, ...], list[int]] = {}
        contexts, continuations = recipes.context.tolist(), recipes.token_ids.tolist()
        for context, length, tokens, count in zip(contexts, lengths, continuations, drafts, strict=True):
            self._continuations[tuple(context[length - 1 :: -1])] = tokens[:count]
        self._lengths = sorted(set(lengths.tolist()), reverse=True)
        self._longest = max(self._lengths, default=1)

    def _begin(self) -> None:
        self._tail = self._prompt[-self._longest :]

    def _advance(self, tokens: list[int]) -> None:
        self._tail = (self._tail + tokens)[-self._longest :]

    def _draft(self) -> list[int]:
        contexts = (tuple(self._tail[-length:]) for length in self._lengths)
        found = next((context for context in contexts if context in self._continuations), None)
        return [] if found is None else list(self._continuations[found])
