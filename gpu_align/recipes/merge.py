"""Several packs as one, and what was refuted taken into account: counts add up, and what is uncertain goes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .chains import Observed
from .content import Content, Miss, MissContent, PackError
from .observe import CERTAIN, by_frequency
from .words import Recipe

#: A refuted context gets a token of its own where the model said the same so many times and nothing else.
MIN_SAID = 2

Key = tuple[bool, tuple[int, ...]]


def merge(parts: Sequence[Content | MissContent]) -> Content:
    """See `RecipePack.merge`."""
    packs = [part for part in parts if isinstance(part, Content)]
    misses = [part for part in parts if isinstance(part, MissContent)]
    tokenizer = _tokenizer(parts)
    words, recipes = _merge_words(packs)
    observed = _merge_observed(packs)
    counts: Counter[Miss] = Counter()
    for part in misses:
        counts.update(part.counts)
    if counts:
        observed = _resolve(observed, counts)
    calibrated = next((pack for pack in packs if pack.words), packs[0])
    return Content(
        words,
        recipes,
        calibrated.calibration,
        next((pack.made_by for pack in packs if pack.made_by), ""),
        "+".join(dict.fromkeys(name for pack in packs for name in pack.task.split("+") if name)),
        tokenizer,
        sorted(observed.values(), key=by_frequency),
        sorted({token for pack in packs for token in pack.kept}),
    )


def _tokenizer(parts: Iterable[Content | MissContent]) -> str:
    """The one tokenizer that all ids are of."""
    names = list(dict.fromkeys(part.tokenizer for part in parts if part.tokenizer))
    if len(names) > 1:
        raise PackError(f"tokenizer: expected token ids of one, found those of {names[0]} and {names[1]}")
    return names[0] if names else ""


def _merge_words(packs: Sequence[Content]) -> tuple[dict[str, int], list[Recipe]]:
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
        word = min(hits[context], key=lambda word: (-hits[context][word], word))
        recipes.append(Recipe(context, word, hits[context][word], seen[context]))
    ordered = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered), recipes


def _merge_observed(packs: Sequence[Content]) -> dict[Key, Observed]:
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
        token = min(hits, key=lambda token: (-hits[token], token))
        if token >= 0 and hits[token] < CERTAIN * seen:
            token = -1
        merged[key] = Observed(*key, token, hits[token], seen, groups[token])
    return merged


def _resolve(observed: Mapping[Key, Observed], counts: Mapping[Miss, int]) -> dict[Key, Observed]:
    """The entries once what was checked is counted: see the README of this folder.

    ::

        each entry behind whose context a token was checked:    seen += count, and hits if it says what was said
        an entry that is not certain any more:    says nothing if a shorter one says something; else it goes
        the longest context of a token that was refuted:    says what was said, if twice and nothing else was
        that at the beginning of its draft:    says the first token, so that the run knows as much
    """
    entries = dict(observed)
    for miss, count in counts.items():
        for key in _suffixes(miss.literal, miss.shape):
            entry = entries.get(key)
            if entry is not None:
                right = count if entry.token == miss.said else 0
                entries[key] = entry._replace(hits=entry.hits + right, seen=entry.seen + count)
    entries = _without_uncertain(entries)
    said: defaultdict[Key, Counter[int]] = defaultdict(Counter)
    for miss, count in counts.items():
        for key in _longest(miss.literal, miss.shape, entries):
            said[key][miss.said] += count
    refuted = {
        key
        for miss in counts
        if miss.said != miss.expected
        for key in _longest(miss.literal, miss.shape, entries)
    }
    for key in refuted:
        total = said[key].total()
        token, hits = said[key].most_common(1)[0]
        unanimous = len(said[key]) == 1 and total >= MIN_SAID
        entries[key] = Observed(*key, token if unanimous else -1, hits if unanimous else 0, total, 1)
    for miss, count in counts.items():
        if miss.said != miss.expected and miss.first >= 0:
            for key in _longest(miss.literal_start, miss.shape_start, entries):
                entries.setdefault(key, Observed(*key, miss.first, count, count, 1))
    return entries


def _without_uncertain(entries: dict[Key, Observed]) -> dict[Key, Observed]:
    """Those that are certain, and for those that are not any more one that takes the shorter ones back."""
    kept = {
        key: entry for key, entry in entries.items() if entry.token < 0 or entry.hits >= CERTAIN * entry.seen
    }
    for (is_shape, context), entry in entries.items():
        if (is_shape, context) in kept:
            continue
        shorter = (kept.get((is_shape, context[i:])) for i in range(1, len(context)))
        if any(other is not None and other.token >= 0 for other in shorter):
            kept[is_shape, context] = entry._replace(token=-1, hits=0)
    return kept


def _suffixes(literal: tuple[int, ...], shape: tuple[int, ...]) -> Iterable[Key]:
    for is_shape, context in ((False, literal), (True, shape)):
        for i in range(len(context)):
            yield is_shape, context[i:]


def _longest(literal: tuple[int, ...], shape: tuple[int, ...], entries: Mapping[Key, Observed]) -> list[Key]:
    """The longest context of the kind that decides here: a literal one where any is known, else the shape."""
    by_literal = any((False, literal[i:]) in entries for i in range(len(literal)))
    if literal and (by_literal or not shape):
        return [(False, literal)]
    return [(True, shape)] if shape else []
