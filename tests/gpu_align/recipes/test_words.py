"""What is learned from texts, and what it becomes in tokens, is what loops over the words make of it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Recipe, learn
from tests.gpu_align.recipes import oracle

#: Few words, so that contexts come again and ties are frequent.
WORDS = ("a", " b", " c", " self", "(", ")", "\n", "   ", " 7", "_x")


def texts_of(seed, sources="pqr"):
    """Phrases that come again among random words, in texts some of which are empty."""
    rng = random.Random(seed)
    phrases = [rng.choices(WORDS, k=rng.randint(2, 6)) for _ in range(6)]

    def text():
        return "".join(
            "".join(rng.choice([*phrases, rng.choices(WORDS, k=3)])) for _ in range(rng.randint(0, 25))
        )

    return [(rng.choice(sources), text()) for _ in range(rng.randint(1, 8))]


def characters(text):
    return list(map(ord, text))


def joined(text):
    """A tokenizer that joins some neighbours over the ends of words; ids are halves of UTF-16 pairs."""
    ids, i = [], 0
    while i < len(text):
        pair = text[i : i + 2] in ("a ", " s", "el", "((", ")\n")
        ids.append(0xD700 + sum(map(ord, text[i : i + 1 + pair])) * (1 + pair))
        i += 1 + pair
    return ids


#: Behind " c" the likeliest word is exactly as likely as a recipe must be, and "b c" contradicts it.
AT_LEAST = [
    (
        name,
        "".join(f"b c {w}\n" for w in ["d", *rest[:3]]) + "".join(f"m c {w}\n" for w in [*"aaa", *rest[3:]]),
    )
    for name, rest in (("p", "efgkln"), ("q", "hijors"))
]
#: Behind "ac" the rest of "cd" came 3 times, an "x" twice of 5 times that "c" was the word; "a" has a low count.
BOTH = RecipePack(
    {"a": 2, "cd": 3, "c": 5, "x": 2}, [Recipe(("a",), "cd", 3, 4), Recipe(("a", "c"), "x", 2, 5)]
)


class TestLearn:
    @pytest.mark.parametrize("seed", [*range(12), None])
    def test_it_is_what_the_loop_finds(self, seed):
        texts = AT_LEAST if seed is None else texts_of(seed, sources="p" if seed % 5 == 0 else "pqr")
        pack = learn(texts)
        expected_words, expected = oracle.learn(texts)
        assert pack.recipes == expected
        assert list(pack.words.items()) == list(expected_words.items())


class TestTokenize:
    @pytest.mark.parametrize("encode", [characters, joined])
    @pytest.mark.parametrize("seed", [*range(5), None])
    def test_it_is_what_the_loop_makes_of_it(self, seed, encode):
        offsets = np.linspace(-0.2, 0.1, 20)
        pack = BOTH if seed is None else learn(texts_of(seed))
        pack = replace(pack, calibration=tuple(offsets.tolist()))
        rows = oracle.tokenize(
            pack.words,
            pack.recipes,
            lambda p: float(np.interp(p, (np.arange(20) + 0.5) / 20, offsets)),
            encode,
        )
        found = pack.tokenize(lambda texts: list(map(encode, texts)))
        assert [tuple(c[::-1][c[::-1] >= 0].tolist()) for c in found.context] == sorted(
            rows, key=lambda context: (len(context), context)
        )
        for context, tokens, alive in zip(found.context, found.token_ids, found.survival, strict=True):
            expected, survival = rows[tuple(context[::-1][context[::-1] >= 0].tolist())]
            assert tokens[tokens >= 0].tolist() == expected
            assert alive[: len(expected)] == pytest.approx(survival, rel=1e-6)
            assert not alive[len(expected) :].any()

    @pytest.mark.parametrize("token", [-1, 1 << 21])
    def test_an_id_that_no_vocabulary_has(self, token):
        pack = learn([(name, "k b\n" * 3) for name in "pq"])
        with pytest.raises(ValueError, match=f"encode: expected token ids of 0 to 1114111, found {token}"):
            pack.tokenize(lambda texts: [[token] * len(text) for text in texts])
