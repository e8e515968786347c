"""Learn from texts: which word follows which words so often that a recipe is worth it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from .words import Recipe, words_of

#: The most words of a context, and how often a context must be seen.
MAX_WORDS, MIN_SEEN = 3, 3
#: A recipe is at least this likely, or it contradicts a shorter context.
MIN_LIKELY = 0.3
#: A context says nothing new where its probability is within this of a shorter context's.
SAME = 0.1


def learn(texts: Iterable[tuple[str, str]]) -> tuple[dict[str, int], list[Recipe]]:
    """Words with their counts, and recipes; see `RecipePack.learn`."""
    seen = _Counts(texts)
    kept: dict[tuple[str, ...], tuple[str, float]] = {}
    recipes = []
    for context, following in sorted(seen.following.items(), key=lambda item: (len(item[0]), item[0])):
        total = following.total()
        if total < MIN_SEEN:
            continue
        word = min(following, key=lambda word: (-following[word], word))
        if not seen.in_several(context, word):
            continue
        likely = following[word] / total
        shorter = next((kept[context[i:]] for i in range(1, len(context)) if context[i:] in kept), None)
        if shorter is None or (shorter[0] != word and shorter[1] < MIN_LIKELY):
            news = likely >= MIN_LIKELY
        else:
            news = shorter[0] != word or abs(shorter[1] - likely) >= SAME
        if news:
            kept[context] = word, likely
            recipes.append(Recipe(context, word, following[word], total))
    named = {word for recipe in recipes for word in (*recipe.context, recipe.word)}
    words = {
        word: count
        for word, count in sorted(seen.words.items(), key=lambda item: (-item[1], item[0]))
        if word in named or (count >= MIN_SEEN and seen.in_several((), word))
    }
    return words, recipes


class _Counts:
    """How often a word follows each context of up to `MAX_WORDS` words, and whether several sources write it."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self.words: Counter[str] = Counter()
        self.following: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        self._source: dict[tuple[tuple[str, ...], str], str] = {}
        self._several: set[tuple[tuple[str, ...], str]] = set()
        names = set()
        for source, text in texts:
            names.add(source)
            for context, word in _followed(words_of(text)):
                if context:
                    self.following[context][word] += 1
                else:
                    self.words[word] += 1
                if self._source.setdefault((context, word), source) != source:
                    self._several.add((context, word))
        self._one = len(names) == 1

    def in_several(self, context: tuple[str, ...], word: str) -> bool:
        """Whether two or more sources write it, or the only source does."""
        return self._one or (context, word) in self._several


def _followed(words: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    for i, word in enumerate(words):
        for length in range(min(MAX_WORDS, i) + 1):
            yield tuple(words[i - length : i]), word
