"""Several packs as one, and what was refuted taken into account: counts add up, and what is uncertain goes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ...recipes.pack import PackError, RecipePack
from ...recipes.tokenize import Observed, Recipe
from .learn import CERTAIN, by_frequency
from .misses import Miss, Misses

#: A refuted context gets a token of its own where the model said the same so many times and nothing else.
MIN_SAID = 2

#: Whether a context is a shape, and it.
Key = tuple[bool, tuple[int, ...]]
K = TypeVar("K", int, str)


def _most(counts: Counter[K]) -> K:
    """The key that was counted most often; of equal ones the smallest."""
    return min(counts, key=lambda key: (-counts[key], key))


def merge(parts: Sequence[RecipePack | Misses]) -> RecipePack:
    """One pack of several, and of the places where their tokens were refuted; see `recipes/README.md`."""
    packs = [part for part in parts if isinstance(part, RecipePack)]
    misses = [part for part in parts if isinstance(part, Misses)]
    ids_of = [pack.tokenizer for pack in packs] + [part.tokenizer for part in misses]
    tokenizers = list(dict.fromkeys(filter(None, ids_of)))
    if len(tokenizers) > 1:
        raise PackError(
            f"tokenizer: expected token ids of one, found those of {tokenizers[0]} and {tokenizers[1]}"
        )
    counts = sum((part.counts for part in misses), Counter[Miss]())
    words, recipes = _merge_words(packs)
    observed = _merge_observed(packs)
    if counts:
        observed = _resolve(observed, counts)
    return RecipePack(
        words,
        recipes,
        calibration=next((pack for pack in packs if pack.words), packs[0]).calibration,
        made_by=next((pack.made_by for pack in packs if pack.made_by), ""),
        task="+".join(dict.fromkeys(name for pack in packs for name in pack.task.split("+") if name)),
        tokenizer="".join(tokenizers),
        observed=tuple(sorted(observed.values(), key=by_frequency)),
        kept=tuple(sorted({token for pack in packs for token in pack.kept})),
    )


def shapes_only(pack: RecipePack, min_groups: int = 2) -> RecipePack:
    """A pack to share: shapes alone, and only with tokens that `min_groups` groups agreed on.

    Words, recipes and literal prefixes, which are text, are left out, and so are tokens that stay themselves in no
    shape that is left.
    """
    left = tuple(e for e in pack.observed if e.is_shape and (e.groups >= min_groups or e.token < 0))
    named = {item for entry in left for item in entry.context}
    kept = tuple(token for token in pack.kept if token in named)
    return replace(pack, words={}, recipes=[], observed=left, kept=kept)


def _merge_words(packs: Sequence[RecipePack]) -> tuple[dict[str, int], list[Recipe]]:
    """Counts of equal words add up; of recipes with one context the one with more hits is kept."""
    if len(packs) == 1:
        return dict(packs[0].words), list(packs[0].recipes)
    words: Counter[str] = Counter()
    hits: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    seen: Counter[tuple[str, ...]] = Counter()
    for pack in packs:
        words.update(pack.words)
        for recipe in pack.recipes:
            hits[recipe.context][recipe.word] += recipe.hits
            seen[recipe.context] += recipe.seen
    recipes = []
    for context in sorted(hits, key=lambda context: (len(context), context)):
        word = _most(hits[context])
        recipes.append(Recipe(context, word, hits[context][word], seen[context]))
    ordered = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered), recipes


def _merge_observed(packs: Sequence[RecipePack]) -> dict[Key, Observed]:
    """Counts of equal entries add up; where packs contradict each other the certain token stays, or none."""
    each: defaultdict[Key, list[Observed]] = defaultdict(list)
    for pack in packs:
        for entry in pack.observed:
            each[entry.is_shape, entry.context].append(entry)
    merged = {}
    for key, entries in each.items():
        if len(entries) == 1:
            merged[key] = entries[0]
            continue
        hits: Counter[int] = Counter()
        groups: Counter[int] = Counter()
        for entry in entries:
            hits[entry.token] += entry.hits
            groups[entry.token] += entry.groups
        seen = sum(entry.seen for entry in entries)
        token = _most(hits)
        if token >= 0 and hits[token] < CERTAIN * seen:
            token = -1
        merged[key] = Observed(*key, token, hits[token], seen, groups[token])
    return merged


def _resolve(observed: Mapping[Key, Observed], counts: Mapping[Miss, int]) -> dict[Key, Observed]:
    """The entries once what was checked is counted.

    ::

        each entry after whose context a token was checked:    seen += count, and hits if it says what was said
        an entry that is not certain any more:    says nothing if a shorter one says something; else it goes
        for each token that was refuted, its longest shape, then its longest literal context, until one settles it:
            says what was said here, if at least twice and nothing else was; or as certainly as any entry
            else says nothing
        that context at the beginning of its draft:    says the first token, so that the run knows as much

    Only a literal context is asked where a literal one decides. Where all that is known of a context still expects
    the refuted token, it is left, unless it was left the last time, or all were: then it says nothing.
    """
    entries = dict(observed)
    said: defaultdict[Key, Counter[int]] = defaultdict(Counter)
    for miss, count in counts.items():
        for context in ((False, miss.literal), (True, miss.shape)):
            said[context][miss.said] += count
            for key in suffixes(context):
                if entry := entries.get(key):
                    right = count if entry.token == miss.said else 0
                    entries[key] = entry._replace(hits=entry.hits + right, seen=entry.seen + count)
    refuted = sorted(miss for miss in counts if miss.said != miss.expected)
    ways = {miss: _ways(miss, entries) for miss in refuted}
    entries = _without_uncertain(entries)
    left = []
    for miss in refuted:
        found = [(_said_at(key, said[key]), start) for key, start in ways[miss]]
        settled = [(entry, start) for entry, start in found if entry.token != miss.expected]
        entry, start = settled[0] if settled else found[-1]
        if not settled:
            key = entry.is_shape, entry.context
            if key not in observed:
                left.append((miss, entry, start))
                entries[key] = entry
                continue
            entry = _silenced(entry)
        _settle(entries, miss, entry, start)
    if len(left) == len(refuted):
        for miss, entry, start in left:
            _settle(entries, miss, _silenced(entry), start)
    return entries


def _said_at(key: Key, said: Counter[int]) -> Observed:
    """An entry for the token that was said after a context, if it is certain, else one that says nothing."""
    token = _most(said)
    hits, seen = said[token], said.total()
    if hits < max(MIN_SAID, CERTAIN * seen):
        token, hits = -1, 0
    return Observed(*key, token, hits, seen, 1)


def _silenced(entry: Observed) -> Observed:
    """The same context, and nothing is drafted there."""
    return entry._replace(token=-1, hits=0)


def _settle(entries: dict[Key, Observed], miss: Miss, entry: Observed, start: Key) -> None:
    """Enter the entry of a refuted context, and what its draft began with."""
    entries[entry.is_shape, entry.context] = entry
    if miss.first >= 0 and start[1]:
        entries.setdefault(start, Observed(*start, miss.first, 1, 1, 1))


def _ways(miss: Miss, entries: Mapping[Key, Observed]) -> list[tuple[Key, Key]]:
    """The contexts that may settle a refuted token, each with that of its draft's beginning, in this order."""
    shape = ((True, miss.shape), (True, miss.shape_start))
    literal = ((False, miss.literal), (False, miss.literal_start))
    by_literal = any(suffix in entries for key in literal for suffix in suffixes(key))
    ways = [literal] if by_literal and miss.literal else [shape, literal]
    return [way for way in ways if way[0][1]] or [shape]


def _without_uncertain(entries: dict[Key, Observed]) -> dict[Key, Observed]:
    """Those that are certain, and for those that are not any more one that takes the shorter ones back."""
    kept = {k: entry for k, entry in entries.items() if entry.token < 0 or entry.hits >= CERTAIN * entry.seen}
    for key, entry in entries.items():
        if key not in kept and any(other in kept and kept[other].token >= 0 for other in suffixes(key)):
            kept[key] = _silenced(entry)
    return kept


def suffixes(key: Key) -> Iterator[Key]:
    return ((key[0], key[1][i:]) for i in range(len(key[1])))
