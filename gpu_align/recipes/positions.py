"""Every position of many samples at once: the contexts before it, as hashes, and what came after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.constants import MAX_CONTEXT, SHAPE_START, SHAPE_WINDOW

IntArray = npt.NDArray[np.signedinteger[Any]]
HashArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_SEED, _HASH, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD), np.uint64(32)


class Evidence(NamedTuple):
    """Where all samples of a group agree: E positions, those of a column side by side."""

    #: [E]: positions.
    position: IntArray
    #: [columns]: where each column begins among them.
    start: IntArray
    #: [groups]: a context that recurs in so many samples of a group counts as agreed, wherever they have it.
    recurring: IntArray


class Positions:
    """The positions of all samples: position p is the one before token p.

    Attributes:
        tokens: [N] int32, those of all samples, one after the other.
        begin: [N], where the sample of each begins.
        group: [N] int32, the group of each.
        sample: [N], the number of its sample, over all groups.
    """

    def __init__(self, groups: Sequence[Sequence[IntArray]]) -> None:
        samples = [(g, sample) for g, group in enumerate(groups) for sample in group]
        lengths = np.array([len(sample) for _, sample in samples], dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        empty = np.zeros(0, dtype=np.int32)
        self.tokens: npt.NDArray[np.int32] = np.concatenate([empty, *(sample for _, sample in samples)])
        self.begin: IntArray = np.repeat(first, lengths)
        self.group: IntArray = np.repeat(np.array([g for g, _ in samples], dtype=np.int32), lengths)
        self.sample: IntArray = np.repeat(np.arange(len(samples)), lengths)
        self._items = self._places = self._older = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def set_shapes(self, item_of: IntArray) -> None:
        """Say what the shape item of each token is; item_of: [N]."""
        # The stream: before each sample's tokens the item of its beginning.
        place = np.arange(len(self)) + self.sample + 1
        stream = np.full(len(self) + (int(self.sample[-1]) + 1 if len(self) else 0), SHAPE_START, np.int64)
        stream[place] = item_of
        # Of free tokens in a row the last one is an item of the shapes behind it.
        ended = (stream >= 0) | (stream == SHAPE_START)
        ended[:-1] |= stream[1:] >= 0
        self._items, self._places = stream, np.flatnonzero(ended)
        #: How many such items stand before the newest one.
        self._older = (np.cumsum(ended) - ended)[place - 1]

    def hashes(self, is_shape: bool) -> Iterator[tuple[HashArray, BoolArray]]:
        """For contexts of 1 to `MAX_CONTEXT` items, what stands for each, and whether there is one; both [N]."""
        key = np.full(len(self), _SEED)
        there = np.ones(len(self), dtype=np.bool_)
        for n in range(MAX_CONTEXT):
            item, found = self._item(is_shape, np.arange(len(self)), n)
            there = there & found
            key = (key ^ item.astype(np.uint64)) * _HASH
            key ^= key >> _MIX
            yield key, there

    def contexts(self, is_shape: bool, positions: IntArray, length: int) -> IntArray:
        """[positions, length]: the contexts before these, in reading order."""
        items = [self._item(is_shape, positions, n)[0] for n in range(length)]
        return np.stack(items[::-1], axis=1) if items else np.zeros((len(positions), 0), dtype=np.int64)

    def _item(self, is_shape: bool, positions: IntArray, n: int) -> tuple[IntArray, BoolArray]:
        """The n-th item before each of these positions, 0 is the newest, and whether there is one."""
        if not is_shape:
            place = positions - 1 - n
            return self.tokens[np.maximum(place, 0)].astype(np.int64), place >= self.begin[positions]
        newest = positions + self.sample[positions]  # in the stream
        place = newest
        if n:
            older = self._older[positions] - n
            place = self._places[np.maximum(older, 0)]
            place = np.where(older >= 0, place, -1)
        beginning = self.begin[positions] + self.sample[positions]
        return self._items[np.maximum(place, 0)], (place >= beginning) & (newest - place < SHAPE_WINDOW)


class Followed(NamedTuple):
    """What follows the C different contexts of one kind and length, over all samples."""

    #: [N]: which context is before each position, -1 where there is none.
    context: IntArray
    #: [C]: one position of each.
    first: IntArray
    #: [C]: occurrences, of which `hits` are followed by `token`, the most frequent, of equal ones the smallest.
    seen: IntArray
    token: IntArray
    hits: IntArray
    #: [C]: groups whose samples agree on this token behind this context.
    groups: IntArray
    #: [pairs] sorted: context << 31 | token, and how often.
    pairs: IntArray
    counts: IntArray

    def count_of(self, contexts: IntArray, tokens: IntArray) -> IntArray:
        """How often each context is followed by this token; 0 for token -1."""
        return _look_up(self.pairs, self.counts, contexts << 31 | np.maximum(tokens, 0)) * (tokens >= 0)


def follow(positions: Positions, key: HashArray, there: BoolArray, evidence: Evidence) -> Followed:
    """Count what follows the contexts that `key` stands for."""
    where = np.flatnonzero(there)
    _, first, numbers = np.unique(key[where], return_index=True, return_inverse=True)
    context = np.full(len(positions), -1, dtype=np.int64)
    context[where] = numbers
    seen = np.bincount(numbers, minlength=len(first))
    pairs, counts = np.unique(context[where] << 31 | positions.tokens[where], return_counts=True)
    order = np.lexsort((pairs, -counts, pairs >> 31))
    best = order[np.searchsorted((pairs >> 31)[order], np.arange(len(first)))]
    token = pairs[best] & 0x7FFFFFFF
    said = [_aligned(positions, context, evidence), _recurring(positions, context, evidence)]
    # A group counts once, however often it says it.
    both = np.unique(np.concatenate(said), axis=0)[:, 0]
    supported, support = np.unique(both, return_counts=True)
    groups = _look_up(supported, support, pairs[best])
    return Followed(context, where[first], seen, token, counts[best], groups, pairs, counts)


def _aligned(positions: Positions, context: IntArray, evidence: Evidence) -> IntArray:
    """[M, 2]: context << 31 | token, and the group whose samples agree on both in a column."""
    if not len(evidence.start):
        return np.zeros((0, 2), dtype=np.int64)
    found = context[evidence.position]
    lowest = np.minimum.reduceat(found, evidence.start)
    agreed = (lowest >= 0) & (lowest == np.maximum.reduceat(found, evidence.start))
    chosen = evidence.position[evidence.start][agreed]
    said = context[chosen] << 31 | positions.tokens[chosen]
    return np.stack([said, positions.group[chosen].astype(np.int64)], axis=1)


def _recurring(positions: Positions, context: IntArray, evidence: Evidence) -> IntArray:
    """The same for contexts that stand in enough samples of a group, which all go on with one token."""
    num_groups, num_samples = len(evidence.recurring), int(positions.sample[-1]) + 1
    at = np.flatnonzero((context >= 0) & (evidence.recurring[positions.group] <= num_samples))
    group, token = positions.group[at].astype(np.int64), positions.tokens[at].astype(np.int64)
    # Sorted by context, then by group: what stands in a sample, and what follows.
    place = context[at] * num_groups + group
    in_sample = np.unique(context[at] * num_samples + positions.sample[at])
    group_of = np.zeros(num_samples, dtype=np.int64)
    group_of[positions.sample] = positions.group
    places, samples = np.unique(
        in_sample // num_samples * num_groups + group_of[in_sample % num_samples], return_counts=True
    )
    order = np.lexsort((token, place))
    ordered, following = place[order], token[order]
    new = np.flatnonzero(np.diff(ordered, prepend=-1))
    if not len(new):
        return np.zeros((0, 2), dtype=np.int64)
    alike = np.minimum.reduceat(following, new) == np.maximum.reduceat(following, new)
    agreed = alike & (samples >= evidence.recurring[places % num_groups])
    said = places[agreed] // num_groups << 31 | following[new][agreed]
    return np.stack([said, places[agreed] % num_groups], axis=1)


def _look_up(keys: IntArray, values: IntArray, wanted: IntArray) -> IntArray:
    """The value of each wanted key among sorted ones, 0 where it is not there."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
