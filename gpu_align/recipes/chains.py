"""Entries that were observed, and the runs that they make: an entry says one token, a chain of them says a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..ops.constants import MAX_CONTEXT, MAX_TOKENS, SHAPE_START, SHAPE_STRING

#: A run ends where all of it is less likely than this.
LEAST_RUN = 0.5
#: What an entry is believed: hits / (seen + `DOUBT`), as if it had been refuted that often already.
DOUBT = 0.25


class Observed(NamedTuple):
    """After `context`, `token` came `hits` times out of `seen`; in `groups` groups all samples agreed on it.

    Attributes:
        is_shape: whether the context is items of a shape instead of token ids.
        context: 1 to `MAX_CONTEXT` of them, in reading order.
        token: -1: nothing is drafted here, whatever a shorter context says.
    """

    is_shape: bool
    context: tuple[int, ...]
    token: int
    hits: int
    seen: int
    groups: int


class Run(NamedTuple):
    """The tokens that a chain drafts, and for each the probability of everything up to it."""

    tokens: list[int]
    survival: list[float]


class Chains:
    """Looks entries up as a step does, in what is known of the tokens so far.

    Args:
        entries: each context once of each kind.
        shape_of: the shape item of each token that the entries name.
    """

    def __init__(self, entries: Iterable[Observed], shape_of: Mapping[int, int]) -> None:
        self._says: tuple[dict[tuple[int, ...], Observed], ...] = {}, {}
        self._shape_of = shape_of
        for entry in entries:
            self.add(entry)

    def add(self, entry: Observed) -> None:
        """Look this one up, too, or instead of the one with its context."""
        self._says[entry.is_shape][entry.context] = entry

    def run(self, is_shape: bool, context: Sequence[int]) -> Run:
        """What a draft behind this context is, if nothing else is known.

        ::

            while fewer than MAX_TOKENS and survival >= LEAST_RUN:
                entry = the longest known literal context, else the longest known shape
                stop if there is none or it says nothing
                append its token to what is known
        """
        tokens, items = self._known(is_shape, context)
        run, alive = Run([], []), 1.0
        while len(run.tokens) < MAX_TOKENS:
            entry = _longest(tokens, self._says[False]) or _longest(items, self._says[True])
            if entry is None or entry.token < 0:
                break
            alive *= likely(entry)
            if alive < LEAST_RUN:
                break
            run.tokens.append(entry.token)
            run.survival.append(alive)
            tokens.append(entry.token)
            self._extend(items, entry.token)
        return run

    def _known(self, is_shape: bool, context: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids and shape items that this context tells, both in reading order."""
        if is_shape:
            free = next((i for i, item in enumerate(reversed(context)) if item < 0), len(context))
            return list(context[len(context) - free :]), list(context)
        items: list[int] = []
        for token in context:
            self._extend(items, token)
        return list(context), items

    def _extend(self, items: list[int], token: int) -> None:
        """The shape with one more token: free tokens in a row are one item, the class of the last one."""
        item = self._shape_of.get(token, SHAPE_STRING)
        if item < 0 and items and SHAPE_START < items[-1] < 0:
            items[-1] = item
        else:
            items.append(item)


def likely(entry: Observed) -> float:
    """The probability that the token of an entry is accepted."""
    return entry.hits / (entry.seen + DOUBT)


def _longest(known: Sequence[int], says: Mapping[tuple[int, ...], Observed]) -> Observed | None:
    for length in range(min(len(known), MAX_CONTEXT), 0, -1):
        entry = says.get(tuple(known[-length:]))
        if entry is not None:
            return entry
    return None
