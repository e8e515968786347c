"""`draft`: edits that were made before are made again."""

import pytest

from gpu_align import Source
from gpu_align.ops.constants import SURVIVAL_ONE
from tests.gpu_align.step_harness import BACKENDS, Request, flat_curves

NOVEL = 999
on_both = pytest.mark.parametrize("backend", BACKENDS)


def distinct(n, start=0):
    return list(range(start, start + n))


SURE = flat_curves(SURVIVAL_ONE, K=32)


@on_both
class TestEdits:
    """`K` is 32 and all of it is drafted where the text is long enough."""

    def draft(self, backend, prediction, output, **settings):
        return Request(backend, prediction, **{"K": 32, "curves": SURE, **settings}).step(output).tokens

    def test_the_example_of_the_readme(self, backend):
        prediction, output = (
            [ord(c) for c in text] for text in ("a = get(n)\nb = get(m)\n", "a = fetch(n)\nb")
        )
        assert "".join(map(chr, self.draft(backend, prediction, output))) == " = fetch(m)\n"

    def pattern(self, changed, times=1, line=(1, 2, 3), between=8):
        """Lines like `line`, far apart, and an output in which the first of them is `changed`."""
        gaps = [distinct(between, 100 + 20 * i) for i in range(times + 1)]
        prediction = [*line, *gaps[0]]
        for gap in gaps[1:]:
            prediction += [*line, *gap]
        output = [*changed, *gaps[0]]
        return prediction, output, gaps[1:]

    @pytest.mark.parametrize(
        "changed",
        [[1, 9, 3], [1, 9, 8, 7, 3], [1, 3], [1, 9, 2, 3]],
        ids=["one", "three", "none", "inserted"],
    )
    def test_one_edit(self, backend, changed):
        prediction, output, [rest] = self.pattern(changed)
        assert self.draft(backend, prediction, output) == [*changed, *rest]

    def test_without_an_edit_the_prediction_is_copied(self, backend):
        prediction, _, [rest] = self.pattern([])
        assert self.draft(backend, prediction, prediction[:11]) == [1, 2, 3, *rest]

    def test_at_most_two_in_a_draft(self, backend):
        prediction, output, [a, b, c, d] = self.pattern([1, 9, 3], times=4, between=3)
        assert len(output) == 6
        output += distinct(2, 800)  # away for a while, and back
        prediction[6:6] = [*distinct(4, 500)]
        output += prediction[6:10]
        expected = [1, 9, 3, *a, 1, 9, 3, *b, 1, 2, 3, *c, 1, 2, 3, *d]
        assert self.draft(backend, prediction, output) == expected

    def test_the_latest_of_two(self, backend):
        line, a, b, c = [1, 2, 3], distinct(8, 100), distinct(8, 120), distinct(8, 140)
        prediction = [*line, *a, *line, *b, *line, *c]
        output = [1, 9, 3, *a, 1, 8, 7, 3, *b]
        assert self.draft(backend, prediction, output) == [1, 8, 7, 3, *c]

    def test_an_edit_that_was_not_made_again_is_gone(self, backend):
        line, a, b, c = [1, 2, 3], distinct(8, 100), distinct(8, 120), distinct(8, 140)
        prediction = [*line, *a, *line, *b, *line, *c]
        assert self.draft(backend, prediction, [1, 9, 3, *a, *line, *b]) == [*line, *c]

    def lines(self, *pairs):
        """Prediction and output: for each ``(line, as it is written)`` that line and eight tokens that stay."""
        gaps = [distinct(8, 100 + 20 * i) for i in range(len(pairs))]
        prediction = [t for (line, _), gap in zip(pairs, gaps, strict=True) for t in (*line, *gap)]
        return prediction, [t for (_, line), gap in zip(pairs, gaps, strict=True) for t in (*line, *gap)]

    @pytest.mark.parametrize(
        ("before", "replayed"),
        [
            ([], True),
            ([("abc", "axc"), ("abc", "abc")], False),
            ([("abc", "axc"), ("abc", "axc")], True),
            ([("abc", "axc"), ("abc", "axc"), ("klm", "kxm"), ("klm", "klm")], True),
            ([("abc", "axc"), ("abc", "abc"), ("klm", "kxm"), ("klm", "klm")], False),
        ],
        ids=["first", "taken_back", "repeated", "as_often_as_taken_back", "taken_back_twice"],
    )
    def test_an_edit_made_once(self, backend, before, replayed):
        """It is made again unless more of the edits before it were taken back than repeated."""
        pairs = [([*map(ord, old)], [*map(ord, new)]) for old, new in (*before, ("def", "dxf"))]
        prediction, output = self.lines(*pairs)
        line = [*map(ord, "def")]
        expected = [*map(ord, "dxf" if replayed else "def"), 900, 901, 902]
        assert self.draft(backend, [*prediction, *line, 900, 901, 902], output) == expected

    def test_an_edit_made_twice(self, backend):
        """It is made again however many others were taken back."""
        once = [([20 + 3 * i, 21 + 3 * i, 22 + 3 * i]) for i in range(3)]
        taken_back = [pair for line in once for pair in ((line, [line[0], 9, line[2]]), (line, line))]
        prediction, output = self.lines(*taken_back, *[([1, 2, 3], [1, 9, 3])] * 2)
        assert self.draft(backend, [*prediction, 1, 2, 3, 900, 901], output) == [1, 9, 3, 900, 901]

    def test_only_in_the_same_surroundings(self, backend):
        a, b = distinct(8, 100), distinct(8, 120)
        for other in ([4, 2, 3], [1, 4, 3], [1, 2, 4]):
            assert self.draft(backend, [1, 2, 3, *a, *other, *b], [1, 9, 3, *a]) == [*other, *b]

    def test_at_the_beginning_of_the_prediction(self, backend):
        """There is no token before it, and no other place is like that."""
        a, b = distinct(8, 100), distinct(8, 120)
        assert self.draft(backend, [2, 3, *a, 2, 3, *b], [9, 3, *a]) == [2, 3, *b]

    def test_the_token_behind_an_edit_is_copied_as_it_is(self, backend):
        """A 9 was inserted in a run of equal tokens: each place of it is like the one before."""
        run, a, b = [2, 2, 2, 2], distinct(8, 100), distinct(8, 120)
        prediction = [1, *run, *a, 5, *run, *b]
        assert self.draft(backend, prediction, [1, 2, 9, 2, 2, 2, *a]) == [5, 2, 9, 2, 9, 2, 2, *b]

    def test_where_the_draft_begins(self, backend):
        """The cursor is just at such a place."""
        a, b = distinct(8, 100), distinct(8, 120)
        prediction = [1, 2, 3, *a, 1, 2, 3, *b]
        assert self.draft(backend, prediction, [1, 9, 3, *a, 1]) == [9, 3, *b]

    def test_the_length_is_counted_with_the_edits(self, backend):
        prediction, output, [rest] = self.pattern([1, 9, 8, 7, 6, 3])
        for K in (1, 4, 8):
            found = self.draft(backend, prediction, output, K=K, curves=flat_curves(SURVIVAL_ONE, K))
            assert found == [1, 9, 8, 7, 6, 3, *rest][:K]

    def test_more_tokens_than_the_prediction_has_left(self, backend):
        line, a = [1, 2, 3], distinct(8, 100)
        found = self.draft(backend, [*line, *a, *line], [1, *distinct(16, 200), 3, *a])
        assert found == [1, *distinct(16, 200), 3]

    def test_the_last_two_tokens_are_no_place(self, backend):
        """Nothing is behind the last one."""
        a = distinct(8, 100)
        assert self.draft(backend, [1, 2, 3, *a, 1, 2], [1, 9, 3, *a]) == [1, 2]

    def test_a_deletion_needs_all_that_it_takes(self, backend):
        line, a = distinct(7, 1), distinct(8, 100)
        changed = [1, 7]  # 2 … 6 taken out
        for left in range(3, 8):
            found = self.draft(backend, [*line, *a, *line[:left]], [*changed, *a])
            assert found == ([1] if left == 6 else changed if left == 7 else line[:left]), left

    def test_a_deletion_of_all_that_is_left_drafts_nothing(self, backend):
        line, a = distinct(7, 1), distinct(8, 100)
        request = Request(backend, [*line, *a, *line[:6]], K=32, curves=SURE, use_context=False)
        assert request.step([1, 7, *a])[:2] == ([1], Source.PREDICTION)
        assert request.step([1, 7, *a, 1]) == ([], Source.NONE, [])

    def test_what_is_drafted_from_the_context_is_copied(self, backend):
        a = distinct(8, 100)
        prediction = [*a, 50, *[60 + i for i in range(20)]]
        # The edit 50 -> 51 is known, and the context has the tokens 107 50 60 from before.
        prompt = [*distinct(9, 300), 107, 50, 60, 61, 62, 301]
        request = Request(backend, prediction, prompt, K=32, curves=SURE)
        output = [*a, 51, *prediction[9:15], *distinct(9, 300)]
        tokens, source, _ = request.step(output)
        assert source == Source.CONTEXT
        assert tokens[:6] == [107, 50, 60, 61, 62, 301]

    def test_new_tokens_outside_the_vocabulary_end_the_draft(self, backend):
        prediction, output, _ = self.pattern([1, 9, -5, 3])
        assert self.draft(backend, prediction, output) == [1, 9]

    def test_a_full_context_ends_the_draft(self, backend):
        prediction, output, _ = self.pattern([1, 9, 8, 3])
        assert self.draft(backend, prediction, output, capacity=len(output) + 3) == [1, 9, 8]


def test_the_example_of_the_readme_needs_no_more_than_the_shipped_table():
    prediction, output = ([ord(c) for c in text] for text in ("a = get(n)\nb = get(m)\n", "a = fetch(n)\nb"))
    tokens = Request("reference", prediction, K=16).step(output).tokens
    assert " = fetch(m)\n".startswith("".join(map(chr, tokens)))
    assert len(tokens) > 3
