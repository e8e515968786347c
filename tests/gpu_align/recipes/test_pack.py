"""Recipe packs: learned from texts, kept in a file, and told in a tokenizer's tokens."""

import random

import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Recipe
from gpu_align.recipes.pack import NUM_BINS, SHIPPED
from gpu_align.tools.recipes.learn import words_of

TEXTS = [
    ("one", "def a(self):\n    return self.a\n" * 3),
    ("two", "def b(self):\n    return self.b\n" * 3),
    ("two", "only here, only here, only here, only here\n"),
]
#: The file of a pack.
PACKED = SHIPPED.read_bytes()


def characters(texts):
    """A tokenizer: a token a character."""
    return [[ord(c) for c in text] for text in texts]


def listed(recipes):
    """Context -> (continuation, survival), as text."""
    found = {}
    for context, tokens, alive in zip(recipes.context, recipes.token_ids, recipes.survival, strict=True):
        before = "".join(chr(t) for t in context[::-1] if t >= 0)
        after = "".join(chr(t) for t in tokens if t >= 0)
        found[before] = after, [round(float(p), 4) for p in alive[: len(after)]]
    return found


class TestWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                "def f(self, x):\n    return x",
                ["def", " f", "(self", ",", " x", "):\n", "   ", " return", " x"],
            ),
            ("a  b\n\n\nc 123_45", ["a", " ", " b", "\n\n\n", "c", " ", "123", "_", "45"]),
            ("_private __init__ naïve 你好", ["_private", " __", "init", "__", " naïve", " 你好"]),
            ("", []),
        ],
    )
    def test_examples(self, text, words):
        assert words_of(text) == words

    def test_joined_they_are_the_text(self):
        rng = random.Random(0)
        for _ in range(300):
            text = "".join(rng.choice("ab_AZé 1 \t\n\r.(/你\u00a0\x00") for _ in range(40))
            assert "".join(words_of(text)) == text


def two(text):
    """A text that two sources have."""
    return [(name, text) for name in "pq"]


AHEAD = "".join(f"a b c {w}\n" for w in ["z"] * 3 + list("ghijklmn"))
OTHER = "".join(f"d b c {w}\n" for w in ["y"] * 5 + list("opqr"))


class TestLearn:
    @pytest.mark.parametrize(
        ("texts", "there", "not_there"),
        [
            (TEXTS, [((" return",), " self", 6, 6)], [(" only",), ("   ", " return")]),
            (TEXTS[2:], [((" only",), " here", 3, 3)], []),
            (
                two("x = a\n" * 5 + "y = b\n" * 5 + "z = a\n" * 9),
                [((" =",), " a", 28, 38), (("y", " ="), " b", 10, 10)],
                [],
            ),
            (
                two("a b c\n" * 4 + "d b c\n" * 2 + "d b e\n" * 4),
                [((" b",), " c", 12, 20), (("a", " b"), " c", 8, 8)],
                [],
            ),
            (two("k b\n"), [], [("k",)]),
            ([*two("k b\n"), ("p", "k b\n")], [(("k",), " b", 3, 3)], []),
            # One word in four is not enough, nor is it where the shorter context has as little to say.
            (two("k a\nk b\nk c\nk d\n"), [], [("k",)]),
            # 5 of 20: it takes back what the shorter one says. 3 of 11 take nothing back that anybody would draft.
            (
                two(AHEAD + OTHER + "e c x\n" * 60),
                [((" c",), " x", 120, 160), ((" b", " c"), " y", 10, 40)],
                [("a", " b", " c")],
            ),
            (two("k b\nk a\n" * 3), [(("k",), " a", 6, 12)], []),
        ],
        ids=[
            "likely", "of one source", "longer and something else", "longer and more often", "seen twice",
            "seen three times", "unlikely", "as little to say", "the first of equal words",
        ],
    )  # fmt: skip
    def test_examples(self, texts, there, not_there):
        found = RecipePack.learn(texts).recipes
        assert {Recipe(*recipe) for recipe in there} <= set(found)
        assert not {recipe.context for recipe in found} & set(not_there)

    def test_words_are_counted_and_those_of_one_source_left_out(self):
        words = RecipePack.learn(TEXTS).words
        assert words["(self"] == 6
        assert not any("here" in word for word in words)

    def test_order_does_not_matter(self):
        assert RecipePack.learn(TEXTS) == RecipePack.learn(TEXTS[::-1])

    def test_nothing(self):
        pack = RecipePack.learn([])
        assert (dict(pack.words), list(pack.recipes)) == ({}, [])
        assert len(pack.tokenize(characters)) == 0


class TestTokenize:
    def test_a_word_after_a_word(self):
        pack = RecipePack({"ab": 4, " c": 3}, [Recipe(("ab",), " c", 3, 4)])
        found = listed(pack.tokenize(characters))
        # (hits + 2 · shorter) / (seen + 2): after "a" 4 of 4 with 0.15 before, after "ab" 3 of 4.
        after_a, after_ab = (4 + 2 * 0.15) / 6, (3 + 2 * 0.15) / 6
        after_space = (3 + 2 * 0.15) / 5
        assert found["a"][0] == "b c"
        after_c = found["ab "][1][0]
        expected = [after_a, after_a * after_ab, after_a * after_ab * after_c]
        assert found["a"][1] == pytest.approx(expected, abs=1e-4)
        assert found["ab"][1][0] == pytest.approx(after_ab, abs=1e-4)
        assert found[" "] == ("c", [round(after_space, 4)])
        # In this context the rest of the word is believed more.
        assert found["ab "][1][0] == pytest.approx((3 + 2 * after_space) / 5, abs=1e-4)

    def test_a_shorter_context_that_expects_another_token(self):
        pack = RecipePack(
            {"a": 4, "b": 10, "x": 6, "y": 4}, [Recipe(("b",), "x", 6, 10), Recipe(("a", "b"), "y", 4, 4)]
        )
        found = listed(pack.tokenize(characters))
        after_b = (6 + 2 * 0.15) / 12
        assert found["b"] == ("x", [pytest.approx(after_b, abs=1e-4)])
        assert found["ab"] == ("y", [pytest.approx((4 + 2 * 0.2 * (1 - after_b)) / 6, abs=1e-4)])

    def test_the_rest_of_a_word_and_a_word_in_one_context(self):
        """Behind "ac" the rest of "cd" came 3 times, and of 5 times that "c" was the word an "x" came twice."""
        words = {"a": 4, "cd": 3, "c": 5, "x": 2}
        pack = RecipePack(words, [Recipe(("a",), "cd", 3, 4), Recipe(("a", "c"), "x", 2, 5)])
        found = listed(pack.tokenize(characters))
        after_c = (3 + 2 * 0.15) / (3 + 5 + 2)
        assert found["ac"] == ("d", [pytest.approx((3 + 2 * after_c) / (3 + 5 + 2), abs=1e-4)])

    def test_a_continuation_ends_where_it_is_unlikely(self):
        chain = [Recipe((a,), b, 2, 5) for a, b in ("ab", "bc", "cd")]
        after, alive = listed(RecipePack(dict.fromkeys("abcd", 5), chain).tokenize(characters))["a"]
        p = (2 + 2 * 0.15) / 7
        assert (after, alive) == ("bc", [pytest.approx(p, abs=1e-4), pytest.approx(p * p, abs=1e-4)])
        assert p**3 < 0.1 < p**2

    def test_the_calibration_counts(self):
        recipes = [Recipe(("ab",), " c", 3, 4)]
        plain = RecipePack({"ab": 4, " c": 3}, recipes)
        found = listed(plain.calibrated([-0.2] * NUM_BINS).tokenize(characters))
        assert found["ab"][1][0] == pytest.approx(
            listed(plain.tokenize(characters))["ab"][1][0] - 0.2, abs=1e-4
        )

    def test_a_word_that_is_joined_with_its_context_is_left_out(self):
        def joins(texts):
            return [[ord(c) for c in text.replace("b ", "_")] for text in texts]

        pack = RecipePack({"ab": 4, " c": 3}, [Recipe(("ab",), " c", 3, 4)])
        assert set(listed(pack.tokenize(joins))) == {"a", " "}

    def test_contexts_end_at_eight_tokens(self):
        pack = RecipePack({"abcdefghij": 5, "x": 4}, [Recipe(("abcdefghij",), "x", 4, 5)])
        found = listed(pack.tokenize(characters))
        assert found["cdefghij"][0] == "x"
        assert max(map(len, found)) == 8

    def test_the_likeliest_of_several_words_that_begin_alike(self):
        pack = RecipePack({"abc": 6, "abd": 3, "ax": 1}, [])
        found = listed(pack.tokenize(characters))
        assert found["a"][0] == "bc"
        assert found["a"][1][0] == pytest.approx((9 + 0.3) / 12, abs=1e-4)
        assert found["ab"][1][0] == pytest.approx((6 + 0.3) / 11, abs=1e-4)

    def test_tekken_cuts_where_words_end(self):
        pytest.importorskip("mistral_common")
        from gpu_align.simulate import load_tokenizer

        tekken = load_tokenizer("tekken")
        for path in sorted(SHIPPED.parents[2].glob("gpu_align/**/*.[pm][yd]")):
            text = path.read_text(encoding="utf-8")
            assert tekken.encode(text) == [t for word in words_of(text) for t in tekken.encode(word)], path

    def test_the_shipped_pack_in_tekken(self):
        pytest.importorskip("mistral_common")
        from gpu_align.simulate import load_tokenizer

        tekken = load_tokenizer("tekken")
        recipes = RecipePack.load().tokenize(lambda texts: [tekken.encode(text) for text in texts])
        number = {tuple(t for t in row[::-1].tolist() if t >= 0): i for i, row in enumerate(recipes.context)}
        row = number[tuple(tekken.encode("from __"))]
        tokens = [t for t in recipes.token_ids[row].tolist() if t >= 0]
        assert b"".join(map(tekken.token_bytes, tokens)).startswith(b"future__ import annotations")
        assert len(recipes) > 80_000

    def test_a_tokenizer_that_begins_every_text_with_a_space(self):
        def sentence_piece(texts):
            return characters([" " + text for text in texts])

        pack = RecipePack({"(ab": 4, "c": 3}, [Recipe(("(ab",), "c", 3, 4)])
        assert listed(pack.tokenize(sentence_piece)) == listed(pack.tokenize(characters))

    def test_a_continuation_of_words_is_short(self):
        """A look-up takes longer ones; figures of the shipped pack were made with these."""
        chain = [Recipe((a,), b, 9, 9) for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)]
        recipes = RecipePack(dict.fromkeys("abcdefghijkl", 9), chain).tokenize(characters)
        assert listed(recipes)["a"][0] == "bcdefghi"
        assert recipes.token_ids.shape[1] == 16
