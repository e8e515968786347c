"""Learn from samples of a model: what all samples of a prompt agree on, and behind which contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.constants import SHAPE_NUMBER
from .align import columns
from .chains import Chains, Observed
from .positions import Evidence, Followed, Positions, follow
from .tokenize import Encode, TokenTexts, classes_of

IntArray = npt.NDArray[np.signedinteger[Any]]
#: A task, a prompt, and k samples of what a model answers.
Group = tuple[str, str, Sequence[str]]

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


class Learned(NamedTuple):
    """What `observe` found: entries by falling frequency, and the tokens that stay themselves in shapes."""

    observed: list[Observed]
    kept: list[int]
    #: Of the groups, each once, in their order.
    tasks: list[str]


def observe(
    groups: Iterable[Group],
    encode: Encode,
    token_texts: TokenTexts,
    agree: float,
    progress: Callable[[str, int], None] | None,
) -> Learned:
    """See `RecipePack.observe`."""
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
    positions = Positions(samples)
    evidence = _evidence(samples, found)
    several = len(samples) > 1
    if not len(evidence.start):
        return Learned([], [], list(tasks))
    ids, number = np.unique(positions.tokens, return_inverse=True)
    item_of = classes_of(token_texts, ids.tolist()).astype(np.int64)
    stays = _stays(positions, evidence, number, several) & (item_of != SHAPE_NUMBER)
    kept = ids[stays]
    item_of[stays] = kept
    positions.set_shapes(item_of[number])
    chains = Chains([], dict(zip(ids.tolist(), item_of.tolist(), strict=True)))
    min_groups = max(MIN_GROUPS, math.ceil(MIN_SHARE * len(samples))) if several else 1
    entries = _choose(positions, evidence, kept, min_groups, chains)
    return Learned(sorted(entries, key=by_frequency), kept.tolist(), list(tasks))


def by_frequency(entry: Observed) -> tuple[Any, ...]:
    """The order of the entries of a pack: what was seen most often first."""
    return -entry.seen, -entry.hits, entry.is_shape, len(entry.context), entry.context


def _evidence(samples: Sequence[Sequence[IntArray]], found: Sequence[IntArray]) -> Evidence:
    """All determined columns as positions of all samples."""
    position, size, base = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for group, place in zip(samples, found, strict=True):
        lengths = np.array([len(sample) for sample in group], dtype=np.int64)
        there = place >= 0
        offset = base + np.cumsum(lengths) - lengths
        position.append((place + offset)[there] if len(place) else np.zeros(0, np.int64))
        size.append(there.sum(axis=1))
        base += int(lengths.sum())
    sizes = np.concatenate(size)
    enough = [max(MIN_RECURRING, -(-len(group) // 2)) if len(samples) > 1 else NEVER for group in samples]
    return Evidence(np.concatenate(position), np.cumsum(sizes) - sizes, np.array(enough, dtype=np.int64))


def _stays(
    positions: Positions, evidence: Evidence, number: IntArray, several: bool
) -> npt.NDArray[np.bool_]:
    """Which of the tokens, by their `number`, are mostly determined, and in two groups where there are."""
    determined = np.bincount(number[evidence.position], minlength=int(number.max()) + 1)
    both = np.unique(number.astype(np.int64) << 32 | positions.group)
    in_groups = np.bincount(both >> 32, minlength=len(determined))
    found: npt.NDArray[np.bool_] = (determined >= KEPT * np.bincount(number)) & (
        in_groups >= (MIN_GROUPS if several else 1)
    )
    return found


class _Layer(NamedTuple):
    """The contexts of one kind and length that may become entries."""

    is_shape: bool
    #: [C, length]: in reading order.
    context: IntArray
    token: IntArray
    hits: IntArray
    seen: IntArray
    groups: IntArray
    #: [C] bool: needed whatever runs they make: they say something that no shorter context says.
    new: npt.NDArray[np.bool_]

    def with_free(self, kept: IntArray) -> _Layer:
        """Only contexts with a token that is not kept."""
        free = np.flatnonzero((~np.isin(self.context, kept)).any(axis=1))
        context, token, hits, seen, groups = (
            field[free] for field in (self.context, self.token, self.hits, self.seen, self.groups)
        )
        return _Layer(self.is_shape, context, token, hits, seen, groups, self.new[free])

    def entries(self, chosen: npt.NDArray[np.bool_]) -> list[Observed]:
        fields = (self.context, self.token, self.hits, self.seen, self.groups)
        rows = zip(*(field[chosen].tolist() for field in fields), strict=True)
        return [Observed(self.is_shape, tuple(context), *rest) for context, *rest in rows]


def _layers(positions: Positions, evidence: Evidence, is_shape: bool, min_groups: int) -> list[_Layer]:
    """What may be kept of one kind, by length: what is certain, and what takes a shorter context back."""
    layers = []
    # What the longest shorter context that is new says at each position, and how certain it is.
    said = np.full(len(positions), -1, dtype=np.int64)
    share = np.zeros(len(positions))
    for length, (key, there) in enumerate(positions.hashes(is_shape), start=1):
        followed = follow(positions, key, there, evidence)
        certain = (followed.groups >= min_groups) & (followed.hits >= CERTAIN * followed.seen)
        before, sure = said[followed.first], share[followed.first]
        own = followed.hits / followed.seen
        new = certain & ((before != followed.token) | (own - sure > SAME))
        repeated = np.arange(len(certain))
        right = followed.count_of(repeated, before)
        blocks = ~certain & (before >= 0) & (followed.seen >= 2) & (right < BLOCKED * followed.seen)
        chosen = certain | blocks
        layers.append(
            _Layer(
                is_shape,
                positions.contexts(is_shape, followed.first[chosen], length),
                np.where(certain, followed.token, -1)[chosen],
                np.where(certain, followed.hits, right)[chosen],
                followed.seen[chosen],
                followed.groups[chosen],
                (new | blocks)[chosen],
            )
        )
        _say(followed, new | blocks, np.where(certain, followed.token, -1), own, said, share)
    return layers


def _say(
    followed: Followed,
    changed: npt.NDArray[np.bool_],
    token: IntArray,
    own: npt.NDArray[np.float64],
    said: IntArray,
    share: npt.NDArray[np.float64],
) -> None:
    """Write to `said` and `share` what the contexts that `changed` say, where they stand."""
    at = np.flatnonzero(followed.context >= 0)
    at = at[changed[followed.context[at]]]
    said[at], share[at] = token[followed.context[at]], own[followed.context[at]]


def _choose(
    positions: Positions, evidence: Evidence, kept: IntArray, min_groups: int, chains: Chains
) -> list[Observed]:
    """The entries of a pack: what is new by the next token, and what makes longer runs."""
    layers = [layer for kind in (True, False) for layer in _layers(positions, evidence, kind, min_groups)]
    # Of kept tokens alone a shape says the same, and where more is known, a longer shape says more.
    layers = [layer if layer.is_shape else layer.with_free(kept) for layer in layers]
    chosen = [entry for layer in layers for entry in layer.entries(layer.new)]
    for entry in chosen:
        chains.add(entry)
    return chosen + _longer_runs(layers, chains)


def _longer_runs(layers: Sequence[_Layer], chains: Chains) -> list[Observed]:
    """Contexts that say the same as shorter ones, but know more, and so make a longer run."""
    runs: dict[tuple[bool, tuple[int, ...]], int] = {}
    found = []
    for layer in layers:
        news = layer.new.tolist()
        for entry, new in zip(layer.entries(np.ones(len(news), np.bool_)), news, strict=True):
            own = len(chains.run(entry.is_shape, entry.context).tokens)
            shorter = next(
                (
                    runs[entry.is_shape, entry.context[i:]]
                    for i in range(1, len(entry.context))
                    if (entry.is_shape, entry.context[i:]) in runs
                ),
                0,
            )
            if new or (own - shorter) * entry.seen >= LONGER:
                runs[entry.is_shape, entry.context] = own
                if not new:
                    found.append(entry)
    return found
