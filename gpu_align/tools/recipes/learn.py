"""Learn from texts: which word follows which words so often that a recipe is worth it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...recipes.pack import MAX_WORDS
from ...recipes.tokenize import Recipe

#: How often a context must be seen.
MIN_SEEN = 3
#: A recipe is at least this likely, or it contradicts a shorter context.
MIN_LIKELY = 0.3
#: A context says nothing new where its probability is within this of a shorter context's.
SAME = 0.1

# What GPT-4's, Llama 3's, Qwen's and Tekken's own patterns cut a text into, or a little more at once: letters with
# one sign or space before them, digits, signs with what ends their line, line ends, spaces.
_WORD = re.compile(
    r"""
      [^\r\n\w]?[^\W\d_]+
    | _[^\W\d_]+
    | \d+
    | [ ]?(?:[^\s\w]|_)+[\r\n/]*
    | \s*[\r\n]+
    | \s+(?!\S)
    | \s+
    """,
    re.VERBOSE,
)

IntArray = npt.NDArray[np.int64]


def words_of(text: str) -> list[str]:
    """The words of a text; joined, they are the text."""
    return _WORD.findall(text)


def learn(texts: Iterable[tuple[str, str]]) -> tuple[dict[str, int], list[Recipe]]:
    """Words with their counts, the most frequent first, and recipes; see `RecipePack.learn`.

    ::

        for each context of 1, 2, .. MAX_WORDS words, in the order of length and spelling:
            word = the one that followed most often, the first spelling of equal ones
            share = how often it did / how often the context was seen
            told, before = word and share of the longest kept context that this one ends with
            if it was seen MIN_SEEN times, and several sources write the word there (or there is one source):
                if nothing is told, or told != word and before < MIN_LIKELY:    keep it if share >= MIN_LIKELY
                else:    keep it if told != word or abs(before - share) >= SAME
        words: those of recipes, and those seen MIN_SEEN times, in several sources

    The loop is over lengths; contexts of one length are rows of arrays, numbered in the order in which `np.unique`
    finds them.
    """
    spellings, stream = _read(texts)
    recipes: list[Recipe] = []
    # Of each position: the context of n words that ends there, and what the longest kept context expects.
    context = np.zeros(len(stream.word), np.int64)
    expected, likely = np.full(1, -1), np.zeros(1)
    spelled = np.zeros((1, 0), np.int64)
    for n in range(1, MAX_WORDS + 1):
        # Where a text has n words before, and the first of them.
        positions = np.flatnonzero((context >= 0) & (stream.before >= n))
        pairs = context[positions] * len(spellings) + stream.word[positions - n]
        unique, number = np.unique(pairs, return_inverse=True)
        shorter, added = np.divmod(unique, max(len(spellings), 1))
        spelled = np.concatenate([added[:, None], spelled[shorter]], axis=1)
        context[:] = -1
        context[positions] = number
        top = _likeliest(number, stream.word[positions], stream.source[positions], len(unique))
        share = top.hits / top.seen
        told, before = expected[shorter], likely[shorter]
        agrees = told == top.word
        unsaid = (told < 0) | (~agrees & (before < MIN_LIKELY))
        is_news = np.where(unsaid, share >= MIN_LIKELY, ~agrees | (np.abs(before - share) >= SAME))
        kept = np.flatnonzero(is_news & (top.seen >= MIN_SEEN) & (top.in_several | stream.is_one))
        expected, likely = told.copy(), before.copy()
        expected[kept], likely[kept] = top.word[kept], share[kept]
        # Word numbers are in the order of their spellings.
        for i in kept[np.lexsort(spelled[kept].T[::-1])]:
            words = tuple(spellings[w] for w in spelled[i])
            recipes.append(Recipe(words, spellings[top.word[i]], int(top.hits[i]), int(top.seen[i])))
    # Each word is a context of its own, behind which nothing in particular comes.
    found = _likeliest(stream.word, np.zeros_like(stream.word), stream.source, len(spellings))
    often = (found.seen >= MIN_SEEN) & (found.in_several | stream.is_one)
    named = {word for recipe in recipes for word in (*recipe.context, recipe.word)}
    ranked = [w for w in np.argsort(-found.seen, kind="stable") if often[w] or spellings[w] in named]
    return {spellings[w]: int(found.seen[w]) for w in ranked}, recipes


class _Stream(NamedTuple):
    """All words of all texts, one after the other; int64 [W] each."""

    word: IntArray  # numbers, in the order of their spellings
    source: IntArray
    before: IntArray  # words of the text before it
    is_one: bool  # whether all is of one source


class _Likeliest(NamedTuple):
    """For each context the word that followed most often, the first spelling of equal ones; [C] each."""

    word: IntArray
    hits: IntArray
    seen: IntArray
    in_several: npt.NDArray[np.bool_]  # whether two or more sources wrote it there


def _read(texts: Iterable[tuple[str, str]]) -> tuple[list[str], _Stream]:
    numbers: dict[str, int] = {}
    sources: dict[str, int] = {}
    word, source, before = [], [], []
    for name, text in texts:
        words = words_of(text)
        word.append(np.array([numbers.setdefault(w, len(numbers)) for w in words], np.int64))
        source.append(np.full(len(words), sources.setdefault(name, len(sources))))
        before.append(np.arange(len(words)))
    spellings = sorted(numbers)
    rank = np.empty(len(numbers), np.int64)
    rank[[numbers[w] for w in spellings]] = np.arange(len(numbers))
    nothing = np.zeros(0, np.int64)
    columns = [np.concatenate([nothing, *column]) for column in (word, source, before)]
    return spellings, _Stream(rank[columns[0]], columns[1], columns[2], len(sources) == 1)


def _likeliest(context: IntArray, word: IntArray, source: IntArray, num_contexts: int) -> _Likeliest:
    """What follows each of `num_contexts`. context, word, source: [W], of each word that has a context."""
    order = np.lexsort((word, context))
    context, word, source = context[order], word[order], source[order]
    begins = np.flatnonzero(np.diff(context, prepend=-1) | np.diff(word, prepend=-1))
    hits = np.diff(begins, append=len(word))
    several = np.minimum.reduceat(source, begins) != np.maximum.reduceat(source, begins)
    context, word = context[begins], word[begins]
    # The last one of each context in this order has the most hits and the smallest word.
    order = np.lexsort((-word, hits, context))
    best = order[np.searchsorted(context[order], np.arange(num_contexts), side="right") - 1]
    seen = np.bincount(context, hits, num_contexts).astype(np.int64)
    return _Likeliest(word[best], hits[best], seen, several[best])
