"""Merging packs."""

from __future__ import annotations

import pytest

from gpu_align import RecipePack
from gpu_align.recipes import Observed, PackError, Recipe, merge, shapes_only


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

    @pytest.mark.parametrize("other", [pack_of(tokenizer="y"), Misses("y")], ids=["pack", "misses"])
    def test_of_other_tokenizers(self, other: RecipePack | Misses) -> None:
        with pytest.raises(PackError, match="tokenizer: expected token ids of one, found those of x and y"):
            merge([pack_of(), pack_of(tokenizer="y")])

    def test_shapes_only(self) -> None:
        pack = pack_of(
            Observed(True, (7, -2), 3, 9, 10, 4),
            Observed(True, (7,), 3, 9, 10, 1),
            Observed(True, (8,), -1, 0, 10, 0),
            Observed(False, (7,), 3, 9, 10, 4),
            kept=(3, 7, 8, 9),
        ).merge(RecipePack({"secret": 3}, []))
        shared = shapes_only(pack)
        assert {entry.context for entry in shared.observed} == {(7, -2), (8,)}
        assert all(entry.is_shape for entry in shared.observed)
        assert (shared.kept, dict(shared.words)) == ((7, 8), {})
        assert len(shapes_only(pack, 1).observed) == 3


class TestMisses:
    def test_a_single_miss_takes_it_back(self) -> None:
        pack = pack_of(Observed(True, (7,), 2, 99, 99, 2), kept=(7,))
        misses = Misses("x")
        misses.count(Miss((9, 8, 7), (7, -2, 7), 2, 3))
        merged = {e.context: e for e in merge([pack, misses]).observed}
        assert merged[7,] == Observed(True, (7,), 2, 99, 100, 2)
        assert merged[7, -2, 7].token == -1


@pytest.mark.parametrize("shapes_only", [False, True])
def test_five_rounds(shapes_only: bool) -> None:
    """Miss, merge, the same outputs: fewer tokens are refuted each time, until none is."""
    words, rng = Words(), random.Random(3)
    pack = observe(records(rng, 30, 3), words.encode, words.texts)
    forms = [RECORD, RECORD.replace('  "size": {size},\n', ""), RECORD.replace('"kind"', '"sort"')]
    outputs = []
    for i in range(30):
        text = forms[0 if i % 3 else i // 3 % 3].format(
            name=rng.choice(["ann", "bob cid"]), size=i, kind="new"
        )
        outputs.append(("records", "Write.", text))
    refuted, covered = [], []
    for _ in range(6):
        misses = Misses(pack.tokenizer, shapes_only=shapes_only)
        found = report(pack, outputs, words.encode, words.texts, misses=misses).tasks["records"]
        refuted.append(found.drafted - found.accepted)
        covered.append(found.coverage)
        assert num_refuted(misses) == refuted[-1]
        pack = merge([pack, misses])
    assert refuted[0] > 0
    assert all(after < before or after == before == 0 for before, after in pairwise(refuted))
    assert refuted[-1] == 0
    assert covered[-1] > 0.7 * covered[0]


class TestCountMisses:
    SHAPE_OF = np.array([0, -2, -3, 3], dtype=np.int32)

    def test_up_to_the_first_that_is_refuted(self) -> None:
        misses = Misses("x")
        count_misses(misses, [9, 0, 1], 2, [3, 0, 3], [3, 1], self.SHAPE_OF)
        rows = {miss.expected: (miss, count) for miss, count in misses.counts.items()}
        accepted, refuted = rows[3][0], rows[0][0]
        assert (accepted.literal, accepted.shape, accepted.said) == ((9, 0, 1), (-6, 0, -2), 3)
        assert (refuted.literal, refuted.shape, refuted.said) == ((9, 0, 1, 3), (-6, 0, -2, 3), 1)
        assert (refuted.literal_start, refuted.shape_start, refuted.first) == ((9, 0, 1), (-6, 0, -2), 3)
