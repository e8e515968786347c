"""`realign`: where a request stands in its prediction, on both backends, against plain Python and by hand."""

import random

import pytest

from gpu_align.ops.constants import AT_START, MAX_EDIT_LEN, MAX_EDITS, WINDOW
from gpu_align.ops.reference.realign import score, standing
from tests.gpu_align.step_harness import BACKENDS, INTERPRETED, Edit, Request, edited, request_in
from tests.gpu_align.step_oracle import Oracle

NOVEL = 999  # in no prediction below

on_both = pytest.mark.parametrize("backend", BACKENDS)


def after(backend, prediction, output, **settings):
    """Where a request stands after `output`, taken in at once."""
    request = Request(backend, prediction, **settings)
    request.step(output)
    return request.standing


def common_lengths(output, window):
    """H of every prefix of the window, by the textbook table; as long as the kept row."""
    row = [0] * (WINDOW + 1)
    for token in output:
        new = [0]
        for j in range(WINDOW):
            same = j < len(window) and window[j] == token
            new.append(row[j] + 1 if same else max(row[j + 1], new[j]))
        row = new
    return row[1:]


def distinct(n, start=0):
    return list(range(start, start + n))


@on_both
class TestFollow:
    @pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 128, 200])
    def test_an_output_that_is_the_prediction(self, backend, n):
        assert after(backend, distinct(200), distinct(n)) == (True, n, None, None, n, [], None)

    def test_the_prompt_is_not_followed(self, backend):
        assert after(backend, distinct(9), distinct(3), prompt=distinct(9)).cursor == 3

    def test_before_the_end_of_the_prompt_nothing_is_taken_in(self, backend):
        request = Request(backend, distinct(9), prompt=distinct(5))
        request.prompt = request.prompt[:2]  # a chunk of the prefill
        request.step([])
        assert request.standing.cursor == 0
        request.prompt = distinct(5)
        request.step([0, 1])
        assert request.standing.cursor == 2


@on_both
class TestLeave:
    def test_where_the_prediction_says_something_else(self, backend):
        found = after(backend, distinct(40), [*distinct(10), NOVEL])
        assert found == (False, None, 10, 10, 10, [], [0] * WINDOW)

    def test_at_once(self, backend):
        assert after(backend, distinct(40), [NOVEL]) == (False, None, 0, 0, 0, [], [0] * WINDOW)

    def test_at_the_end_of_the_prediction(self, backend):
        found = after(backend, distinct(9), [*distinct(9), 0])
        assert found == (False, None, 9, 9, 9, [], [0] * WINDOW)

    @pytest.mark.parametrize("n", [63, 64, 65])
    def test_behind_a_long_run(self, backend, n):
        found = after(backend, distinct(90), [*distinct(n), NOVEL, NOVEL])
        assert (found.anchor, found.diverged_at, found.num_in_sync) == (n, n, n)

    @pytest.mark.parametrize("size", [20, 300])
    def test_the_row_is_that_of_the_textbook(self, backend, size):
        """Tokens in an order that is never four in a row of the prediction: the request stays away."""
        generator = random.Random(size)
        prediction = distinct(size)
        output = [*distinct(5), *generator.sample(range(6, size, 2), min(size // 2 - 3, 30))]
        found = after(backend, prediction, output)
        assert (found.in_sync, found.anchor, found.diverged_at) == (False, 5, 5)
        assert found.row == common_lengths(output[5:], prediction[5 : 5 + WINDOW])

    @pytest.mark.parametrize("written", [[1, 3, 1, 3, 0, 2, 3], [3, 3, 2, 0, 3, 1, 3]])
    def test_a_carry_passes_over_words_without_a_match(self, backend, written):
        """A word of ones without a match passes on the carry that comes in, and none where none comes in."""
        prediction = [token for token in range(8) for _ in range(32)]
        found = after(backend, prediction, [NOVEL, *written])
        assert (found.in_sync, found.anchor) == (False, 0)
        assert found.row == common_lengths(written, prediction)

    @pytest.mark.parametrize("token", [-1, -3, 2**31 - 1, -(2**31)])
    def test_any_int32_may_be_written(self, backend, token):
        """No token of the output is taken for one that the prediction does not have."""
        found = after(backend, distinct(9), [*distinct(6), *[token] * 5])
        assert found == (False, None, 6, 6, 6, [], [0] * WINDOW)
        found = after(backend, [3], [token] * 5)
        assert (found.in_sync, found.anchor, found.row) == (False, 0, [0] * WINDOW)


@on_both
class TestNear:
    """Four tokens that stand together within 32 of the anchor."""

    def test_the_example_of_the_readme(self, backend):
        prediction, output = [5, 6, 7, 8, 9, 2, 3], [5, 6, 1, 8, 9, 2, 3]
        for n, row in [(3, [0, 0, 0, 0, 0]), (4, [0, 1, 1, 1, 1]), (6, [0, 1, 2, 3, 3])]:
            found = after(backend, prediction, output[:n])
            assert (found.in_sync, found.anchor, found.diverged_at, found.num_in_sync) == (False, 2, 2, 2)
            assert found.row[:5] == row
        # 7 was replaced by 1, the output's third token.
        assert after(backend, prediction, output) == (True, 7, None, None, 6, [Edit(6, 7, 8, 2, 1, 1)], None)

    def test_insertion(self, backend):
        found = after(backend, distinct(40), [*distinct(10), NOVEL, 800, *distinct(4, 10)])
        assert (found.cursor, found.num_in_sync, found.edits) == (14, 14, [Edit(9, 10, 11, 10, 0, 2)])

    def test_deletion(self, backend):
        found = after(backend, distinct(40), [*distinct(10), *distinct(4, 13)])
        assert (found.cursor, found.num_in_sync, found.edits) == (17, 14, [Edit(9, 10, 11, 10, 3, 0)])

    def test_not_before_four_tokens_match(self, backend):
        assert not after(backend, distinct(40), [*distinct(10), *distinct(3, 13)]).in_sync

    @pytest.mark.parametrize(("skipped", "back"), [(27, True), (28, False)])
    def test_how_far_it_looks(self, backend, skipped, back):
        """The end behind the four tokens is less than 32 from the anchor. (14 output tokens: not a far look.)"""
        found = after(backend, distinct(90), [*distinct(10), *distinct(4, 10 + skipped)])
        assert found.in_sync == back

    def test_the_first_of_several(self, backend):
        prediction = [*distinct(10), 50, 1, 2, 3, 4, 51, 1, 2, 3, 4, 52, 53]
        found = after(backend, prediction, [*distinct(10), NOVEL, 1, 2, 3, 4])
        assert found.cursor == 15

    def test_never_before_the_anchor(self, backend):
        """Four tokens that stand just before it are where the output came from."""
        prediction = distinct(40)
        found = after(backend, prediction, [*distinct(20), NOVEL, *distinct(4, 10)])
        assert (found.in_sync, found.anchor) == (False, 20)

    def test_the_four_may_begin_before_the_place_that_was_left(self, backend):
        """`7 8 9` stand before the anchor and are written again before what comes next."""
        prediction = [*distinct(10), 7, 8, 9, 50, 60, 61]
        found = after(backend, prediction, [*distinct(10), 50])
        # Of 7 8 9 50 only the last token is behind the anchor: that one follows, 7 8 9 were taken out.
        assert (found.in_sync, found.cursor, found.num_in_sync) == (True, 14, 11)
        assert found.edits == [Edit(9, 7, 8, 10, 3, 0)]

    def test_at_the_end_of_the_prediction(self, backend):
        found = after(backend, distinct(20), [*distinct(10), NOVEL, *distinct(4, 16)])
        assert (found.in_sync, found.cursor) == (True, 20)

    def test_fewer_than_four_tokens_of_output(self, backend):
        assert not after(backend, [1, 2, 3, 4, 5], [2, 3, 4], prompt=[1]).in_sync
        assert after(backend, [1, 2, 3, 4, 5, 6], [2, 3, 4, 5], prompt=[1]).in_sync


@on_both
class TestFar:
    """Eight tokens that stand together anywhere, at every eighth token of the output."""

    @pytest.mark.parametrize("first", [4, 5, 6, 7, 8, 9])
    def test_ahead_at_the_next_multiple_of_eight(self, backend, first):
        prediction = distinct(300)
        back_at = -(-(first + 8) // 8) * 8
        output = [*distinct(first), *distinct(back_at - first, 200)]
        assert not after(backend, prediction, output[:-1]).in_sync
        found = after(backend, prediction, output)
        assert (found.in_sync, found.cursor) == (True, 200 + back_at - first)
        # What follows is counted from where it went on; and an edit this large is not remembered.
        assert (found.num_in_sync, found.edits) == (back_at, [])

    def test_seven_tokens_are_not_enough(self, backend):
        prediction = [*distinct(100), *distinct(7, 500), *distinct(100, 100)]
        assert not after(backend, prediction, [*distinct(8), NOVEL, *distinct(7, 500)]).in_sync

    def test_backward(self, backend):
        output = [*distinct(100), *distinct(12, 200), *distinct(9, 40)]
        found = after(backend, distinct(300), output[:-1])
        assert (found.in_sync, found.cursor) == (True, 48)
        # What is written again counts as followed from here on only, and going back is no edit.
        assert (found.num_in_sync, found.edits) == (112, [])
        assert after(backend, distinct(300), output).num_in_sync == 113

    def test_the_nearest_to_the_anchor_and_at_a_tie_the_one_ahead(self, backend):
        block = distinct(8, 700)
        # The block ends at 30 and at 130; the anchor is what the output follows up to.
        prediction = [*distinct(22), *block, *distinct(92, 100), *block, *distinct(50, 300)]
        for anchor, end in [(16, 30), (72, 30), (79, 30), (80, 130), (88, 130)]:
            inserted = [NOVEL] * (-(anchor + 8) % 8)
            found = after(backend, prediction, [*prediction[:anchor], *inserted, *block])
            expected = min((30, 130), key=lambda e: (abs(e - anchor), e < anchor))
            assert end == expected
            assert (found.in_sync, found.cursor) == (True, end), anchor

    def test_one_end_in_more_than_32_is_out_of_sight(self, backend):
        """The token 7 ends 33 places around the anchor, before the one that would match."""
        many = [t for i in range(17) for t in (7, 100 + i)]
        block = [*distinct(7, 700), 7]
        prediction = [*many, *many, *block, *distinct(9, 800)]
        found = after(backend, prediction, [*many, 500, *[501] * 5, *block])
        assert (len(many) + 6 + 8) % 8 == 0
        assert not found.in_sync
        # With fewer of them it is seen.
        few = [*many, *many[:14], *block, *distinct(9, 800)]
        assert after(backend, few, [*many, 500, *[501] * 5, *block]).in_sync


@on_both
class TestEdits:
    def rewrite(self, prediction, *edits):
        """`prediction` with ``prediction[at : at + old] = new`` for each (at, old, new), and where each begins."""
        output, done, starts = [], 0, []
        for at, old, new in edits:
            output += prediction[done:at]
            starts.append(len(output))
            output += new
            done = at + old
        return output + prediction[done:], starts

    def test_several(self, backend):
        prediction = distinct(200)
        output, starts = self.rewrite(
            prediction, (0, 1, [500]), (30, 0, [501, 502]), (60, 5, []), (90, 2, [503] * 7)
        )
        found = after(backend, prediction, output[:150])
        assert found.edits == [
            Edit(AT_START, 0, 1, starts[0], 1, 1),
            Edit(29, 30, 31, starts[1], 0, 2),
            Edit(59, 60, 61, starts[2], 5, 0),
            Edit(89, 90, 91, starts[3], 2, 7),
        ]
        assert found.num_in_sync == 150 - 1 - 2 - 7

    @pytest.mark.parametrize("size", [MAX_EDIT_LEN, MAX_EDIT_LEN + 1])
    def test_how_large(self, backend, size):
        prediction = distinct(100)
        kept = size <= MAX_EDIT_LEN
        output, _ = self.rewrite(prediction, (20, size, [500]))
        assert after(backend, prediction, output[:60]).edits == [Edit(19, 20, 21, 20, size, 1)] * kept
        output, _ = self.rewrite(prediction, (20, 1, [500] * size))
        assert after(backend, prediction, output[:60]).edits == [Edit(19, 20, 21, 20, 1, size)] * kept

    def test_at_the_last_token_there_are_no_surroundings(self, backend):
        prediction = [*distinct(20), 5, 6, 7, 8]
        # Left at the very end and found again at once: the end has no token at it, and none behind.
        assert after(backend, prediction, [*prediction, 5, 6, 7, 8]).edits == []
        # Left at the last but one.
        assert after(backend, distinct(10), [*distinct(8), *distinct(4, 6)]).edits == [Edit(7, 8, 9, 8, 0, 2)]
        assert after(backend, distinct(9), [*distinct(8), *distinct(4, 5)]).edits == []

    def test_of_more_than_sixteen_the_latest(self, backend):
        prediction = distinct(400)
        cuts = [(10 + 12 * i, 1, [500 + i]) for i in range(MAX_EDITS + 5)]
        output, starts = self.rewrite(prediction, *cuts)
        found = after(backend, prediction, output[:300])
        assert [e.start for e in found.edits] == starts[5:]
        assert [e.at for e in found.edits] == [at for at, _, _ in cuts[5:]]

    def test_a_place_that_is_left_as_it_was_ends_the_edit(self, backend):
        """`1 2 3` became `1 9 3`; where the next one stays `1 2 3`, that edit is not made any more."""
        line, rest = [1, 2, 3], distinct(8, 20)
        prediction = [*line, *rest, *line, *distinct(16, 40)]
        output = [1, 9, 3, *rest, *line, *distinct(4, 40)]
        edit = Edit(1, 2, 3, 1, 1, 1)
        assert after(backend, prediction, output[:12]).edits == [edit]
        assert after(backend, prediction, output[:13]).edits == []
        # A following edit is remembered as ever.
        more = [*output, 99, *distinct(4, 45)]
        assert after(backend, prediction, more).edits == [Edit(43, 44, 45, 18, 1, 1)]

    def test_only_the_edits_of_such_a_place_end(self, backend):
        """Other surroundings: the token before, at or behind the place differs."""
        prediction = [1, 2, 3, *distinct(8, 20), 4, 2, 3, 30, 1, 2, 4, 31, 1, 5, 3, *distinct(9, 40)]
        output = [1, 9, 3, *prediction[3:]]
        assert after(backend, prediction, output).edits == [Edit(1, 2, 3, 1, 1, 1)]

    def test_all_edits_of_such_a_place_end(self, backend):
        line, a, b = [1, 2, 3], distinct(8, 20), distinct(8, 40)
        prediction = [*line, *a, *line, *b, *line, *distinct(8, 60)]
        output = [1, 9, 3, *a, 1, 8, 3, *b, *line, 60]
        assert len(after(backend, prediction, output[:23]).edits) == 2
        assert after(backend, prediction, output).edits == []

    def test_an_insertion_ends_where_the_token_behind_it_comes_at_once(self, backend):
        line, rest = [1, 2, 3], distinct(8, 20)
        prediction = [*line, *rest, *line, *distinct(8, 40)]
        output = [1, 9, 2, 3, *rest, 1, 2]
        assert after(backend, prediction, output[:-1]).edits == [Edit(1, 2, 3, 1, 0, 1)]
        assert after(backend, prediction, output).edits == []

    def test_the_last_place_of_a_prediction_ends_none(self, backend):
        """It has no token behind it, so no edit was made in such a place."""
        prediction = [1, 2, 3, *distinct(8, 20), 1, 2]
        output = [1, 9, 3, *distinct(8, 20), 1, 2]
        assert len(after(backend, prediction, output).edits) == 1


@on_both
class TestTime:
    def walk(self, backend, prompt, prediction, output, splits):
        """Standings by number of output tokens."""
        request = Request(backend, prediction, prompt)
        found, done = {}, 0
        while done < len(output):
            done = min(done + next(splits), len(output))
            request.step(output[:done])
            found[done] = request.standing
        return found

    def test_it_does_not_matter_how_the_tokens_were_split_over_steps(self, backend):
        generator, slow = random.Random(7), backend == "triton" and INTERPRETED
        for alphabet in [30] if slow else [3, 30] * 4:
            prediction = generator.choices(range(alphabet), k=generator.randint(1, 300))
            output = edited(generator, prediction, alphabet, 70 if slow else 150)
            runs = [
                self.walk(backend, [1], prediction, output, iter(splits, None))
                for splits in (
                    lambda: 1,
                    lambda: 150,
                    lambda: generator.choice([1, 2, 7, 17, 40]),
                    lambda: 64,
                    lambda: 8,
                )
            ]
            for other in runs[1:]:
                assert {done: runs[0][done] for done in other} == other

    def test_a_shorter_context_starts_over(self, backend):
        prediction = distinct(100)
        output = [*distinct(10), NOVEL, *distinct(9, 11), 800, *distinct(3, 30)]
        request = Request(backend, prediction)
        for n in (len(output), 11, 5, 16, 0, len(output)):
            request.step(output[:n])
            assert request.standing == after(backend, prediction, output[:n])

    def test_random_edits(self, backend):
        """Against the semantics in plain Python, token by token."""
        for seed in range(3 if backend == "triton" and INTERPRETED else 60):
            generator = random.Random(seed)
            alphabet = generator.choice([2, 4, 40])
            prediction = generator.choices(range(alphabet), k=generator.choice([1, 2, 30, 256, 257, 500]))
            output = edited(generator, prediction, alphabet, 200)
            request = Request(backend, prediction, [1], K=4)
            oracle = Oracle(
                prediction, 1, request.drafter._tables, K=4, quarters=32, vocab_size=1000, capacity=1200
            )
            done = 0
            while done < len(output):
                done = min(done + generator.choice([1, 2, 5, 30]), len(output))
                request.step(output[:done])
                oracle.step([1, *output[:done]])
                found, edits = request.standing, [Edit(*e) for e in oracle.edits if e is not None]
                assert (found.in_sync, found.num_in_sync, found.edits) == (
                    oracle.in_sync,
                    oracle.num_in_sync,
                    edits,
                )
                if oracle.in_sync:
                    assert found.cursor == oracle.cursor
                else:
                    assert (found.anchor, found.diverged_at) == (oracle.anchor, oracle.diverged_at)
                    assert found.row == oracle.row[1:]


class TestStanding:
    """The cursor, and how much worse every place behind the anchor is; on the reference, the kernel keeps it."""

    def stands(self, prediction, output):
        """The cursor, and how much worse each place behind the anchor is, as far as the text goes."""
        request = Request("reference", prediction)
        request.step(output)
        loaded = request_in(request.drafter._state, Request.SLOT, output)
        cursor, top = standing(loaded.prediction, loaded.alignment)
        if request.standing.in_sync:
            assert top == 0
            return cursor, None
        num = min(len(prediction) - request.standing.anchor, WINDOW)
        return cursor, [top - score(loaded.alignment.row, j) for j in range(num + 1)]

    def test_one_that_follows_stands_at_its_cursor(self):
        assert self.stands(distinct(30), distinct(10))[0] == 10

    def test_the_example_of_the_readme(self):
        assert self.stands([5, 6, 7, 8, 9], [5, 6, 1]) == (2, [0, 1, 2, 3])
        assert self.stands([5, 6, 7, 8, 9], [5, 6, 1, 9]) == (5, [1, 2, 3, 0])

    def test_three_tokens_skipped_then_two_that_match(self):
        output = [*distinct(10), 13, 14]
        # H of the window 10 11 12 13 14 15 …:  0 0 0 0 1 2 2 2 …, so 4 H - j is  0 -1 -2 -3 0 3 2 1 …
        cursor, deficit = self.stands(distinct(400), output)
        assert cursor == 15
        assert deficit[:9] == [3, 4, 5, 6, 3, 0, 1, 2, 3]
        assert deficit[WINDOW:] == [WINDOW - 5]
        # With one that matches, going on there and staying are worth the same: it stays.
        cursor, deficit = self.stands(distinct(400), output[:-1])
        assert cursor == 10
        assert deficit[:6] == [0, 1, 2, 3, 0, 1]

    def test_places_behind_the_end_are_out_of_the_question(self):
        cursor, deficit = self.stands(distinct(12), [*distinct(10), NOVEL])
        assert cursor == 10
        assert deficit == [0, 1, 2]
        assert self.stands(distinct(10), [*distinct(10), NOVEL])[0] == 10

    def test_it_is_the_smallest_of_the_best(self):
        generator = random.Random(2)
        for _ in range(40):
            prediction = generator.choices(range(6), k=generator.randint(1, 300))
            output = edited(generator, prediction, 6, 60)
            request = Request("reference", prediction)
            request.step(output)
            where = request.standing
            cursor, deficit = self.stands(prediction, output)
            if where.in_sync:
                assert cursor == where.cursor
                continue
            window = prediction[where.anchor : where.anchor + WINDOW]
            heights = [0, *common_lengths(output[where.diverged_at :], window)]
            scores = [4 * heights[j] - j for j in range(len(window) + 1)]
            assert cursor == where.anchor + scores.index(max(scores))
            assert deficit == [max(scores) - s for s in scores]
