"""From words to the tokens of one model: counts of tokens, their probabilities, and continuations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..ops.constants import LINE_END, NUM_RUNS
from ..ops.recipe_lookup import MAX_CONTEXT, Recipes
from .words import Recipe

#: The weight of the shorter context's probability, in counts: it matters less the more often a context was seen.
PRIOR = 2
#: That probability where no shorter context is known; and its share of the rest where it expects another token.
UNKNOWN, OTHER = 0.15, 0.2
#: A continuation ends where all of it is less likely than this.
LEAST = 0.1
#: Tokens of a continuation, of which a look-up takes more.
MAX_WORD_TOKENS = 8

Context = tuple[int, ...]
#: The likeliest next token of each context, and its probability.
NextToken = dict[Context, tuple[int, float]]
#: Texts -> the token ids of each, without special tokens.
Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def tokenize(
    words: Mapping[str, int], recipes: Sequence[Recipe], calibration: Sequence[float], encode: Encode
) -> Recipes:
    """See `RecipePack.tokenize`."""
    encode = _inside(encode)
    next_token = _likely(*_count(words, recipes, encode))
    middle = (np.arange(len(calibration)) + 0.5) / len(calibration)
    offset = np.interp([p for _, p in next_token.values()], middle, calibration)
    likely = {
        context: (token, min(max(p + float(d), 1e-4), 1.0))
        for (context, (token, p)), d in zip(next_token.items(), offset, strict=True)
    }
    contexts = sorted(likely, key=lambda context: (len(context), context))
    learned = Recipes.from_lists((context, *_continue(context, likely)) for context in contexts)
    return replace(learned, indents=indents_of(words, encode))


def indents_of(words: Iterable[str], encode: Encode) -> npt.NDArray[np.int32]:
    """[NUM_RUNS + V] int32: the token of each run of spaces or tabs, and what each token does to a line.

    ::

        the token of n spaces is run 2 n, that of n tabs run 2 n + 1: where the tokenizer has one
        the last token of a word that ends a line ends a line

    Which tokens end a line is found in `words`, which are those that texts are made of.
    """
    runs = {2 * n + kind: char * n for kind, char in enumerate(" \t") for n in range(1, NUM_RUNS // 2)}
    ends = ["\n", "\n\n", *(word for word in words if word.endswith("\n"))]
    pieces = encode([*runs.values(), *ends])
    of_run = {run: tokens[0] for run, tokens in zip(runs, pieces, strict=False) if len(tokens) == 1}
    last = {tokens[-1] for tokens in pieces[len(runs) :] if len(tokens)}
    indents = np.zeros(NUM_RUNS + 1 + max([0, *last, *of_run.values()]), dtype=np.int32)
    indents[:NUM_RUNS] = -1
    for run, token in of_run.items():
        indents[run], indents[NUM_RUNS + token] = token, run
    indents[[NUM_RUNS + token for token in last]] = LINE_END
    return indents


def _inside(encode: Encode) -> Encode:
    """An encoder of texts that stand inside longer ones.

    SentencePiece models put a space before a text, so that "(" at the beginning of a text is another token than
    inside it. Such a tokenizer is given a line end first, which it joins with nothing and which is cut off again.
    """
    lead, alone, together = map(list, encode(["\n", "(", "\n("]))
    if together == lead + alone:
        return encode

    def inside(texts: list[str]) -> list[list[int]]:
        led = [list(tokens) for tokens in encode(["\n" + text for text in texts])]
        joined = [i for i, tokens in enumerate(led) if tokens[: len(lead)] != lead]
        plain = dict(zip(joined, encode([texts[i] for i in joined]), strict=True)) if joined else {}
        return [list(plain[i]) if i in plain else tokens[len(lead) :] for i, tokens in enumerate(led)]

    return inside


def _count(
    words: Mapping[str, int], recipes: Sequence[Recipe], encode: Encode
) -> tuple[dict[Context, Counter[int]], Counter[Context]]:
    """Counts of the tokens that follow each context of up to `MAX_CONTEXT` tokens, and of the contexts."""
    following: dict[Context, Counter[int]] = defaultdict(Counter)
    seen: Counter[Context] = Counter()

    def enter(tokens: Sequence[int], first: int, count: int) -> None:
        """The tokens from `first` on follow those before them."""
        for i in range(first, len(tokens)):
            following[_last(tokens[:i])][tokens[i]] += count

    pieces = dict(zip(words, encode(list(words)), strict=True))
    for word, count in words.items():
        tokens = pieces[word]
        for i in range(1, len(tokens) + 1):
            seen[_last(tokens[:i])] += count
        enter(tokens, 1, count)
    together = encode(["".join((*recipe.context, recipe.word)) for recipe in recipes])
    for recipe, tokens in zip(recipes, together, strict=True):
        context = [token for word in recipe.context for token in pieces[word]]
        if list(tokens[: len(context)]) != context or len(tokens) == len(context):
            continue  # one token holds the end of the context and the beginning of the word
        enter(tokens, len(context), recipe.hits)
        if len(recipe.context) > 1:  # a context of one word has been counted as a word
            seen[_last(context)] += recipe.seen
        for i in range(len(context) + 1, len(tokens)):
            seen[_last(tokens[:i])] += recipe.hits
    return following, seen


def _last(tokens: Sequence[int]) -> Context:
    return tuple(tokens[-MAX_CONTEXT:])


def _likely(following: Mapping[Context, Counter[int]], seen: Mapping[Context, int]) -> NextToken:
    """The likeliest next token of each context, the smallest id of equal ones, and its probability."""
    likely: NextToken = {}
    for context in sorted(following, key=lambda context: (len(context), context)):
        counts = following[context]
        token = min(counts, key=lambda token: (-counts[token], token))
        shorter = _longest(context[1:], likely)
        before = UNKNOWN
        if shorter is not None:
            before = shorter[1] if shorter[0] == token else (1 - shorter[1]) * OTHER
        total = max(seen[context], counts.total())
        likely[context] = token, (counts[token] + PRIOR * before) / (total + PRIOR)
    return likely


def _longest(tokens: Sequence[int], likely: NextToken) -> tuple[int, float] | None:
    """What follows the longest known context at the end of `tokens`."""
    lengths = range(min(len(tokens), MAX_CONTEXT), 0, -1)
    contexts = (tuple(tokens[-length:]) for length in lengths)
    return next((likely[context] for context in contexts if context in likely), None)


def _continue(context: Context, likely: NextToken) -> tuple[list[int], list[float]]:
    """The likeliest continuation, and for each of its tokens the probability of everything up to it."""
    tokens, alive = list(context), 1.0
    survival: list[float] = []
    while len(survival) < MAX_WORD_TOKENS and (found := _longest(tokens, likely)) is not None:
        token, probability = found
        alive *= probability
        if alive < LEAST:
            break
        tokens.append(token)
        survival.append(alive)
    return tokens[len(context) :], survival
