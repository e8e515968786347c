"""From words to the tokens of one model: counts of tokens, their probabilities, and continuations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops.constants import LINE_END, NUM_RUNS
from ..ops.recipe_lookup import MAX_CONTEXT, MAX_TOKENS, Recipes
from .words import Recipe

#: The weight of the shorter context's probability, in counts: it matters less the more often a context was seen.
PRIOR = 2
#: That probability where no shorter context is known; and its share of the rest where it expects another token.
UNKNOWN, OTHER = 0.15, 0.2
#: A continuation ends where all of it is less likely than this.
LEAST = 0.1
#: Tokens of a continuation, of which a look-up takes more.
MAX_WORD_TOKENS = 8

#: Tokens as a string, a character each: the garbage collector would walk through a million tuples again and again.
#: No vocabulary has 1,114,112 tokens.
Tokens = str
#: Texts -> the token ids of each, without special tokens.
Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def tokenize(
    words: Mapping[str, int], recipes: Sequence[Recipe], calibration: Sequence[float], encode: Encode
) -> Recipes:
    """See `RecipePack.tokenize`."""
    encode = _inside(encode)
    token, likely = _likely(*_count(words, recipes, encode))
    middle = (np.arange(len(calibration)) + 0.5) / len(calibration)
    p = np.fromiter(likely.values(), np.float64, len(likely))
    p = np.clip(p + np.interp(p, middle, calibration), 1e-4, 1.0)
    likely = dict(zip(likely, p.tolist(), strict=True))
    continued: list[Tokens] = []
    survival: list[float] = []
    lengths: list[int] = []
    for context in token:
        alive = _continue(context, token, likely, continued)
        survival += alive
        lengths.append(len(alive))
    return Recipes(
        _padded(_ids("".join([context[::-1] for context in token])), list(map(len, token)), MAX_CONTEXT, -1),
        _padded(_ids("".join(continued)), lengths, MAX_TOKENS, -1),
        _padded(np.array(survival, np.float32), lengths, MAX_TOKENS, 0),
        indents=indents_of(words, encode),
    )


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


def _tokens(ids: Sequence[int]) -> Tokens:
    try:
        return "".join(map(chr, ids))
    except (ValueError, OverflowError):
        wrong = next(token for token in ids if not 0 <= token <= sys.maxunicode)
        raise ValueError(f"encode: expected token ids of 0 to {sys.maxunicode}, found {wrong}") from None


def _ids(tokens: Tokens) -> npt.NDArray[np.int32]:
    return np.frombuffer(tokens.encode("utf-32-le", "surrogatepass"), "<i4").astype(np.int32)


def _padded(values: npt.NDArray[Any], lengths: Sequence[int], width: int, empty: int) -> npt.NDArray[Any]:
    """[R, width]: rows of these lengths, one after the other in `values`, with `empty` behind each."""
    padded = np.full((len(lengths), width), empty, values.dtype)
    padded[np.arange(width) < np.array(lengths, np.int64)[:, None]] = values
    return padded


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
) -> tuple[dict[Tokens, int], dict[Tokens, int]]:
    """Counts of contexts of up to `MAX_CONTEXT` tokens, each with a token that follows; and of the contexts."""
    following: dict[Tokens, int] = {}
    seen: dict[Tokens, int] = {}

    def enter(tokens: Tokens, first: int, count: int) -> None:
        """The tokens from `first` on follow those before them."""
        for i in range(first, len(tokens)):
            key = tokens[max(i - MAX_CONTEXT, 0) : i + 1]
            following[key] = following.get(key, 0) + count

    def see(tokens: Tokens, shortest: int, longest: int, count: int) -> None:
        """The first so many tokens are contexts."""
        for i in range(shortest, longest + 1):
            context = tokens[max(i - MAX_CONTEXT, 0) : i]
            seen[context] = seen.get(context, 0) + count

    pieces = {}
    for (word, count), ids in zip(words.items(), encode(list(words)), strict=True):
        pieces[word] = tokens = _tokens(ids)
        see(tokens, 1, len(tokens), count)
        enter(tokens, 1, count)
    together = encode(["".join(recipe.context) + recipe.word for recipe in recipes])
    for recipe, ids in zip(recipes, together, strict=True):
        tokens = _tokens(ids)
        context = "".join([pieces[word] for word in recipe.context])
        length = len(context)
        if not tokens.startswith(context) or len(tokens) == length:
            continue  # one token holds the end of the context and the beginning of the word
        enter(tokens, length, recipe.hits)
        if len(recipe.context) > 1:  # a context of one word has been counted as a word
            see(tokens, length, length, recipe.seen)
        see(tokens, length + 1, len(tokens) - 1, recipe.hits)
    return following, seen


def _likely(
    following: Mapping[Tokens, int], seen: Mapping[Tokens, int]
) -> tuple[dict[Tokens, Tokens], dict[Tokens, float]]:
    """By context, short ones first: the likeliest next token, the smallest of equal ones; and its probability."""
    best: dict[Tokens, Tokens] = {}
    total: dict[Tokens, int] = {}
    for key in sorted(following):
        context, count = key[:-1], following[key]
        total[context] = total.get(context, 0) + count
        if context not in best or count > following[best[context]]:
            best[context] = key
    token: dict[Tokens, Tokens] = {}
    likely: dict[Tokens, float] = {}
    for context in sorted(sorted(best), key=len):
        key = best[context]
        shorter = _longest(context[1:], token)
        before = UNKNOWN
        if shorter:
            before = likely[shorter] if token[shorter] == key[-1] else (1 - likely[shorter]) * OTHER
        count = max(seen.get(context, 0), total[context])
        token[context] = key[-1]
        likely[context] = (following[key] + PRIOR * before) / (count + PRIOR)
    return token, likely


def _longest(tokens: Tokens, known: Mapping[Tokens, Tokens]) -> Tokens:
    """The longest known context at the end of at most `MAX_CONTEXT` tokens; empty if none is."""
    while tokens and tokens not in known:
        tokens = tokens[1:]
    return tokens


def _continue(
    context: Tokens, token: Mapping[Tokens, Tokens], likely: Mapping[Tokens, float], out: list[Tokens]
) -> list[float]:
    """Append the likeliest continuation to `out`; the probability of everything up to each of its tokens."""
    last, alive = context, 1.0
    survival: list[float] = []
    while len(survival) < MAX_WORD_TOKENS and (known := _longest(last, token)):
        alive *= likely[known]
        if alive < LEAST:
            break
        out.append(token[known])
        survival.append(alive)
        last = (last + token[known])[-MAX_CONTEXT:]
    return survival
