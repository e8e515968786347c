"""What is learned from texts, and what it becomes in tokens, is what loops over the words make of it."""

import random

import numpy as np
import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Recipe
from gpu_align.tools.recipes import learn as learning
from tests.gpu_align.recipes import oracle_words

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


class TestLearn:
    @pytest.mark.parametrize("seed", range(40))
    def test_it_is_what_the_loop_finds(self, seed):
        texts = texts_of(seed, sources="p" if seed % 5 == 0 else "pqr")
        words, recipes = learning.learn(texts)
        expected_words, expected = oracle_words.learn(texts)
        assert recipes == expected
        assert list(words.items()) == list(expected_words.items())

    def test_the_texts_of_these_tests_teach_something(self):
        assert sum(len(learning.learn(texts_of(seed))[1]) for seed in range(40)) > 200

    @pytest.mark.parametrize("texts", [[], [("p", "")], [("p", ""), ("q", "")]])
    def test_empty_texts(self, texts):
        assert learning.learn(texts) == ({}, [])

    def test_an_empty_text_is_a_source_as_well(self):
        """Of two sources only one writes it; of one source it is all that there is."""
        assert learning.learn([("p", "a b\n" * 3), ("q", "")])[1] == []
        assert Recipe(("a",), " b", 3, 3) in learning.learn([("p", "a b\n" * 3), ("p", "")])[1]

    def test_contexts_do_not_reach_into_the_text_before(self):
        """Three texts that begin with the same word: nothing is told of what ends the text before."""
        contexts = {r.context for r in learning.learn([(name, "a b") for name in "pqr"])[1]}
        assert contexts == {("a",)}

    def test_of_equal_words_the_first_spelling(self):
        texts = [(name, "k b\nk a\n" * 3 + "m a\nm b\n" * 3) for name in "pq"]
        found = {r.context: r.word for r in learning.learn(texts)[1]}
        assert (found[("k",)], found[("m",)]) == (" a", " a")

    def test_the_word_that_counts_is_that_of_several_sources(self):
        """The most frequent word is of one source: the context says nothing, not the second word."""
        texts = [("p", "k a\n" * 9 + "k b\n" * 2), ("q", "k b\n" * 2)]
        assert ("k",) not in {r.context for r in learning.learn(texts)[1]}


class TestTokenize:
    @pytest.mark.parametrize("encode", [characters, joined])
    @pytest.mark.parametrize("seed", range(12))
    def test_it_is_what_the_loop_makes_of_it(self, seed, encode):
        offsets = np.linspace(-0.2, 0.1, 20)
        pack = RecipePack.learn(texts_of(seed)).calibrated(offsets.tolist())
        rows = oracle_words.tokenize(
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
        pack = RecipePack.learn([(name, "k b\n" * 3) for name in "pq"])
        with pytest.raises(ValueError, match=f"encode: expected token ids of 0 to 1114111, found {token}"):
            pack.tokenize(lambda texts: [[token] * len(text) for text in texts])
