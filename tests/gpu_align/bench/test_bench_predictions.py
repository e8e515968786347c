"""Predictions of outputs that were not known in advance, useless ones, and when answers are the same."""

from __future__ import annotations

import difflib

import pytest

from gpu_align.tools.bench.client import Alternatives, first_difference, is_near_tie
from gpu_align.tools.bench.data import (
    Pair,
    edited,
    make_predictions,
    resemblance,
    shipped_pairs,
    typed_edits,
    unrelated_text,
)

LINES = [f"line {i} of the answer\n" for i in range(40)]
OUTPUT = "".join(LINES)


def test_the_diff_of_the_pair_is_undone_in_the_output() -> None:
    after = [f"{i}\n" for i in range(20)]
    before = [*after[:5], "five\n", *after[6:15], *after[16:]]
    changed = edited(OUTPUT, Pair("a", "i", "".join(before), "".join(after))).splitlines(keepends=True)
    assert changed == [*LINES[:10], "five\n", *LINES[11:30], *LINES[31:]]


def test_an_output_that_the_model_really_edited_is_predicted_by_the_text_before() -> None:
    pair = shipped_pairs()[0]
    assert pair.after is not None
    found = make_predictions([pair, pair], [pair.after, OUTPUT], "auto")
    assert found.sources == ["before", "output"]
    assert found.texts["prediction"][0] == pair.before
    assert "1 of 2 predictions are the text before the edit. 1 are the output" in found.sentence()
    assert make_predictions([pair], [OUTPUT], "before").sources == ["before"]
    assert make_predictions([pair], [pair.after], "output").sources == ["output"]


@pytest.mark.parametrize("output", ["", "w", "word " * 300, OUTPUT, "a\n" * 9], ids=len)
@pytest.mark.parametrize("pair", [*shipped_pairs(), Pair("t", "i", "text")], ids=lambda pair: pair.id)
def test_an_edited_output_differs_and_is_the_same_each_time(output: str, pair: Pair) -> None:
    changed = edited(output, pair)
    assert changed
    assert changed != output
    assert changed == edited(output, pair)


def test_typed_edits_leave_most_of_the_text() -> None:
    changed = typed_edits(OUTPUT, "a")
    share = difflib.SequenceMatcher(None, OUTPUT.split(), changed.split(), autojunk=False).ratio()
    assert 0.8 < share < 1


def test_a_useless_prediction_has_the_length_and_none_of_the_words() -> None:
    text = unrelated_text(1000, "a")
    assert 1000 <= len(text) <= 1030
    assert resemblance(OUTPUT, text) == 0
    assert text == unrelated_text(1000, "a") != unrelated_text(1000, "b")


def places(*tokens: tuple[str, dict[str, float]]) -> list[Alternatives]:
    found, start = [], 0
    for text, others in tokens:
        found.append(Alternatives(start, text, [(text, -0.5), *others.items()]))
        start += len(text)
    return found


ONE = [("The", {}), (" cat", {" dog": -0.6, " cow": -0.52}), (" sat", {})]


@pytest.mark.parametrize(
    ("a", "b", "tokens", "tie"),
    [
        ("The cat sat", "The dog sat", ONE, True),
        ("The cat sat", "The pig sat", ONE, False),  # not among the likeliest
        ("A cat sat", "A dog sat", ONE, False),  # the third answer is of another kind
        ("The cat", "The cat sat", [*ONE[:2], (" sat", {"</s>": -0.55})], True),  # one ends
        ("The cat", "The cat sat", [*ONE[:2], (" sat", {"</s>": -3.0})], False),
        ("abc", "abd", [("ab", {"a": -0.6}), ("c", {})], True),  # the tie is a token earlier
        ("abc", "abd", [("ab", {"a": -2.0}), ("c", {})], False),
        ("xy", "xz", [("xy", {"xz": -0.7})], True),  # within one token
        ("xy", "xz", [("xy", {"xz": -0.9})], False),
    ],
)
def test_near_ties(a: str, b: str, tokens: list[tuple[str, dict[str, float]]], tie: bool) -> None:
    assert is_near_tie(a, b, places(*tokens), 0.25) is tie
    assert is_near_tie(b, a, places(*tokens), 0.25) is tie


def test_where_texts_part() -> None:
    assert [first_difference("abc", other) for other in ("xbc", "abx", "ab", "abcd")] == [0, 2, 2, 3]
