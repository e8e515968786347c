"""`draft`: edits that were made before are made again. All by hand; `test_step` compares at random."""

import pytest

from gpu_align import Source
from gpu_align.ops.constants import SURVIVAL_ONE
from tests.gpu_align.step_harness import BACKENDS, Request, distinct, flat_curves

README = [ord(c) for c in "a = get(n)\nb = get(m)\n"], [ord(c) for c in "a = fetch(n)\nb"]
A, B, C = (distinct(8, start) for start in (100, 120, 140))
LINE, LONG = [1, 2, 3], distinct(7, 1)
#: Four of the changed lines; in the output three tokens that stay after each.
FEW = [distinct(3, 100 + 20 * i) for i in range(5)]


def lines(*pairs):
    """Prediction and output: for each ``(line, as it is written)`` that line and eight tokens that stay."""
    gaps = [distinct(8, 100 + 20 * i) for i in range(len(pairs))]
    prediction, output = (
        [t for pair, gap in zip(pairs, gaps, strict=True) for t in (*pair[side], *gap)] for side in (0, 1)
    )
    return prediction, output


def once(before, replayed):
    """It is made again unless more of the edits before it were taken back than repeated."""
    prediction, output = lines(*([[*map(ord, line)] for line in pair] for pair in (*before, ("def", "dxf"))))
    return [*prediction, *map(ord, "def"), 900], output, [*map(ord, "dxf" if replayed else "def"), 900]


AGAIN, BACK = [("abc", "axc"), ("abc", "axc")], [("klm", "kxm"), ("klm", "klm")]
#: Three edits that were taken back, and one that was made twice.
TWICE = lines(
    *[pair for i in (20, 23, 26) for pair in (([i, i + 1, i + 2], [i, 9, i + 2]), ([i, i + 1, i + 2],) * 2)],
    *[(LINE, [1, 9, 3])] * 2,
)

#: Prediction, output, what is drafted; K is 32.
ROWS = {
    "readme": (*README, [ord(c) for c in " = fetch(m)\n"]),
    **{
        f"one edit: {changed}": ([*LINE, *A, *LINE, *B], [*changed, *A], [*changed, *B])
        for changed in ([1, 9, 3], [1, 9, 8, 7, 3], [1, 3], [1, 9, 2, 3], LINE)
    },
    # Away for a while, and back.
    "at most two in a draft": (
        [*LINE, *FEW[0], *distinct(4, 500), *(t for gap in FEW[1:] for t in (*LINE, *gap))],
        [1, 9, 3, *FEW[0], *distinct(2, 800), *distinct(4, 500)],
        [1, 9, 3, *FEW[1], 1, 9, 3, *FEW[2], *LINE, *FEW[3], *LINE, *FEW[4]],
    ),
    "the latest of two": ([*LINE, *A, *LINE, *B, *LINE, *C], [1, 9, 3, *A, 1, 8, 7, 3, *B], [1, 8, 7, 3, *C]),
    "one that was not made again": ([*LINE, *A, *LINE, *B, *LINE, *C], [1, 9, 3, *A, *LINE, *B], [*LINE, *C]),
    "once": once([], True),
    "once, taken back": once([("abc", "axc"), ("abc", "abc")], False),
    "once, repeated": once(AGAIN, True),
    "once, as often as taken back": once([*AGAIN, *BACK], True),
    "once, taken back twice": once([("abc", "axc"), ("abc", "abc"), *BACK], False),
    "twice, whatever was taken back": ([*TWICE[0], 1, 2, 3, 900, 901], TWICE[1], [1, 9, 3, 900, 901]),
    **{
        f"other surroundings: {other}": ([*LINE, *A, *other, *B], [1, 9, 3, *A], [*other, *B])
        for other in ([4, 2, 3], [1, 4, 3], [1, 2, 4])
    },
    # There is no token before it, and no other place is like that.
    "at the beginning": ([2, 3, *A, 2, 3, *B], [9, 3, *A], [2, 3, *B]),
    # A 9 was inserted in a run of equal tokens: each place of it is like the one before.
    "the token behind is copied": (
        [1, 2, 2, 2, 2, *A, 5, 2, 2, 2, 2, *B], [1, 2, 9, 2, 2, 2, *A], [5, 2, 9, 2, 9, 2, 2, *B],
    ),
    "where the draft begins": ([*LINE, *A, *LINE, *B], [1, 9, 3, *A, 1], [9, 3, *B]),
    "more than the prediction has left": (
        [*LINE, *A, *LINE], [1, *distinct(16, 200), 3, *A], [1, *distinct(16, 200), 3],
    ),
    # Nothing is behind the last token, so that is no place.
    "the last two tokens": ([*LINE, *A, 1, 2], [1, 9, 3, *A], [1, 2]),
    # Five tokens taken out: all of them have to be there.
    **{
        f"a deletion, {left} left": (
            [*LONG, *A, *LONG[:left]], [1, 7, *A], [1] if left == 6 else [1, 7] if left == 7 else LONG[:left],
        )
        for left in range(3, 8)
    },
    "outside the vocabulary": ([*LINE, *A, *LINE, *B], [1, 9, -5, 3, *A], [1, 9]),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_edits(backend, name):
    prediction, output, expected = ROWS[name]
    curves = flat_curves(SURVIVAL_ONE, K=32)
    assert Request(backend, prediction, K=32, curves=curves).step(output).tokens == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_and_what_ends_a_draft(backend):
    prediction, output = [*LINE, *A, *LINE, *B], [1, 9, 8, 7, 6, 3, *A]
    for K in (1, 4, 8):  # the length is counted with the edits
        request = Request(backend, prediction, K=K, curves=flat_curves(SURVIVAL_ONE, K))
        assert request.step(output).tokens == [1, 9, 8, 7, 6, 3, *B][:K]
    how = {"K": 32, "curves": flat_curves(SURVIVAL_ONE, K=32)}
    assert Request(backend, prediction, capacity=len(output) + 3, **how).step(output).tokens == [1, 9, 8]
    # A deletion of all that is left drafts nothing.
    request = Request(backend, [*LONG, *A, *LONG[:6]], use_context=False, **how)
    assert request.step([1, 7, *A])[:2] == ([1], Source.PREDICTION)
    assert request.step([1, 7, *A, 1]) == ([], Source.NONE, [])
    # What is drafted from the context is copied: the edit 50 -> 51 is known, the context has 107 50 60.
    prompt = [*distinct(9, 300), 107, 50, *distinct(3, 60), 301]
    request = Request(backend, [*A, 50, *distinct(20, 60)], prompt, **how)
    tokens, source, _ = request.step([*A, 51, *distinct(6, 60), *distinct(9, 300)])
    assert (tokens[:6], source) == ([107, 50, 60, 61, 62, 301], Source.CONTEXT)


def test_the_example_of_the_readme_needs_no_more_than_the_shipped_table():
    tokens = Request("reference", README[0], K=16).step(README[1]).tokens
    assert " = fetch(m)\n".startswith("".join(map(chr, tokens)))
    assert len(tokens) > 3
