"""Several packs as one: counts add up, and what is uncertain goes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ...recipes.pack import PackError, RecipePack
from ...recipes.tokenize import Observed, Recipe
from .learn import CERTAIN, by_frequency

K = TypeVar("K", int, str)


def _most(counts: Counter[K]) -> K:
    """The key that was counted most often; of equal ones the smallest."""
    return min(counts, key=lambda key: (-counts[key], key))


def merge(packs: Sequence[RecipePack]) -> RecipePack:
    """One pack of several; see `recipes/README.md`."""
    tokenizers = list(dict.fromkeys(filter(None, (pack.tokenizer for pack in packs))))
    if len(tokenizers) > 1:
        raise PackError(
            f"tokenizer: expected token ids of one, found those of {tokenizers[0]} and {tokenizers[1]}"
        )
    words, recipes = _merge_words(packs)
    return RecipePack(
        words,
        recipes,
        calibration=next((pack for pack in packs if pack.words), packs[0]).calibration,
        made_by=next((pack.made_by for pack in packs if pack.made_by), ""),
        task="+".join(dict.fromkeys(name for pack in packs for name in pack.task.split("+") if name)),
        tokenizer="".join(tokenizers),
        observed=tuple(sorted(_merge_observed(packs), key=by_frequency)),
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


def _merge_observed(packs: Sequence[RecipePack]) -> list[Observed]:
    """Counts of equal entries add up; where packs contradict each other the certain token stays, or none."""
    each: defaultdict[tuple[bool, tuple[int, ...]], list[Observed]] = defaultdict(list)
    for pack in packs:
        for entry in pack.observed:
            each[entry.is_shape, entry.context].append(entry)
    merged = []
    for key, entries in each.items():
        if len(entries) == 1:
            merged += entries
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
        merged.append(Observed(*key, token, hits[token], seen, groups[token]))
    return merged
