"""`realign` by hand: where a request stands in its prediction. `test_step` compares random ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpu_align.ops.constants import AT_START, MAX_EDIT_LEN, MAX_EDITS, WINDOW
from gpu_align.ops.reference.draft import score_deficit
from gpu_align.ops.reference.realign import cursor_score
from tests.gpu_align.step_harness import BACKENDS, Edit, Request, Standing, distinct, edited, request_in

NOVEL = 999  # in no prediction below
Tokens = list[int]
on_both = pytest.mark.parametrize("backend", BACKENDS)


def after(backend: str, prediction: Tokens, output: Tokens, **settings: Any) -> Standing:
    """Where a request stands after `output`, taken in at once."""
    request = Request(backend, prediction, **settings)
    request.step(output)
    return request.standing


def common_lengths(output: Tokens, window: Tokens) -> Tokens:
    """H of every prefix of the window, by the textbook table; as long as the kept row."""
    row = [0] * (WINDOW + 1)
    for token in output:
        new = [0]
        for j in range(WINDOW):
            same = j < len(window) and window[j] == token
            new.append(row[j] + 1 if same else max(row[j + 1], new[j]))
        row = new
    return row[1:]


def in_sync(cursor: int, num_in_sync: int, *edits: Edit) -> dict[str, Any]:
    return {"in_sync": True, "cursor": cursor, "num_in_sync": num_in_sync, "edits": list(edits)}


def diverged(anchor: int, *written: int, window: Tokens | None = None) -> dict[str, Any]:
    """At its first divergence, having written so much since."""
    row = common_lengths(list(written), window or [])
    return {"in_sync": False, "anchor": anchor, "diverged_at": anchor, "num_in_sync": anchor, "row": row}


def back(is_back: bool) -> dict[str, Any]:
    return {"in_sync": is_back}


#: Tokens in an order that is never four in a row of the prediction: the request stays away.
AWAY = {size: random.Random(size).sample(range(6, size, 2), min(size // 2 - 3, 30)) for size in (20, 300)}
BLOCKS = [token for token in range(8) for _ in range(32)]
SHORT, LINE = [5, 6, 7, 8, 9, 2, 3], [1, 2, 3]
A, B, C = distinct(8, 20), distinct(8, 40), distinct(8, 60)
#: Every 7 ends around the anchor before the one that would match: 34 of them, or 24.
MANY = [t for i in range(17) for t in (7, 100 + i)]
SEVEN = [*distinct(7, 700), 7]

#: Prediction, output, what stands.
ROWS: dict[str, tuple[Tokens, Tokens, dict[str, Any]]] = {
    **{f"in sync for {n}": (distinct(200), distinct(n), in_sync(n, n)) for n in (0, 1, 63, 64, 65, 128, 200)},
    # Divergence.
    "something else": (distinct(40), [*distinct(10), NOVEL], diverged(10)),
    "at once": (distinct(40), [NOVEL], diverged(0)),
    "at the end of the prediction": (distinct(9), [*distinct(9), 0], diverged(9)),
    **{f"after {n}": (distinct(90), [*distinct(n), NOVEL, NOVEL], diverged(n)) for n in (63, 64, 65)},
    **{
        f"row of {size}": (
            distinct(size), [*distinct(5), *order], diverged(5, *order, window=distinct(size)[5 : 5 + WINDOW]),
        )
        for size, order in AWAY.items()
    },
    # A word of ones without a match passes on the carry that comes in, and none where none comes in.
    **{
        f"carry of {written}": (BLOCKS, [NOVEL, *written], diverged(0, *written, window=BLOCKS))
        for written in ([1, 3, 1, 3, 0, 2, 3], [3, 3, 2, 0, 3, 1, 3])
    },
    # No token of the output is taken for one that the prediction does not have.
    **{
        f"token {token}": (distinct(9), [*distinct(6), *[token] * 5], diverged(6))
        for token in (-1, -3, 2**31 - 1, -(2**31))
    },
    # Local resync: four tokens that stand together within 32 of the anchor.
    "readme, 3": (SHORT, [5, 6, 1], diverged(2, 1, window=SHORT[2:])),
    "readme, 4": (SHORT, [5, 6, 1, 8], diverged(2, 1, 8, window=SHORT[2:])),
    "readme, 6": (SHORT, [5, 6, 1, 8, 9, 2], diverged(2, 1, 8, 9, 2, window=SHORT[2:])),
    "readme": (SHORT, [5, 6, 1, 8, 9, 2, 3], in_sync(7, 6, Edit(6, 7, 8, 2, 1, 1))),
    "insertion": (
        distinct(40), [*distinct(10), NOVEL, 800, *distinct(4, 10)], in_sync(14, 14, Edit(9, 10, 11, 10, 0, 2)),
    ),
    "deletion": (distinct(40), [*distinct(10), *distinct(4, 13)], in_sync(17, 14, Edit(9, 10, 11, 10, 3, 0))),
    "three match": (distinct(40), [*distinct(10), *distinct(3, 13)], back(False)),
    # The end behind the four tokens is less than 32 from the anchor; 14 output tokens are no global look.
    "27 skipped": (distinct(90), [*distinct(10), *distinct(4, 37)], back(True)),
    "28 skipped": (distinct(90), [*distinct(10), *distinct(4, 38)], back(False)),
    "the first of several": (
        [*distinct(10), 50, 1, 2, 3, 4, 51, 1, 2, 3, 4, 52], [*distinct(10), NOVEL, 1, 2, 3, 4], {"cursor": 15},
    ),
    # Four tokens just before the anchor are where the output came from.
    "never before it": (distinct(40), [*distinct(20), NOVEL, *distinct(4, 10)], {**back(False), "anchor": 20}),
    # Of 7 8 9 50 only the last token is behind the anchor: that one follows, 7 8 9 were taken out.
    "a match that begins before the anchor": (
        [*distinct(10), 7, 8, 9, 50, 60, 61], [*distinct(10), 50], in_sync(14, 11, Edit(9, 7, 8, 10, 3, 0)),
    ),
    "back at the end": (distinct(20), [*distinct(10), NOVEL, *distinct(4, 16)], {"cursor": 20}),
    # Global resync: eight tokens that stand together anywhere, at every eighth token of the output.
    "seven match": (
        [*distinct(100), *distinct(7, 500), *C], [*distinct(8), NOVEL, *distinct(7, 500)], back(False),
    ),
    # What is written again counts from here on only, and going back is no edit.
    "backward": (distinct(300), [*distinct(100), *distinct(12, 200), *distinct(8, 40)], in_sync(48, 112)),
    "backward, then on": (distinct(300), [*distinct(100), *distinct(12, 200), *distinct(9, 40)], in_sync(49, 113)),
    "33 ends around the anchor": ([*MANY, *MANY, *SEVEN, *C], [*MANY, 500, *[501] * 5, *SEVEN], back(False)),
    "fewer of them": ([*MANY, *MANY[:14], *SEVEN, *C], [*MANY, 500, *[501] * 5, *SEVEN], back(True)),
    # Edits. Diverged at the very end and back at once: the end has no token at it, and none behind.
    "at the last token": ([*distinct(20), 5, 6, 7, 8], [*distinct(20), 5, 6, 7, 8, 5, 6, 7, 8], {"edits": []}),
    "at the last but one": (distinct(10), [*distinct(8), *distinct(4, 6)], {"edits": [Edit(7, 8, 9, 8, 0, 2)]}),
    "nothing behind": (distinct(9), [*distinct(8), *distinct(4, 5)], {"edits": []}),
    # `1 2 3` became `1 9 3`; where the next one stays `1 2 3`, that edit is not made any more.
    "not invalidated yet": (
        [*LINE, *A, *LINE, *distinct(16, 40)], [1, 9, 3, *A, 1], {"edits": [Edit(1, 2, 3, 1, 1, 1)]},
    ),
    "invalidated": ([*LINE, *A, *LINE, *distinct(16, 40)], [1, 9, 3, *A, 1, 2], {"edits": []}),
    "an edit after it": (
        [*LINE, *A, *LINE, *distinct(16, 40)], [1, 9, 3, *A, *LINE, *distinct(4, 40), 99, *distinct(4, 45)],
        {"edits": [Edit(43, 44, 45, 18, 1, 1)]},
    ),
    # Other surroundings: the token before, at or behind the place differs.
    "not by others": (
        [1, 2, 3, *A, 4, 2, 3, 30, 1, 2, 4, 31, 1, 5, 3, *distinct(9, 40)],
        [1, 9, 3, *A, 4, 2, 3, 30, 1, 2, 4, 31, 1, 5, 3, *distinct(9, 40)], {"edits": [Edit(1, 2, 3, 1, 1, 1)]},
    ),
    "all of them": ([*LINE, *A, *LINE, *B, *LINE, *C], [1, 9, 3, *A, 1, 8, 3, *B, *LINE, 60], {"edits": []}),
    # An insertion is invalidated where the token behind it comes at once.
    "an insertion, before": ([*LINE, *A, *LINE, *B], [1, 9, 2, 3, *A, 1], {"edits": [Edit(1, 2, 3, 1, 0, 1)]}),
    "an insertion": ([*LINE, *A, *LINE, *B], [1, 9, 2, 3, *A, 1, 2], {"edits": []}),
    # The last place of a prediction has no token behind it, so no edit was made in such a place.
    "not by the last place": ([*LINE, *A, 1, 2], [1, 9, 3, *A, 1, 2], {"edits": [Edit(1, 2, 3, 1, 1, 1)]}),
}  # fmt: skip


@on_both
@pytest.mark.parametrize("name", ROWS)
def test_standing(backend: str, name: str) -> None:
    prediction, output, expected = ROWS[name]
    found = after(backend, prediction, output)._asdict()
    assert {field: found[field] for field in expected} == expected


@on_both
def test_the_prompt_is_not_followed(backend: str) -> None:
    assert after(backend, distinct(9), distinct(3), prompt=distinct(9)).cursor == 3
    # Nor are fewer than four tokens of output, whatever is before them.
    for output in ([2, 3, 4], [2, 3, 4, 5]):
        assert after(backend, [1, 2, 3, 4, 5, 6], output, prompt=[1]).in_sync == (len(output) == 4)
    request = Request(backend, distinct(9), prompt=distinct(5))
    for request.prompt, output, cursor in ((distinct(2), [], 0), (distinct(5), [0, 1], 2)):
        request.step(output)
        assert request.standing.cursor == cursor


@on_both
@pytest.mark.parametrize("first", [4, 5, 6, 7, 8, 9])
def test_a_global_resync_is_at_the_next_multiple_of_eight(backend: str, first: int) -> None:
    back_at = -(-(first + 8) // 8) * 8
    output = [*distinct(first), *distinct(back_at - first, 200)]
    assert not after(backend, distinct(300), output[:-1]).in_sync
    # What follows is counted from where it went on; and an edit this large is not remembered.
    found = after(backend, distinct(300), output)
    assert found[:2] == (True, 200 + back_at - first)
    assert (found.num_in_sync, found.edits) == (back_at, [])


@on_both
@pytest.mark.parametrize(("anchor", "end"), [(16, 30), (72, 30), (79, 30), (80, 130), (88, 130)])
def test_the_nearest_to_the_anchor_and_at_a_tie_the_one_ahead(backend: str, anchor: int, end: int) -> None:
    """A block that ends at 30 and at 130; the anchor is what the output follows up to."""
    block = distinct(8, 700)
    prediction = [*distinct(22), *block, *distinct(92, 100), *block, *distinct(50, 300)]
    inserted = [NOVEL] * (-(anchor + 8) % 8)
    assert after(backend, prediction, [*prediction[:anchor], *inserted, *block])[:2] == (True, end)


def rewrite(prediction: Tokens, *edits: tuple[int, int, Tokens]) -> tuple[Tokens, Tokens]:
    """`prediction` with ``prediction[at : at + old] = new`` for each (at, old, new), and where each begins."""
    output: Tokens = []
    done, starts = 0, []
    for at, old, new in edits:
        output += prediction[done:at]
        starts.append(len(output))
        output += new
        done = at + old
    return output + prediction[done:], starts


@on_both
class TestEdits:
    def test_several(self, backend: str) -> None:
        cuts = [(0, 1, [500]), (30, 0, [501, 502]), (60, 5, []), (90, 2, [503] * 7)]
        output, starts = rewrite(distinct(200), *cuts)
        found = after(backend, distinct(200), output[:150])
        assert found.edits == [
            Edit(at - 1 if at else AT_START, at, at + 1, start, old, len(new))
            for (at, old, new), start in zip(cuts, starts, strict=True)
        ]
        assert found.num_in_sync == 150 - 1 - 2 - 7

    @pytest.mark.parametrize("size", [MAX_EDIT_LEN, MAX_EDIT_LEN + 1])
    def test_how_large(self, backend: str, size: int) -> None:
        for old, new in ((size, 1), (1, size)):
            output, _ = rewrite(distinct(100), (20, old, [500] * new))
            edits = [Edit(19, 20, 21, 20, old, new)] * (size <= MAX_EDIT_LEN)
            assert after(backend, distinct(100), output[:60]).edits == edits

    def test_of_more_than_sixteen_the_latest(self, backend: str) -> None:
        cuts = [(10 + 12 * i, 1, [500 + i]) for i in range(MAX_EDITS + 5)]
        output, starts = rewrite(distinct(400), *cuts)
        found = [(e.at, e.start) for e in after(backend, distinct(400), output[:300]).edits if e]
        assert found == [(at, start) for (at, _, _), start in zip(cuts[5:], starts[5:], strict=True)]


@on_both
def test_a_shorter_context_starts_over(backend: str) -> None:
    output = [*distinct(10), NOVEL, *distinct(9, 11), 800, *distinct(3, 30)]
    request = Request(backend, distinct(100))
    for n in (len(output), 11, 5, 16, 0, len(output)):
        request.step(output[:n])
        assert request.standing == after(backend, distinct(100), output[:n])


def stands(prediction: Tokens, output: Tokens) -> tuple[int, Tokens | None, Standing]:
    """On the reference, the kernel keeps it: the cursor, how much worse each place behind the anchor is, as far as
    the text goes, and the rest."""
    request = Request("reference", prediction)
    request.step(output)
    loaded = request_in(request.drafter._state, Request.SLOT, output)
    where, alignment = request.standing, loaded.alignment
    if where.in_sync:
        assert where.cursor is not None
        return where.cursor, None, where
    assert where.anchor is not None
    num = min(len(prediction) - where.anchor, WINDOW)
    j, top = cursor_score(alignment.row, num)
    cursor, places = where.anchor + j, range(where.anchor, where.anchor + num + 1)
    return cursor, [score_deficit(i, len(prediction), alignment, cursor, top) for i in places], where


@pytest.mark.parametrize(
    ("prediction", "output", "cursor", "deficit"),
    [
        (distinct(30), distinct(10), 10, None),
        ([5, 6, 7, 8, 9], [5, 6, 1], 2, [0, 1, 2, 3]),
        ([5, 6, 7, 8, 9], [5, 6, 1, 9], 5, [1, 2, 3, 0]),
        # H of the window 10 11 12 13 14 15 …:  0 0 0 0 1 2 2 2 …, so 4 H - j is  0 -1 -2 -3 0 3 2 1 …
        (distinct(400), [*distinct(10), 13, 14], 15, [3, 4, 5, 6, 3, *range(WINDOW - 4)]),
        # With one that matches, going on there and staying are worth the same: it stays.
        (distinct(400), [*distinct(10), 13], 10, [0, 1, 2, 3, *range(WINDOW - 3)]),
        # Places behind the end are out of the question.
        (distinct(12), [*distinct(10), NOVEL], 10, [0, 1, 2]),
        (distinct(10), [*distinct(10), NOVEL], 10, [0]),
    ],
)  # fmt: skip
def test_the_cursor_and_deficits(
    prediction: Tokens, output: Tokens, cursor: int, deficit: Tokens | None
) -> None:
    assert stands(prediction, output)[:2] == (cursor, deficit)


def test_the_cursor_is_the_smallest_of_the_best() -> None:
    generator = random.Random(2)
    for _ in range(40):
        prediction = generator.choices(range(6), k=generator.randint(1, 300))
        output = edited(generator, prediction, 6, 60)
        cursor, deficit, where = stands(prediction, output)
        if where.in_sync:
            assert cursor == where.cursor
            continue
        window = prediction[where.anchor : where.anchor + WINDOW]
        heights = [0, *common_lengths(output[where.diverged_at :], window)]
        scores = [4 * heights[j] - j for j in range(len(window) + 1)]
        assert cursor == where.anchor + scores.index(max(scores))
        assert deficit == [max(scores) - s for s in scores]
