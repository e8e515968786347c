"""Recipe packs: learned from texts, kept in a file, and told in a tokenizer's tokens."""

import gzip
import json
import random
import tracemalloc

import pytest

from gpu_align import RecipePack
from gpu_align.recipes import PackError, Recipe
from gpu_align.recipes.pack import MAX_BYTES, NUM_BINS, SHIPPED
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


class TestLearn:
    def test_what_is_likely(self):
        pack = RecipePack.learn(TEXTS)
        assert Recipe((" return",), " self", 6, 6) in pack.recipes
        assert pack.words["(self"] == 6

    def test_what_only_one_source_writes_is_left_out(self):
        pack = RecipePack.learn(TEXTS)
        assert not any("here" in word for word in pack.words)
        alone = RecipePack.learn([("two", text) for _, text in TEXTS[2:]])
        assert Recipe((" only",), " here", 3, 3) in alone.recipes

    def test_a_longer_context_that_says_the_same_is_left_out(self):
        pack = RecipePack.learn(TEXTS)
        contexts = [recipe.context for recipe in pack.recipes]
        assert (" return",) in contexts
        assert ("   ", " return") not in contexts

    def test_a_longer_context_that_says_something_else_is_kept(self):
        texts = [(name, "x = a\n" * 5 + "y = b\n" * 5 + "z = a\n" * 9) for name in "pq"]
        found = {r.context: r.word for r in RecipePack.learn(texts).recipes}
        assert found[(" =",)] == " a"
        assert found[("y", " =")] == " b"

    def test_a_longer_context_that_says_the_same_more_often_is_kept(self):
        texts = [(name, "a b c\n" * 4 + "d b c\n" * 2 + "d b e\n" * 4) for name in "pq"]
        found = RecipePack.learn(texts).recipes
        assert Recipe((" b",), " c", 12, 20) in found
        assert Recipe(("a", " b"), " c", 8, 8) in found

    def test_what_was_seen_twice_is_left_out(self):
        contexts = [r.context for r in RecipePack.learn([(name, "k b\n") for name in "pq"]).recipes]
        assert contexts == []
        contexts = [r.context for r in RecipePack.learn([(name, "k b\n") for name in "ppq"]).recipes]
        assert ("k",) in contexts

    def test_what_is_unlikely_is_left_out(self):
        """One word in four is not enough, nor is it where the shorter context has as little to say."""
        found = {
            r.context: r.word for r in RecipePack.learn([(n, "k a\nk b\nk c\nk d\n") for n in "pq"]).recipes
        }
        assert ("k",) not in found
        ahead = "".join(f"a b c {w}\n" for w in ["z"] * 3 + list("ghijklmn"))
        other = "".join(f"d b c {w}\n" for w in ["y"] * 5 + list("opqr"))
        texts = [(name, ahead + other + "e c x\n" * 60) for name in "pq"]
        found = {r.context: r.word for r in RecipePack.learn(texts).recipes}
        assert found[(" c",)] == " x"
        # 5 of 20: it takes back what the shorter one says. 3 of 11 take nothing back that anybody would draft.
        assert found[(" b", " c")] == " y"
        assert ("a", " b", " c") not in found

    def test_order_does_not_matter(self):
        assert RecipePack.learn(TEXTS) == RecipePack.learn(TEXTS[::-1])

    def test_of_words_as_frequent_the_first(self):
        found = {r.context: r.word for r in RecipePack.learn([(n, "k b\nk a\n" * 3) for n in "pq"]).recipes}
        assert found[("k",)] == " a"

    def test_nothing(self):
        pack = RecipePack.learn([])
        assert (dict(pack.words), list(pack.recipes)) == ({}, [])
        assert len(pack.tokenize(characters)) == 0


class TestFile:
    def test_round_trip_and_the_same_bytes(self, tmp_path):
        pack = RecipePack.learn(TEXTS, made_by="a test").calibrated([0.125] * NUM_BINS)
        for name in ("a", "b"):
            pack.save(tmp_path / name)
        assert RecipePack.load(tmp_path / "a") == pack
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_the_shipped_pack(self):
        pack = RecipePack.load()
        assert pack.made_by == "python -m benchmarks.learn.recipes"
        assert len(pack.recipes) > 80_000
        assert SHIPPED.stat().st_size < 1 << 20

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"format": 3}, "found format 3"),
            ({"recipes": [[1, 2, 0, 99_999]]}, r"recipe 0: expected 2 to 4 .* \d+ words, found \[0, 99999\]"),
            ({"recipes": [[1, 2, 0]]}, r"recipe 0: expected 2 to 4 .* \d+ words, found \[0\]"),
            ({"recipes": [[3, 2, 0, 1]]}, "recipe 0: expected no more hits than it was seen, found 3 of 2"),
            ({"recipes": [[0, 2, 0, 1]]}, "recipe 0: expected a count, found 0"),
            ({"recipes": [[1, 2, "a", 1]]}, ""),
            ({"words": [["a", "b"]]}, r"words\[0\]: expected a count, found 'b'"),
            ({"words": 3}, ""),
            ({"calibration": [0.0]}, "calibration: expected 20 numbers"),
            ({"calibration": [float("nan")] * NUM_BINS}, "calibration"),
            ({"made_by": None, "recipes": None}, "recipes: expected a list, found None"),
            ({"made_by": 5}, "made_by: expected a text, found 5"),
            ({"format": "1\n" * 10**6}, "found format '1"),
            ({"words": {"a": 1}}, "words: expected a list, found {'a': 1}"),
            ({"words": ["a1"]}, r"words\[0\]: expected a word and a count, found 'a1'"),
            ({"words": [[1, 1]]}, r"words\[0\]: expected a word and a count, found \[1, 1\]"),
            ({"words": [["", 1]]}, r"words\[0\]: expected a word and a count, found \['', 1\]"),
            ({"words": [["\ud800", 1]]}, r"words\[0\]: expected a word and a count"),
            ({"words": [["a", 1], ["a", 2]]}, r"words\[1\]: expected each word once, found 'a' again"),
            ({"words": [["a", 10**4000]]}, r"words\[0\]: expected a count, found 1000"),
            ({"words": [["a", True]]}, r"words\[0\]: expected a count, found True"),
            ({"words": [["a", 1.0]]}, r"words\[0\]: expected a count, found 1.0"),
            ({"recipes": ["1234"]}, "recipe 0: expected two counts and words, found '1234'"),
            ({"recipes": [[1]]}, r"recipe 0: expected two counts and words, found \[1\]"),
            ({"recipes": [[1, 2, 0, 1.0]]}, r"recipe 0: expected 2 to 4 .* found \[0, 1.0\]"),
            ({"recipes": [[1, 2, 0, True]]}, r"recipe 0: expected 2 to 4 .* found \[0, True\]"),
            ({"recipes": [[1, 2, 0, -1]]}, r"recipe 0: expected 2 to 4 .* found \[0, -1\]"),
            ({"recipes": [[1, 10**400, 0, 1]]}, "recipe 0: expected a count, found 1000"),
            ({"recipes": [[1, 2, *[0] * 10**5]]}, r"recipe 0: expected 2 to 4 .* found \[0, 0, 0"),
            ({"calibration": [10**400] * NUM_BINS}, "calibration: expected 20 numbers"),
            ({"calibration": ["0.1"] * NUM_BINS}, "calibration: expected 20 numbers"),
        ],
    )
    def test_a_file_that_is_no_pack(self, tmp_path, change, said):
        path = tmp_path / "pack.json.gz"
        RecipePack.learn(TEXTS).save(path)
        # Format 1 has no content hash, which would find every change.
        data = json.loads(gzip.decompress(path.read_bytes())) | {"format": 1} | change
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
        with pytest.raises(
            PackError, match=rf"^{path}: expected a recipe pack of format 1 or 2 \(.*{said}.*\)$"
        ) as caught:
            RecipePack.load(path)
        assert len(str(caught.value)) < len(str(path)) + 300

    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            (b"", "JSON, plain or gzipped"),
            (b"plain", "JSON, plain or gzipped"),
            (PACKED[:9], "JSON, plain or gzipped"),
            (PACKED[:-5], "JSON, plain or gzipped"),
            (PACKED[:12] + b"\xff" * 40 + PACKED[52:], "JSON, plain or gzipped"),
            (PACKED[:-8] + bytes(8), "JSON, plain or gzipped"),
            (PACKED + b"more", "JSON, plain or gzipped"),
            (gzip.compress(b"{", mtime=0), "JSON, plain or gzipped"),
            (gzip.compress(b"\xff\xfe\xfd", mtime=0), "JSON, plain or gzipped"),
            (gzip.compress(b"[" * 10**6, mtime=0), "JSON, plain or gzipped"),
            (gzip.compress(b'{"words":' * 10**5, mtime=0), "JSON, plain or gzipped"),
            (gzip.compress(b'{"words":' + b"9" * 10**5, mtime=0), "JSON, plain or gzipped"),
            (gzip.compress(b"[1]", mtime=0), r"a recipe pack of format 1 or 2 \(expected an object, found \[1"),
            (gzip.compress(b"null", mtime=0), r"a recipe pack of format 1 or 2 \(expected an object, found No"),
            (gzip.compress(b"{}", mtime=0), r"a recipe pack of format 1 or 2 \(found format None\)"),
        ],
        ids=[
            "empty", "plain", "torn-header", "torn", "broken", "wrong-sum", "more", "torn-json", "no-text",
            "deep-lists", "deep-objects", "a-long-number", "list", "null", "object",
        ],  # the bytes hold the time of day
    )  # fmt: skip
    def test_other_files(self, tmp_path, raw, said):
        path = tmp_path / "pack.json.gz"
        path.write_bytes(raw)
        with pytest.raises(PackError, match=f"^{path}: expected {said}[^\n]*$"):
            RecipePack.load(path)

    def test_a_file_that_becomes_a_gigabyte_is_not_unpacked(self, tmp_path):
        path = tmp_path / "pack.json.gz"
        # A gigabyte of spaces, as a thousand members.
        path.write_bytes(gzip.compress(b" " * 2**20) * 2**10)
        tracemalloc.start()
        with pytest.raises(PackError, match=f"{path}.*expected at most {MAX_BYTES} bytes, found more"):
            RecipePack.load(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * MAX_BYTES

    def test_a_large_file_is_not_read(self, tmp_path):
        path = tmp_path / "pack.json.gz"
        with path.open("wb") as file:
            file.truncate(2**40)  # takes no place on the disk
        with pytest.raises(PackError, match=f"{path}.*expected at most {MAX_BYTES} bytes, found more"):
            RecipePack.load(path)

    def test_whatever_stands_in_the_place_of_whatever(self, tmp_path):
        """A pack, or a `PackError`: each value of a pack becomes each of these."""
        path = tmp_path / "pack.json.gz"
        RecipePack({"ab": 4, " c": 3}, [Recipe(("ab",), " c", 3, 4)]).save(path)
        pack = json.loads(gzip.decompress(path.read_bytes())) | {"format": 1}
        odd = [
            None,
            True,
            -1,
            0,
            1,
            2,
            10**30,
            0.5,
            1e999,
            float("nan"),
            "",
            "ab",
            "\ud800",
            [],
            [[]],
            {},
            {"a": 1},
        ]

        def places(value):
            keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            for key in keys:
                yield value, key
                yield from places(value[key])

        loaded = refused = 0
        for holder, key in list(places(pack)):
            was = holder[key]
            for value in odd:
                holder[key] = value
                path.write_bytes(gzip.compress(json.dumps(pack).encode(), 1))
                try:
                    recipes = RecipePack.load(path).tokenize(characters)
                except PackError:
                    refused += 1
                else:
                    loaded += len(recipes) >= 0
            holder[key] = was
        assert (loaded > 30, refused > 300) == (True, True)

    @pytest.mark.parametrize("path", [5, b"pack", ["pack"]])
    def test_no_path(self, path):
        with pytest.raises(TypeError, match=f"^path: expected a str or Path, found {type(path).__name__}$"):
            RecipePack.load(path)

    def test_repr_is_one_line_without_contents(self):
        assert repr(RecipePack({"a\n": 4, "b": 3}, [Recipe(("a",), "b", 3, 4)])) == (
            "RecipePack(num_words=2, num_recipes=1)"
        )

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            RecipePack.load(tmp_path / "none")


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
