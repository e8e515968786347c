"""The benchmark of draft quality: curves, cases, verdicts, and a run of all of it on a corpus made here."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.quality import build_suffix_peer, checks
from benchmarks.quality.cases import Resumption
from benchmarks.quality.checks import Point, curve, height
from benchmarks.quality.earlier import CachedSuffixDecoding, EarlierResponses
from benchmarks.quality.replays import Reliability
from benchmarks.quality.runs import (
    WITHOUT_RECIPES,
    Counts,
    Entry,
    Knowledge,
    Run,
    run_all,
    run_records,
    total,
)
from gpu_align import Recipes
from gpu_align.policies import SuffixDecoding
from gpu_align.simulate import Record


def entries(count: int = 6) -> list[Entry]:
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        before = [rng.randrange(40) for _ in range(120)]
        after = [*before[:50], *(rng.randrange(40, 60) for _ in range(5)), *before[55:]]
        kind = ("python", "json")[seed % 2]
        tokens = ("bytes", "bpe")[seed % 2]
        found.append(Entry(Record(str(seed), [], before, after), kind, kind, f"p{seed % 3}", "test", tokens))
    return found


def test_a_curve_keeps_what_nothing_beats_and_its_height() -> None:
    points = curve([Point(0.5, 10), Point(0.1, 6), Point(0.3, 5), Point(0.5, 9), Point(1.0, 10)])
    assert points == [Point(0.1, 6), Point(0.5, 10)]
    heights = {0.05: None, 0.1: 6, 0.3: pytest.approx(8), 0.5: 10, 9: 10}
    assert {at: height(points, at) for at in heights} == heights
    assert height([], 1) is None


def counts(steps: int, accepted: int, rejected: int) -> Counts:
    return Counts(1, 1000, steps, accepted, rejected)


def test_peer_checks_ask_for_ten_per_cent_at_64_and_for_no_less_elsewhere() -> None:
    runs = {
        Run("gpu_align", 64): counts(100, 900, 90),
        Run("near", 64): counts(105, 895, 90),
        Run("far", 64): counts(120, 880, 600),
        Run("careful", 64): counts(500, 500, 1),
        Run("bound", 64): counts(50, 950, 0),
        Run("gpu_align", 16): counts(100, 900, 90),
        Run("near", 16): counts(105, 895, 90),
    }
    rows = {row.name.split(" (")[0]: row for row in checks.peer_checks(runs, ["bound"])}
    assert {name: row.passed for name, row in rows.items()} == {
        "K=64: over near": False,
        "K=64: over far": True,
        "K=64: over careful": False,
        "K=16: over near": True,
    }
    assert "few rejections" in rows["K=64: over careful"].value
    # The curve is that of one drafter.
    both = {
        Run("gpu_align", 64): counts(100, 900, 90),
        Run("gpu_align", 64, WITHOUT_RECIPES): counts(50, 900, 10),
    }
    assert checks.our_curve(both, 64) == [checks.point(both[Run("gpu_align", 64)])]
    assert checks.peer_checks(both, []) == []


def test_verdicts_fail_on_nothing_at_all() -> None:
    assert not checks.perfect_check([]).passed
    assert not any(row.passed for row in checks.one_line_checks([], []))
    assert not any(row.passed for row in checks.unrelated_checks(Counts(), Counts()))
    assert not checks.resumption_check(Resumption()).passed
    assert not checks.reliability_check(Reliability()).passed
    assert not any(row.passed for row in checks.five_checks({}))


def test_workers_count_what_one_process_counts() -> None:
    corpus = entries()
    runs = [Run("gpu_align", 16), Run("prompt_lookup", 16), Run("clairvoyant", 16), Run("recipe_pack", 16)]
    known = {tokens: Knowledge(some_recipes(corpus, tokens)) for tokens in ("bytes", "bpe")}
    only_json = lambda run, entry: run.policy != "clairvoyant" or entry.kind == "json"  # noqa: E731
    found = run_all(runs, corpus, 2, only_json, known=known)
    for run in runs:
        assert found[run]
        assert all(found[run][i].id == corpus[i].record.id for i in found[run])
        alone = [run_records(run, [corpus[i].record], known[corpus[i].tokens])[0] for i in sorted(found[run])]
        assert total(found[run], corpus).as_json() == total(dict(enumerate(alone)), corpus).as_json()
    assert len(found[runs[2]]) == 3
    assert total(found[runs[3]], corpus).accepted > 0
    ours = total(found[runs[0]], corpus)
    assert ours.reliability.accepted.sum() == ours.accepted > 0


def some_recipes(corpus: list[Entry], tokens: str) -> Recipes:
    """After each token that one output of these tokens has, what came first after it."""
    output = next(e.record.output for e in corpus if e.tokens == tokens)
    after = dict(zip(reversed(output[:-1]), reversed(output[1:]), strict=True))
    return Recipes.from_lists([([a], [b], [0.9]) for a, b in sorted(after.items())])


def test_recipes_make_a_difference_unless_they_are_off() -> None:
    """New tokens that nothing else has: after the first of them recipes know all of them."""
    new = list(range(100, 108))
    record = Record("a", [], list(range(40)), [*range(20), *new, *range(20, 40)])
    known = Knowledge(Recipes.from_lists([([new[0]], new[1:], [0.9] * 7)]))
    ours, off = Run("gpu_align", 16), Run("gpu_align", 16, WITHOUT_RECIPES)
    [[with_them], [without]] = (run_records(run, [record], known) for run in (ours, off))
    [nothing] = run_records(ours, [record])
    assert with_them.steps < without.steps == nothing.steps
    assert (ours.name, off.name) == ("gpu_align", "gpu_align recipes=off")
    with pytest.raises(ValueError, match="recipe_pack: expected recipes"):
        run_records(Run("recipe_pack", 16), [record])


PEER = build_suffix_peer.DEFAULT_FOLDER


@pytest.mark.skipif(
    not (PEER / build_suffix_peer.STAMP).is_file(), reason="python -m benchmarks.quality.build_suffix_peer"
)
def test_suffix_decoding_follows_the_longest_most_frequent_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEER.resolve()))
    earlier = EarlierResponses([[20, 21, 22, 23], [20, 21, 22, 24], [20, 21, 22, 24], [5, 7]], 64)
    one, four = SuffixDecoding(1), SuffixDecoding(4)
    knows, also = (CachedSuffixDecoding(4, earlier) for _ in "ab")
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9, 1, 2, 9]
    rows = [
        (one, text, 64, [5], [6]),  # one token matched, one drafted
        (one, text, 64, [5, 6], [7, 8]),
        (four, text, 3, [1, 2], [9, 1, 2]),  # two of three times, and K
        (four, [5, 6, 5, 6], 1, [22, 5], [6]),
    ]
    for found in (knows, also, knows):  # shared, and asked again
        rows.append((found, [1, 2, 3, 4, 5, 6], 8, [20, 21], [22, 24]))  # two of three times
        rows.append((found, [5, 6, 5, 6], 1, [22, 5], [7]))  # always there; here 6, two of three times
    for policy, prompt, k, output, draft in rows:
        policy.start([], prompt, k)
        policy.extend(output)
        assert policy.propose() == draft
