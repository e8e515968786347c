"""Recipes in the tokens of one model: continuations of words, runs of what was observed, shapes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import recipes as numbers
from ..ops.recipes import LINE_END, MAX_CONTEXT, MAX_TOKENS, NUM_RUNS, SHAPE_STRING
from ..ops.recipes.table import Recipes

#: The weight of the shorter context's probability, in counts: it matters less the more often a context was seen.
PRIOR = 2
#: That probability where no shorter context is known; and its share of the rest where it expects another token.
UNKNOWN, OTHER = 0.15, 0.2
#: A continuation of words ends where all of it is less likely than `LEAST`, a run of entries where it is less
#: likely than `LEAST_RUN`.
LEAST, LEAST_RUN = 0.1, 0.5
#: Tokens of a continuation of words, of which a look-up takes more.
MAX_WORD_TOKENS = 8
#: The token of an entry is accepted with hits / (seen + `DOUBT`): as if it had been refuted that often already.
DOUBT = 0.25
#: A vocabulary has at most so many tokens; its texts are asked for in blocks.
MAX_VOCABULARY, _BLOCK = 1 << 19, 1 << 12
#: What two tokenizers would have to encode alike to be taken for one.
_PROBES = (
    "The quick brown fox jumps over the lazy dog, again and again; doesn't it?\n",
    '{\n  "id": 1024,\n  "items": [{"name": "Zoë", "at": "2024-01-31T09:05:00Z"}, null, true]\n}\n',
    "def main(argv: list[str]) -> int:\n    return len(argv) * 0x1F if argv else -1\n",
    '\t<div class="a-b">naïve café ½ – 你好, мир! 😀</div>\r\n\n  # $x = \\frac{a_1}{b^2}$',
    "antidisestablishmentarianism supercalifragilistic internationalization 3.14159265358979",
)

#: Tokens as a string, a character each: the garbage collector would walk through a million tuples again and again.
#: No vocabulary has 1,114,112 tokens.
Tokens = str
#: Texts -> the token ids of each, without special tokens; and the text of each token id.
Encode = Callable[[list[str]], Sequence[Sequence[int]]]
TokenTexts = Callable[[Sequence[int]], Sequence[str]]
IntArray = npt.NDArray[np.signedinteger[Any]]


class Recipe(NamedTuple):
    """After `context`, `word` came `hits` times out of `seen`."""

    context: tuple[str, ...]
    word: str
    hits: int
    seen: int


class Observed(NamedTuple):
    """After `context`, `token` came `hits` times out of `seen`; in `groups` groups all samples agreed on it."""

    is_shape: bool  # whether the context is items of a shape instead of token ids
    context: tuple[int, ...]  # 1 to `MAX_CONTEXT` of them, in reading order
    token: int  # -1: nothing is drafted here, whatever a shorter context says
    hits: int
    seen: int
    groups: int


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
    # Of each context the likeliest continuation, and the probability of everything up to each of its tokens.
    continued: list[Tokens] = []
    survival: list[float] = []
    lengths: list[int] = []
    for context in token:
        last, alive, begin = context, 1.0, len(survival)
        while len(survival) < begin + MAX_WORD_TOKENS and (known := _longest(last, token)):
            alive *= likely[known]
            if alive < LEAST:
                break
            continued.append(token[known])
            survival.append(alive)
            last = (last + token[known])[-MAX_CONTEXT:]
        lengths.append(len(survival) - begin)
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
    """[R, width]: rows of these lengths, one after the other in `values`, with `empty` after each."""
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


class Chains:
    """Looks entries up as a step does, in what is known of the tokens so far.

    entries: each context once of each kind. shape_of: the shape item of each token that the entries name.
    """

    def __init__(self, entries: Iterable[Observed], shape_of: Mapping[int, int]) -> None:
        self._says = {(entry.is_shape, entry.context): entry for entry in entries}
        self._shape_of = shape_of

    def run(self, is_shape: bool, context: Sequence[int]) -> tuple[list[int], list[float]]:
        """The draft after this context, if nothing else is known: tokens, and the probability of all up to each.

        ::

            while fewer than MAX_TOKENS and survival >= LEAST_RUN:
                entry = the longest known literal context, else the longest known shape
                stop if there is none or it says nothing
                append its token to what is known
        """
        # Of a shape the tokens after its last free item are known.
        tokens = [*takewhile(lambda item: item >= 0, reversed(context))][::-1]
        items = list(context) if is_shape else []
        for token in () if is_shape else context:
            self._extend(items, token)
        drafted: list[int] = []
        survival: list[float] = []
        alive = 1.0
        while len(drafted) < MAX_TOKENS:
            entry = self._longest(False, tokens) or self._longest(True, items)
            if entry is None or entry.token < 0:
                break
            alive *= entry.hits / (entry.seen + DOUBT)
            if alive < LEAST_RUN:
                break
            drafted.append(entry.token)
            survival.append(alive)
            tokens.append(entry.token)
            self._extend(items, entry.token)
        return drafted, survival

    def _longest(self, is_shape: bool, known: Sequence[int]) -> Observed | None:
        lengths = range(min(len(known), MAX_CONTEXT), 0, -1)
        contexts = ((is_shape, tuple(known[-length:])) for length in lengths)
        return next((self._says[context] for context in contexts if context in self._says), None)

    def _extend(self, items: list[int], token: int) -> None:
        """The shape with one more token: free tokens in a row are one item, the class of the last one."""
        item = self._shape_of.get(token, SHAPE_STRING)
        if item < 0 and items and numbers.SHAPE_START < items[-1] < 0:
            items[-1] = item
        else:
            items.append(item)


def fingerprint(encode: Encode) -> str:
    """Identify a tokenizer: ``"sha256:…"`` over the ids of fixed texts."""
    ids = [[int(token) for token in tokens] for tokens in encode(list(_PROBES))]
    return f"sha256:{hashlib.sha256(repr(ids).encode()).hexdigest()}"


def class_of(text: str) -> int:
    """The class of a token by its text, without the white space around it.

    Of ``(" is_open", "x1", "042", "\\n  ", "();")``: identifier, identifier, number, space, string.
    """
    inner = text.strip()
    if not inner:
        return numbers.SHAPE_SPACE if text else SHAPE_STRING
    if inner.isdigit():
        return numbers.SHAPE_NUMBER
    return numbers.SHAPE_IDENTIFIER if inner.replace("_", "a").isalnum() else SHAPE_STRING


def shape_of_tokens(token_texts: TokenTexts, kept: Iterable[int]) -> npt.NDArray[np.int32]:
    """[V] int32: the shape item of each token: the id itself for those that are `kept`, else the token's class.

    token_texts: the text of each id; of a part of a character any text that is no word. V is found by asking: up
    to an error, or to texts that are all empty or no text.
    """
    found: list[int] = []
    for begin in range(0, MAX_VOCABULARY, _BLOCK):
        texts = _texts(token_texts, range(begin, begin + _BLOCK))
        if not any(text.strip("\ufffd") for text in texts):
            break
        found += map(class_of, texts)
        if len(texts) < _BLOCK:
            break
    shape_of = np.array(found, dtype=np.int32)
    stay = np.array([token for token in kept if token < len(shape_of)], dtype=np.int64)
    shape_of[stay] = stay
    return shape_of


def _texts(token_texts: TokenTexts, ids: range) -> Sequence[str]:
    """Their texts, of as many of the first ones as there are."""
    try:
        return token_texts(ids)
    except Exception:  # whatever a tokenizer raises for an id that it does not have
        half = len(ids) // 2
        if not half:
            return []
        texts = list(_texts(token_texts, ids[:half]))
        return texts + list(_texts(token_texts, ids[half:])) if len(texts) == half else texts
