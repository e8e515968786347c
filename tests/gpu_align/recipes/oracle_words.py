"""Learning from texts and telling it in tokens as loops over words, to check `learn` and `tokenize` against."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from gpu_align.recipes import Recipe
from gpu_align.tools.recipes.learn import words_of

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
