"""Learning, shapes, evidence and look-ups as loops, and a tokenizer of words, to check packs against."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from gpu_align.ops.recipes import (
    MAX_CONTEXT,
    SHAPE_IDENTIFIER,
    SHAPE_NUMBER,
    SHAPE_SPACE,
    SHAPE_START,
    SHAPE_STRING,
    SHAPE_WINDOW,
)
from gpu_align.recipes import Recipe
from gpu_align.tools.recipes.learn import words_of


class Words:
    """A tokenizer: words, digits, single signs and white space, numbered as they come."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.names: list[str] = []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.id(piece) for piece in re.findall(r"[^\W\d]+|\d|\s+|[^\w\s]", text)] for text in texts]

    def id(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.names)
            self.names.append(piece)
        return self.ids[piece]

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [self.names[i] for i in ids]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.texts([i for i in ids if i >= 0]))


def class_of(text: str) -> int:
    """By the contract: letters, digits and underscores are an identifier, digits alone a number."""
    inner = text.strip()
    if text and not inner:
        return SHAPE_SPACE
    if inner and all(c.isdigit() for c in inner):
        return SHAPE_NUMBER
    if inner and all(c.isalnum() or c == "_" for c in inner):
        return SHAPE_IDENTIFIER
    return SHAPE_STRING


def shape(output: Sequence[int], item_of: dict[int, int]) -> list[int]:
    """The items of the shape behind these tokens, the newest first."""
    items: list[int] = []
    previous_free = False
    for i in range(SHAPE_WINDOW):
        if i >= len(output):
            items.append(SHAPE_START)
            break
        item = item_of.get(output[-1 - i], SHAPE_STRING)
        if not (item < 0 and previous_free):
            items.append(item)
        previous_free = item < 0
        if len(items) == MAX_CONTEXT:
            break
    return items


def contexts(sample: Sequence[int], p: int, item_of: dict[int, int]) -> list[tuple[bool, tuple[int, ...]]]:
    """All literal prefixes and shapes before token p of a sample."""
    literal = [(False, tuple(sample[p - n : p])) for n in range(1, min(p, MAX_CONTEXT) + 1)]
    items = shape(sample[:p], item_of)
    return literal + [(True, tuple(items[:n][::-1])) for n in range(1, len(items) + 1)]


def followed(
    groups: Sequence[Sequence[Sequence[int]]],
    columns: Sequence[Sequence[Sequence[int]]],
    item_of: dict[int, int],
) -> dict[tuple[bool, tuple[int, ...]], tuple[int, int, int, int]]:
    """Context → (token, hits, seen, groups), for every context of every position, by loops.

    columns: of each group, where each determined token stands in each sample, -1 where a sample has it not.
    """
    following: defaultdict[tuple[bool, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
    agreed: defaultdict[tuple[bool, tuple[int, ...]], set[tuple[int, int]]] = defaultdict(set)
    for g, (group, places) in enumerate(zip(groups, columns, strict=True)):
        inside: defaultdict[tuple[bool, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        for s, sample in enumerate(group):
            for p in range(len(sample)):
                for context in contexts(sample, p, item_of):
                    following[context][sample[p]] += 1
                    inside[context].append((s, sample[p]))
        for place in places:
            there = [(s, p) for s, p in enumerate(place) if p >= 0]
            common = set.intersection(*(set(contexts(group[s], p, item_of)) for s, p in there))
            s, p = there[0]
            for context in common:
                agreed[context].add((g, group[s][p]))
        if len(groups) > 1:
            for context, found in inside.items():
                enough = len({s for s, _ in found}) >= max(3, -(-len(group) // 2))
                if enough and len({token for _, token in found}) == 1:
                    agreed[context].add((g, found[0][1]))
    result = {}
    for context, counts in following.items():
        token = min(counts, key=lambda token: (-counts[token], token))
        support = len({g for g, said in agreed[context] if said == token})
        result[context] = token, counts[token], counts.total(), support
    return result


Texts = Sequence[tuple[str, str]]


def learn(texts: Texts) -> tuple[dict[str, int], list[Recipe]]:
    """As the rule says it: contexts from short to long, each against the longest kept one that it ends with."""
    following: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    sources: defaultdict[tuple[tuple[str, ...], str], set[str]] = defaultdict(set)
    for source, text in texts:
        words = words_of(text)
        for i, word in enumerate(words):
            for length in range(min(3, i) + 1):
                context = tuple(words[i - length : i])
                following[context][word] += 1
                sources[context, word].add(source)
    enough = min(2, len({source for source, _ in texts}))
    counts = following.pop((), Counter())
    kept: dict[tuple[str, ...], tuple[str, float]] = {}
    recipes = []
    for context, found in sorted(following.items(), key=lambda item: (len(item[0]), item[0])):
        seen = found.total()
        word = min(found, key=lambda word: (-found[word], word))
        likely = found[word] / seen
        if seen < 3 or len(sources[context, word]) < enough:
            continue
        told, before = next(
            (kept[context[i:]] for i in range(1, len(context)) if context[i:] in kept), ("", 0.0)
        )
        if not told or (told != word and before < 0.3):
            is_news = likely >= 0.3
        else:
            is_news = told != word or abs(before - likely) >= 0.1
        if is_news:
            kept[context] = word, likely
            recipes.append(Recipe(context, word, found[word], seen))
    named = {word for recipe in recipes for word in (*recipe.context, recipe.word)}
    words_kept = {
        word: count
        for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if word in named or (count >= 3 and len(sources[(), word]) >= enough)
    }
    return words_kept, recipes


def tokenize(
    words: Mapping[str, int],
    recipes: Sequence[Recipe],
    offset: Callable[[float], float],
    encode: Callable[[str], list[int]],
) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    """Context -> continuation and survival."""
    following: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    seen: Counter[tuple[int, ...]] = Counter()
    for word, count in words.items():
        tokens = encode(word)
        for i in range(1, len(tokens) + 1):
            seen[tuple(tokens[:i][-8:])] += count
            if i < len(tokens):
                following[tuple(tokens[:i][-8:])][tokens[i]] += count
    for recipe in recipes:
        tokens = encode("".join((*recipe.context, recipe.word)))
        before = [token for word in recipe.context for token in encode(word)]
        if tokens[: len(before)] != before or len(tokens) == len(before):
            continue
        if len(recipe.context) > 1:
            seen[tuple(before[-8:])] += recipe.seen
        for i in range(len(before), len(tokens)):
            following[tuple(tokens[:i][-8:])][tokens[i]] += recipe.hits
            if i > len(before):
                seen[tuple(tokens[:i][-8:])] += recipe.hits

    def longest(
        tokens: Sequence[int], known: Mapping[tuple[int, ...], tuple[int, float]]
    ) -> tuple[int, float]:
        ends = (tuple(tokens[-n:]) for n in range(min(8, len(tokens)), 0, -1))
        return next((known[end] for end in ends if end in known), (-1, 0.0))

    counted: dict[tuple[int, ...], tuple[int, float]] = {}
    for context in sorted(following, key=len):
        found = following[context]
        token = min(found, key=lambda token: (-found[token], token))
        other, p = longest(context[1:], counted)
        prior = 0.15 if other < 0 else p if other == token else (1 - p) * 0.2
        counted[context] = token, (found[token] + 2 * prior) / (max(seen[context], found.total()) + 2)
    known = {context: (token, min(max(p + offset(p), 1e-4), 1.0)) for context, (token, p) in counted.items()}
    rows = {}
    for context in known:
        text, alive, survival = list(context), 1.0, []
        while len(survival) < 8 and (found := longest(text, known))[0] >= 0 and alive * found[1] >= 0.1:
            alive *= found[1]
            text.append(found[0])
            survival.append(alive)
        rows[context] = text[len(context) :], survival
    return rows
