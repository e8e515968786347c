"""Packs that are learned from texts, observed in samples, and merged, compared with plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import RecipePack
from gpu_align.ops.recipes import SHAPE_IDENTIFIER
from gpu_align.recipes import Observed, PackError, Recipe
from gpu_align.recipes.tokenize import Chains
from gpu_align.tools.recipes.learn import CERTAIN, Positions, agreed, columns, follow, learn, matched, observe
from gpu_align.tools.recipes.merge import merge, shapes_only
from tests.gpu_align.recipes import oracle
from tests.gpu_align.recipes.oracle import Words

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


@pytest.mark.parametrize("seed", [*range(12), None])
def test_it_is_what_the_loop_finds(seed):
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


LCSseq = pytest.importorskip("rapidfuzz.distance").LCSseq
RECORD = '{{\n  "name": "{name}",\n  "size": {size},\n  "kind": "{kind}"\n}}'


def records(rng: random.Random, groups: int, samples: int) -> list[tuple[str, str, list[str]]]:
    """Groups of records of one form."""

    def record() -> str:
        name = " ".join(rng.choice(["ann", "bob", "cid", "dora", "eve"]) for _ in range(rng.randrange(1, 4)))
        return RECORD.format(name=name, size=rng.randrange(1000), kind=rng.choice(["new", "old"]))

    return [("records", "", [record() for _ in range(samples)]) for _ in range(groups)]


@pytest.mark.parametrize(
    "groups", [[], [("t", "p", [])], [("t", "p", ["a b c"])], [("t", "p", ["", ""])], [("t", "p", ["a", ""])]]
)
def test_of_one_sample_or_none_nothing_is_determined(groups: list[tuple[str, str, list[str]]]) -> None:
    words = Words()
    pack = observe(groups, words.encode, words.texts)
    assert (pack.observed, pack.kept) == ((), ())
    assert len(pack.tokenize(words.encode)) == 0


@pytest.mark.parametrize("agree", [0, -1, 1.1])
def test_a_share_that_is_none(agree: float) -> None:
    with pytest.raises(ValueError, match="agree: expected 0 < share <= 1"):
        observe([], Words().encode, Words().texts, agree=agree)


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=2, max_size=4), st.sampled_from([1, 0.5]))
@settings(max_examples=60, deadline=None)
def test_a_column_is_one_token_in_rising_places(samples: list[list[int]], agree: float) -> None:
    found = columns([np.array(sample, dtype=np.int32) for sample in samples], agree)
    for place in found.tolist():
        assert len({samples[s][p] for s, p in enumerate(place) if p >= 0}) == 1
        assert sum(p >= 0 for p in place) >= max(2, agree * len(samples))
    for s in range(len(samples)):
        places = [p for p in found[:, s].tolist() if p >= 0]
        assert places == sorted(set(places))


def counted(
    samples: Sequence[Sequence[Sequence[int]]], item_of: dict[int, int], agree: float
) -> tuple[dict[object, object], list[list[list[int]]]]:
    """What `follow` counts, as the oracle tells it, and the columns."""
    arrays = [[np.array(s, dtype=np.int32) for s in group] for group in samples]
    found = [columns(group, agree) for group in arrays]
    positions = Positions(arrays, found)
    positions.set_shapes(np.array([item_of[t] for t in positions.tokens.tolist()], dtype=np.int64))
    told: dict[object, object] = {}
    for is_shape in (False, True):
        for length, (context, first) in enumerate(positions.numbered(is_shape), start=1):
            f = follow(positions, context, agreed(positions, context))
            contexts = positions.contexts(is_shape, first, length).tolist()
            rows = zip(f.token.tolist(), f.hits.tolist(), f.seen.tolist(), f.groups.tolist(), strict=True)
            told |= {(is_shape, tuple(c)): row for c, row in zip(contexts, rows, strict=True)}
    return told, [place.tolist() for place in found]


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 6), max_size=40), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    st.sets(st.integers(0, 6)),
    st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=80, deadline=None)
def test_all_positions_at_once_are_as_one_after_the_other(
    samples: list[list[list[int]]], kept: set[int], agree: float
) -> None:
    item_of = {t: t if t in kept else -2 - t % 4 for t in range(7)}
    if not any(sample for group in samples for sample in group):
        return
    told, places = counted(samples, item_of, agree)
    assert told == oracle.followed(samples, places, item_of)


@pytest.mark.parametrize("agree", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_entries_are_what_was_counted(seed: int, agree: float) -> None:
    """Each entry that says a token has the counts of the loops, is certain, and is supported."""
    words = Words()
    groups = records(random.Random(seed), 6, 4)
    told: list[tuple[str, int]] = []
    learned = observe(groups, words.encode, words.texts, agree=agree, progress=lambda *at: told.append(at))
    assert told == [("records", 1)] * len(groups)
    samples = [words.encode(texts) for _, _, texts in groups]
    kept = set(learned.kept)
    item_of = {t: t if t in kept else oracle.class_of(words.names[t]) for t in range(len(words.names))}
    places = [columns([np.array(s, dtype=np.int32) for s in group], agree).tolist() for group in samples]
    expected = oracle.followed(samples, places, item_of)
    assert learned.observed
    assert not any(words.names[t].isdigit() for t in kept)
    assert [(-e.seen, -e.hits) for e in learned.observed] == sorted(
        (-e.seen, -e.hits) for e in learned.observed
    )
    for entry in learned.observed:
        token, hits, seen, support = expected[entry.is_shape, entry.context]
        assert entry.seen == seen
        if entry.token >= 0:
            assert entry == Observed(entry.is_shape, entry.context, token, hits, seen, support)
            assert hits >= CERTAIN * seen
            assert support >= 2
        else:
            assert hits < CERTAIN * seen or support < 2
        assert entry.is_shape or not set(entry.context) <= kept


def said(is_shape: bool, context: tuple[int, ...], token: int, hits: int = 9) -> Observed:
    return Observed(is_shape, context, token, hits, max(hits, 9), 2)


NAME = SHAPE_IDENTIFIER
#: Entries, the shape items of their tokens, where the draft begins, and its first tokens.
CHAINS: dict[str, tuple[list[Observed], dict[int, int], tuple[bool, tuple[int, ...]], list[int], int]] = {
    "longest contexts": (
        [said(False, (1,), 2), said(False, (2,), 3), said(False, (1, 2), 4), said(True, (4,), 5)],
        {t: t for t in range(9)}, (False, (1,)), [2, 4, 5], 3,
    ),
    "a shape knows its last tokens alone": (
        [said(True, (NAME, 0), 1), said(False, (0, 1), 0)], {0: 0, 1: NAME}, (True, (NAME, 0)), [1, 0, 1], 16,
    ),
    "free tokens in a row are one item": (
        [said(False, (2,), 0), said(False, (0,), 1), said(True, (2, NAME), 3)], {0: NAME, 1: NAME, 2: 2},
        (False, (2,)), [0, 1, 3], 3,
    ),
    "an entry that says nothing": (
        [said(False, (1,), 1), said(False, (1, 1, 1), -1, 8)], {1: 1}, (False, (1,)), [1, 1], 2,
    ),
    "where it is unlikely": ([said(False, (1,), 1, 90)._replace(seen=100)], {1: 1}, (False, (1,)), [1], 6),
}  # fmt: skip


@pytest.mark.parametrize("what", CHAINS)
def test_a_run_is_a_chain_of(what: str) -> None:
    entries, shape_of, begin, first, length = CHAINS[what]
    tokens, survival = Chains(entries, shape_of).run(*begin)
    assert (tokens[: len(first)], len(tokens)) == (first, length)
    p = entries[0].hits / (entries[0].seen + 0.25)
    assert survival == pytest.approx([p**n for n in range(1, length + 1)])
    assert survival[-1] >= 0.5


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=15))
@settings(max_examples=100, deadline=None)
def test_matched_positions_are_a_longest_common_subsequence(tokens: list[int], text: list[int]) -> None:
    pairs = matched(np.array(tokens, np.int32), np.array(text, np.int32))
    assert all(tokens[i] == text[j] for i, j in pairs)
    assert all(a[0] > b[0] and a[1] > b[1] for a, b in pairwise(pairs))
    assert len(pairs) == LCSseq.similarity(tokens, text)


def test_of_several_subsequences_the_earliest_in_the_text_is_taken() -> None:
    assert matched(np.array([1, 2]), np.array([1, 1, 2, 2])) == [(1, 2), (0, 0)]
    assert matched(np.array([7, 5, 9]), np.array([7, 8, 9])) == [(2, 2), (0, 0)]


def pack_of(
    *observed: Observed, kept: tuple[int, ...] = (), task: str = "t", tokenizer: str = "x"
) -> RecipePack:
    return RecipePack({}, [], task=task, tokenizer=tokenizer, observed=observed, kept=kept)


class TestPacks:
    def test_counts_add_up(self) -> None:
        one = pack_of(Observed(True, (7, -2), 3, 29, 30, 4), Observed(False, (1,), 2, 5, 5, 2), kept=(3, 7))
        two = pack_of(Observed(True, (7, -2), 3, 5, 5, 3), kept=(1, 7), task="u")
        merged = merge([one, two])
        assert merged.observed == (Observed(True, (7, -2), 3, 34, 35, 7), Observed(False, (1,), 2, 5, 5, 2))
        assert (merged.kept, merged.task, merged.tokenizer) == ((1, 3, 7), "t+u", "x")
        assert merge([merged, pack_of(task="u")]).task == "t+u"

    def test_where_they_contradict_each_other_nothing_is_said(self) -> None:
        one, two = pack_of(Observed(False, (1,), 2, 9, 9, 2)), pack_of(Observed(False, (1,), 3, 8, 8, 2))
        assert merge([one, two]).observed == (Observed(False, (1,), -1, 0, 17, 0),)
        few = pack_of(Observed(False, (1,), 3, 1, 1, 2))
        one = pack_of(Observed(False, (1,), 2, 19, 19, 2))
        assert merge([one, few]).observed == (Observed(False, (1,), 2, 19, 20, 2),)

    def test_words(self) -> None:
        one = RecipePack({"a": 4, "b": 2}, [Recipe(("a",), "b", 3, 4)], calibration=[0.1] * 20, made_by="one")
        two = RecipePack({"a": 1, "c": 9}, [Recipe(("a",), "c", 9, 9), Recipe(("c",), "a", 3, 4)])
        merged = merge([one, two])
        assert dict(merged.words) == {"c": 9, "a": 5, "b": 2}
        assert merged.recipes == [Recipe(("a",), "c", 9, 13), Recipe(("c",), "a", 3, 4)]
        assert (merged.calibration, merged.made_by) == (one.calibration, "one")
        as_often = RecipePack({}, [Recipe(("c",), "b", 3, 4)])
        assert merge([two, as_often]).recipes[1] == Recipe(("c",), "a", 3, 8)

    def test_of_other_tokenizers(self) -> None:
        with pytest.raises(PackError, match="tokenizer: expected token ids of one, found those of x and y"):
            merge([pack_of(), pack_of(tokenizer="y")])

    def test_shapes_only(self) -> None:
        observed = (
            Observed(True, (7, -2), 3, 9, 10, 4), Observed(True, (7,), 3, 9, 10, 1),
            Observed(True, (8,), -1, 0, 10, 0), Observed(False, (7,), 3, 9, 10, 4),
        )  # fmt: skip
        pack = merge([pack_of(*observed, kept=(3, 7, 8, 9)), RecipePack({"secret": 3}, [])])
        shared = shapes_only(pack)
        assert {entry.context for entry in shared.observed} == {(7, -2), (8,)}
        assert all(entry.is_shape for entry in shared.observed)
        assert (shared.kept, dict(shared.words)) == ((7, 8), {})
        assert len(shapes_only(pack, 1).observed) == 3
