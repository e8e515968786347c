"""Learn from samples of a model: what all samples of a prompt agree on, and behind which contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from ...ops.constants import DELETE, INSERT, KEEP, MAX_CONTEXT, SHAPE_NUMBER, SHAPE_START, SHAPE_WINDOW
from ...ops.lcs import lcs_edit_script, lcs_length
from ...recipes.pack import RecipePack
from ...recipes.tokenize import Chains, Encode, Observed, TokenTexts, class_of, fingerprint

IntArray = npt.NDArray[np.signedinteger[Any]]
HashArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
#: A task, a prompt, and k samples of what a model answers.
Group = tuple[str, str, Sequence[str]]

#: Tokens of a sample that are aligned: the table of two samples takes 4 bytes for each pair of their tokens.
MAX_ALIGNED = 8192
#: An entry is kept where its token followed at least this share of all occurrences of its context.
CERTAIN = 0.95
#: A longer context that says the same is not kept where the shorter one is at least this certain, or within this.
SAME = 0.05
#: A longer context behind which the token of the shorter one has a smaller share takes that one back.
BLOCKED = 0.7
#: Groups that agree on it, where there are several: so many, and this share of all. In more groups there are more
#: contexts that go on alike in two of them by chance.
MIN_GROUPS, MIN_SHARE = 2, 0.01
#: A context that stands in half of the samples of a group, and in so many, counts as agreed if all go on alike.
MIN_RECURRING, NEVER = 3, 1 << 62
#: The share of a token's occurrences that are determined, if it stays itself in shapes.
KEPT = 0.5
#: A context is kept for a longer run where it adds so many tokens at all of its occurrences together.
LONGER = 8

_SEED, _HASH, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD), np.uint64(32)


def observe(
    groups: Iterable[Group],
    encode: Encode,
    token_texts: TokenTexts,
    agree: float,
    progress: Callable[[str, int], None] | None,
) -> RecipePack:
    """See `RecipePack.observe`."""
    if not 0 < agree <= 1:
        raise ValueError(f"agree: expected 0 < share <= 1, found {agree}")
    samples: list[list[IntArray]] = []
    found: list[IntArray] = []
    tasks: dict[str, None] = {}
    for task, _, texts in groups:
        tasks[task] = None
        tokens = [np.asarray(ids, dtype=np.int32) for ids in encode(list(texts))] if texts else []
        samples.append(tokens)
        found.append(columns(tokens, agree))
        if progress is not None:
            progress(task, 1)
    pack = RecipePack({}, [], task="+".join(filter(None, tasks)), tokenizer=fingerprint(encode))
    positions = Positions(samples)
    evidence = evidence_of(samples, found)
    if not len(evidence.start):
        return pack
    several = len(samples) > 1
    ids, number = np.unique(positions.tokens, return_inverse=True)
    item_of = np.array([class_of(text) for text in token_texts(ids.tolist())], dtype=np.int64)
    # Kept are those that are mostly determined, and in two groups where there are.
    determined = np.bincount(number[evidence.position], minlength=len(ids))
    in_groups = np.bincount(np.unique(number.astype(np.int64) << 32 | positions.group) >> 32)
    kept = (determined >= KEPT * np.bincount(number)) & (in_groups >= (MIN_GROUPS if several else 1))
    kept &= item_of != SHAPE_NUMBER
    item_of[kept] = ids[kept]
    positions.set_shapes(item_of[number])
    min_groups = max(MIN_GROUPS, math.ceil(MIN_SHARE * len(samples))) if several else 1
    candidates = list(_candidates(positions, evidence, ids[kept], min_groups))
    chains = Chains(
        (entry for entry, new in candidates if new), dict(zip(ids.tolist(), item_of.tolist(), strict=True))
    )
    entries = sorted(_chosen(candidates, chains), key=by_frequency)
    return replace(pack, observed=tuple(entries), kept=tuple(ids[kept].tolist()))


def by_frequency(entry: Observed) -> tuple[Any, ...]:
    """The order of the entries of a pack: what was seen most often first."""
    return -entry.seen, -entry.hits, entry.is_shape, len(entry.context), entry.context


def columns(samples: Sequence[IntArray], agree: float = 1.0) -> IntArray:
    """[columns, k]: where each determined token stands in each sample, -1 in samples that do not have it.

    ::

        pivot = the first sample; with agree < 1 the one with the largest sum of LCS lengths with the others
        for each token of pivot:
            position[s] = where the edit script from pivot to sample s keeps it
            it is determined if at least agree · k samples, the pivot among them, have it

    Args:
        samples: k token sequences; of each the first `MAX_ALIGNED` tokens are aligned.
        agree: the share of samples that must agree, above 0 and at most 1.

    Of one sample nothing is determined. Example: ``[5, 6, 7]`` and ``[5, 8, 7]`` have the columns
    ``[[0, 0], [2, 2]]``.
    """
    k = len(samples)
    if k < 2 or (agree == 1.0 and not all(map(len, samples))):
        return np.zeros((0, k), dtype=np.int64)
    rows = [torch.from_numpy(np.array(sample[:MAX_ALIGNED], dtype=np.int32)) for sample in samples]
    lengths = torch.tensor(list(map(len, rows)), dtype=torch.int32)
    pivot = 0
    if agree < 1:
        tokens = pad_sequence(rows, batch_first=True)
        each = (lcs_length(tokens[s].repeat(k, 1), lengths[s].repeat(k), tokens, lengths) for s in range(k))
        total = [int(common.sum()) for common in each]
        pivot = total.index(max(total))
    place = np.full((len(rows[pivot]), k), -1, dtype=np.int64)
    place[:, pivot] = np.arange(len(place))
    for s in {*range(k)} - {pivot}:  # one at a time: the table of a pair is what takes memory
        pair = [part for row in (s, pivot) for part in (rows[row][None], lengths[row : row + 1])]
        script = lcs_edit_script(*pair)
        ops = script.op[0, : int(script.length[0])].numpy()
        keep = ops == KEEP
        place[(np.cumsum(ops != INSERT) - 1)[keep], s] = (np.cumsum(ops != DELETE) - 1)[keep]
    found: IntArray = place[(place >= 0).sum(axis=1) >= max(math.ceil(agree * k - 1e-9), 2)]
    return found


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


class Evidence(NamedTuple):
    """Where all samples of a group agree: E positions, those of a column side by side."""

    #: [E]: positions.
    position: IntArray
    #: [columns]: where each column begins among them.
    start: IntArray
    #: [groups]: a context that recurs in so many samples of a group counts as agreed, wherever they have it.
    recurring: IntArray


def evidence_of(samples: Sequence[Sequence[IntArray]], found: Sequence[IntArray]) -> Evidence:
    """All determined columns as positions of all samples."""
    position, size, base = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for group, place in zip(samples, found, strict=True):
        lengths = np.array([len(sample) for sample in group], dtype=np.int64)
        there = place >= 0
        position.append((place + (base + np.cumsum(lengths) - lengths))[there])
        size.append(there.sum(axis=1))
        base += int(lengths.sum())
    sizes = np.concatenate(size)
    enough = [max(MIN_RECURRING, -(-len(group) // 2)) if len(samples) > 1 else NEVER for group in samples]
    return Evidence(np.concatenate(position), np.cumsum(sizes) - sizes, np.array(enough, dtype=np.int64))


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


def _candidates(
    positions: Positions, evidence: Evidence, kept: IntArray, min_groups: int
) -> Iterator[tuple[Observed, bool]]:
    """What may be kept: what is certain, and what takes a shorter context back. Shapes first, by length.

    With each, whether it is *new*: whether it says something that no shorter context says.
    """
    for is_shape in (True, False):
        # What the longest shorter context that is new says at each position, and how certain it is.
        said = np.full(len(positions), -1, dtype=np.int64)
        share = np.zeros(len(positions))
        for length, (key, there) in enumerate(positions.hashes(is_shape), start=1):
            followed = follow(positions, key, there, evidence)
            own = followed.hits / followed.seen
            certain = (followed.groups >= min_groups) & (followed.hits >= CERTAIN * followed.seen)
            before, sure = said[followed.first], share[followed.first]
            right = followed.count_of(np.arange(len(certain)), before)
            blocks = ~certain & (before >= 0) & (followed.seen >= 2) & (right < BLOCKED * followed.seen)
            new = blocks | (certain & ((before != followed.token) | (own - sure > SAME)))
            token, hits = np.where(certain, followed.token, -1), np.where(certain, followed.hits, right)
            at = np.flatnonzero(followed.context >= 0)
            at = at[new[followed.context[at]]]
            said[at], share[at] = token[followed.context[at]], own[followed.context[at]]
            rows = np.flatnonzero(certain | blocks)
            context = positions.contexts(is_shape, followed.first[rows], length)
            if not is_shape:
                # Of kept tokens alone a shape says the same, and where more is known, a longer shape says more.
                free = (~np.isin(context, kept)).any(axis=1)
                rows, context = rows[free], context[free]
            fields = (token, hits, followed.seen, followed.groups, new)
            for items, *counts, is_new in zip(
                context.tolist(), *(field[rows].tolist() for field in fields), strict=True
            ):
                yield Observed(is_shape, tuple(items), *counts), is_new


def _chosen(candidates: Sequence[tuple[Observed, bool]], chains: Chains) -> Iterator[Observed]:
    """What is new, and what says the same as a shorter context but knows more, and so makes a longer run."""
    runs: dict[tuple[bool, tuple[int, ...]], int] = {}
    for entry, new in candidates:
        is_shape, context = entry.is_shape, entry.context
        own = len(chains.run(is_shape, context).tokens)
        shorter = ((is_shape, context[i:]) for i in range(1, len(context)))
        known = next((runs[key] for key in shorter if key in runs), 0)
        if new or (own - known) * entry.seen >= LONGER:
            runs[is_shape, context] = own
            yield entry
