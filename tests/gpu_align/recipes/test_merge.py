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

    def test_of_other_tokenizers(self) -> None:
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
