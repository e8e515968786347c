"""`draft`: candidates and their classes, the choice, and what is written; by hand and in plain Python."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gpu_align import Source
from gpu_align.ops.constants import NUM_CLASSES, NUM_IN_SYNC, SURVIVAL_ONE
from gpu_align.ops.draft import allocate_draft
from gpu_align.simulate import Record, replay
from gpu_align.tools.explain import look
from gpu_align.tools.simulate.policies import our_drafter
from tests.gpu_align.step_harness import BACKENDS, Request, distinct, edited, flat_curves
from tests.gpu_align.step_oracle import Oracle

NOVEL = 999
CURSOR = 6  # the lane at the cursor; from CURSOR - 2 to CURSOR + 16 the window
CONTEXT = 23  # the first lane of the context
LENGTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
MARGINS = (-3, -1, 0, 1, 2, 3, 5, 9, 17)
PLACES = np.arange(NUM_CLASSES) // 3 % 8

on_both = pytest.mark.parametrize("backend", BACKENDS)


class Lane(NamedTuple):
    """A candidate: where it is, how much matches, and its class in parts."""

    position: int
    matched: int
    length_bucket: int
    margin_bucket: int
    place: int
    adherence: int


def lanes(prediction, output, prompt=(), followed=None, **config):
    """The 27 candidates of a request after `output`, None where there is none; on the reference.

    followed: put in place of how many tokens of the output have followed the prediction.
    """
    request = Request("reference", prediction, prompt, **config)
    request.step(output)
    drafter = request.drafter
    if followed is not None:
        drafter._state.align_state[Request.SLOT, NUM_IN_SYNC] = followed
    found = look(
        drafter._state.numpy(), drafter._tables.numpy(), drafter._recipes.numpy(),
        request.token_ids.numpy(), np.array([Request.SLOT]), np.array([len(prompt) + len(output)]),
        drafter._settings,
    ).candidates  # fmt: skip
    fields = found.position, found.remaining, found.matched, found.class_id
    rows = zip(*(field[0].tolist() for field in fields), strict=True)
    return [
        Lane(p, m, class_id // 240, class_id // 24 % 10, class_id // 3 % 8, class_id % 3)
        if room > 0
        else None
        for p, room, m, class_id in rows
    ]


def at_places(prediction, output, **config):
    """The place of every candidate position in the prediction."""
    return {lane.position: lane.place for lane in lanes(prediction, output, **config)[:CONTEXT] if lane}


def bucket(value, edges):
    return sum(value >= edge for edge in edges)


#: An output away from its prediction, worked out in the comments.
PREDICTION = [8, 50, 7, 8, 51, 8, 52, 7, 8, 53, 8, 54, 8, 55]
PROMPT, OUTPUT = [8, 7, 8], [7, 8]
# It leaves at once: the anchor is 0. H is 0 1 1 1 2 2 …, 4 H - j is 0 3 2 1 4 3 …: the cursor is 4.
# The 8 ends at 1, 4, 6, 9, 11, 13; before the ends 4 and 9 there is a 7, too. Around 4, the end 6 comes before 1.
# In the context 8 7 8 7 8 the 8 ends at 1 and 3; before 3 three tokens match.


class TestCandidates:
    def test_the_longest_matches_then_the_window_then_the_context(self):
        found = lanes(PREDICTION, OUTPUT, PROMPT)
        assert [lane[:2] for lane in found[:4]] == [(4, 2), (9, 2), (6, 1), (1, 1)]
        window = found[4:CONTEXT]
        assert [lane.position for lane in window if lane] == list(range(2, 14))
        assert window[12:] == [None] * 7
        assert {lane.position: lane.matched for lane in window if lane and lane.matched} == {
            4: 2, 6: 1, 9: 2, 11: 1, 13: 1,
        }  # fmt: skip
        assert [lane and lane[:2] for lane in found[CONTEXT:]] == [(3, 3), (1, 1), None, None]

    def test_margins(self):
        """What goes on differently, and matches longest: 7 follows three tokens, 51 and 53 follow two."""
        found = lanes(PREDICTION, OUTPUT, PROMPT, followed=1)
        margins = [lane and lane.margin_bucket for lane in found]
        expected = [2 - 3, 2 - 3, 1 - 3, 1 - 3]
        # In the window, from 2 to 13. The 7s at 2 and 7 agree with the longest match: their runner_up is 2 long.
        expected += [0 - 2, 0 - 3, 2 - 3, 0 - 3, 1 - 3, 0 - 2, 0 - 3, 2 - 3, 0 - 3, 1 - 3, 0 - 3, 1 - 3]
        expected = [bucket(m, MARGINS) for m in expected] + [None] * 7
        # In the context both go on with the 7.
        assert margins == [*expected, bucket(3 - 2, MARGINS), bucket(1 - 2, MARGINS), None, None]

    def test_margins_where_the_output_does_not_follow_the_prediction(self):
        """The prediction is no runner-up: only the 7 of the context is, which three tokens are before."""
        found = lanes(PREDICTION, OUTPUT, PROMPT)
        assert found[CURSOR].adherence == 0
        margins = [lane and lane.margin_bucket for lane in found]
        expected = [2 - 3, 2 - 3, 1 - 3, 1 - 3]
        # The 7s at 2 and 7 agree with it, and nothing else is heard.
        expected += [0 - 0, 0 - 3, 2 - 3, 0 - 3, 1 - 3, 0 - 0, 0 - 3, 2 - 3, 0 - 3, 1 - 3, 0 - 3, 1 - 3]
        expected = [bucket(m, MARGINS) for m in expected] + [None] * 7
        assert margins == [*expected, bucket(3 - 0, MARGINS), bucket(1 - 0, MARGINS), None, None]
        # Without a context there is nothing to be heard at all.
        alone = lanes(PREDICTION, OUTPUT, PROMPT, use_context=False)
        assert [lane.margin_bucket for lane in alone if lane] == [
            bucket(lane.matched, MARGINS) for lane in alone if lane
        ]

    @pytest.mark.parametrize(
        ("num_output", "followed", "adherence"),
        [
            (0, 0, 2),
            (1, 0, 0),
            (1, 1, 2),
            (3, 1, 1),
            (8, 0, 0),
            (8, 1, 1),
            (9, 1, 0),
            (8, 3, 1),
            (8, 4, 2),
            (40, 4, 0),
            (40, 5, 1),
            (40, 19, 1),
            (40, 20, 2),
        ],
    )
    def test_trust(self, num_output, followed, adherence):
        output = [*distinct(followed), *distinct(num_output - followed, 500)]
        found = lanes([*distinct(60)], output)
        assert {lane.adherence for lane in found if lane} == {adherence}

    def test_places_of_one_that_follows(self):
        """Its cursor is 20. To go d tokens ahead is worse by d, to go d back by d + 2."""
        # The token 19 is also at 4, 5 and 45: matches far from the cursor, of one token.
        text = distinct(60)
        for at in (4, 5, 45):
            text[at] = 19
        # One token more than the prediction has, so that this is not the whole output.
        found = at_places(text, [NOVEL, *text[:20]])
        assert found[20] == 0
        assert found[21] == 1
        assert found[22] == 2
        assert [found[20 + d] for d in (-2, -1, 3, 4, 5)] == [3] * 5
        assert [found[20 + d] for d in range(6, 17)] == [4] * 11
        # 14 back is worse by 16, 15 back by 17; 26 ahead by as much.
        assert [found[p] for p in (6, 5, 46)] == [5, 6, 6]

    def test_places_of_one_that_is_away(self):
        """The anchor is 10; after 13 14 the scores are 0 -1 -2 -3 0 3 2 1 0 -1 …: the cursor is 15."""
        text = distinct(60)
        text[9] = text[40] = 14  # more places where the last token matches
        found = at_places(text, [*text[:10], 13, 14], use_context=False)
        assert found[15] == 0
        assert found[16] == 1
        assert found[17] == 2  # worse by 2
        assert [found[p] for p in (14, 18, 19, 20)] == [3] * 4  # by 3, 3, 4 and 5
        assert [found[p] for p in (13, *range(21, 32))] == [4] * 12  # by 6, and more
        # The end 10 is worse by 3, and not in the window; the end 41 by 26.
        assert [found[p] for p in (10, 41)] == [5, 6]

    def test_places_that_the_row_does_not_know(self):
        """Before the anchor, and more than 256 behind it."""
        text = distinct(400)
        text[100] = text[8] = text[360] = text[359] = 700
        found = at_places(text, [*text[:103], 700], use_context=False)
        assert found[103] == 0
        assert [found[p] for p in (101, 102)] == [4, 4]  # in the window
        assert [found[p] for p in (9, 360)] == [6, 6]  # outside; 257 behind the anchor
        assert found[119] == 4  # worse by 16, and in the window

    def test_random_requests(self):
        for seed in range(80):
            generator = random.Random(seed)
            alphabet = generator.choice([2, 5, 100])
            prediction = generator.choices(range(alphabet), k=generator.choice([0, 1, 2, 40, 300, 600]))
            prompt = generator.choices(range(alphabet), k=generator.randint(0, 30))
            output = edited(generator, prediction, alphabet, generator.randint(0, 120))
            config = {
                "min_match": generator.choice([1, 1, 3]),
                "min_context_match": generator.choice([1, 1, 3]),
                "use_context": generator.random() < 0.8,
            }
            oracle = Oracle(
                prediction, len(prompt), None, K=8, quarters=0, vocab_size=1000, capacity=1200, **config
            )
            tokens = [*prompt, *output]
            oracle.update_state(tokens)
            found, _ = oracle.candidates(tokens)
            classes = oracle.classes(found, tokens)
            expected = [
                Lane(c.position, c.matched, k // 240, k // 24 % 10, k // 3 % 8, k % 3)
                if c is not None
                else None
                for c, k in zip(found, classes, strict=True)
            ]
            assert lanes(prediction, output, prompt, **config) == expected, seed


HALF = flat_curves(SURVIVAL_ONE // 2)


def only(*places, K=8):
    """Curves that leave nothing but candidates at these places, with the threshold of 2."""
    return np.where(np.isin(PLACES, places)[:, None], SURVIVAL_ONE // 2, 1).repeat(K, axis=1)


@on_both
class TestChoice:
    def draft(self, backend, prediction, output, prompt=(), **settings):
        """What one request gets: ``(tokens, source)``."""
        return Request(backend, prediction, prompt, **{"curves": HALF, **settings}).step(output)[:2]

    @pytest.mark.parametrize(
        ("place", "position"), [(0, 20), (1, 21), (2, 22), (3, 18), (4, 26), (5, 9), (6, 46), (7, None)]
    )
    def test_places(self, backend, place, position):
        """The candidate that is at the only place there is, in the order of the lanes; see the places above."""
        text = distinct(60)
        text[8] = text[45] = 19
        tokens, source = self.draft(backend, text, [NOVEL, *text[:20]], curves=only(place), floor=2)
        if position is None:
            # In the context: the 19 that the prediction put at 8.
            assert (tokens[0], source) == (text[9], Source.CONTEXT)
        else:
            assert (tokens[0], source) == (text[position], Source.PREDICTION)

    def test_of_equal_matches_the_nearest_and_then_the_one_ahead(self, backend):
        """The request is away at 30. The token 700 is all that matches, and matches everywhere."""
        for ends, chosen in [
            ((10, 50), 50), ((11, 50), 11), ((10, 51), 10), ((5, 8, 70, 90), 8), ((50, 51, 52, 53), 50),
        ]:  # fmt: skip
            text = distinct(120)
            for end in ends:
                text[end - 1] = 700
            tokens, source = self.draft(backend, text, [*text[:30], 700])
            assert (tokens[0], source) == (text[chosen], Source.PREDICTION)

    def test_at_a_tie_the_prediction_before_the_context(self, backend):
        text, output = [*distinct(9), 700, 9, 10], [700, 50, 51, 700]
        assert self.draft(backend, text, output, length_factor=2) == ([9, 10], Source.PREDICTION)
        # A longer match in the context wins.
        tokens, source = self.draft(backend, text, [52, *output, 53, 51, 700], length_factor=2)
        assert (tokens, source) == ([53, 51, 700], Source.CONTEXT)

    def test_more_room_does_not_buy_a_doubtful_candidate(self, backend):
        """One token is left in the prediction, many in the context, which is a little less likely."""
        curves = HALF.copy()
        curves[PLACES == 7] = SURVIVAL_ONE // 2 - 1
        text = [*distinct(4, 100), 3, 4, 5]
        output = [3, 4, *distinct(10, 20), 3, 4]
        tokens, source = self.draft(backend, text, output, curves=curves)
        assert (tokens, source) == ([5], Source.PREDICTION)

    @pytest.mark.parametrize("num_output", [0, 1, 63, 64, 65])
    def test_a_whole_output_wins_whatever_the_table_says(self, backend, num_output):
        """All of the output is the beginning of the prediction, which the table would never draft from."""
        text = [*[7] * 66, *range(14)]
        for K in (8, 65):
            tokens, source = self.draft(
                backend, text, [7] * num_output, prompt=[7, 9, 7, 9, *[7] * 66, 9], K=K,
                curves=only(7, K=K), floor=2,
            )  # fmt: skip
            if num_output <= 64:
                assert (tokens, source) == (text[num_output : num_output + K], Source.PREDICTION)
            else:
                assert source == Source.CONTEXT

    def test_an_output_of_the_same_length_is_not_the_beginning(self, backend):
        """A token was replaced: as many tokens as the prediction has up to here, and not the same."""
        for replaced in ([NOVEL], [NOVEL, NOVEL - 1]):
            text = distinct(40)
            output = [*text[:9], *replaced, *text[9 + len(replaced) : 20]]
            tokens, source = self.draft(backend, text, output, curves=only(7), floor=2)
            assert (tokens, source) == ([], Source.NONE)

    def test_length_grows_with_the_match(self, backend):
        for factor, expected in ((0, [0, 0, 0, 8]), (0.25, [0, 0, 1, 8]), (1.5, [3, 4, 7, 8])):
            for matched, length in zip((1, 2, 4, 64), expected, strict=True):
                text = [*distinct(5), *distinct(matched, 100), *distinct(20, 500)]
                output = [900, *distinct(matched, 100)]
                tokens, _ = self.draft(backend, text, output, length_factor=factor, use_context=False)
                assert tokens == distinct(length, 500)

    def test_the_threshold_ends_a_draft(self, backend):
        curves = np.tile([100, 80, 60, 40, 20, 10, 5, 1], (NUM_CLASSES, 1))
        for floor, length in ((1, 8), (2, 7), (60, 3), (61, 2), (100, 1), (101, 0)):
            tokens, source = self.draft(
                backend, [*distinct(9), *distinct(9, 50)], [900, *distinct(4, 5)], curves=curves, floor=floor,
                use_context=False,
            )  # fmt: skip
            assert tokens == distinct(length, 50)
            assert source == (Source.PREDICTION if length else Source.NONE)

    @pytest.mark.parametrize(
        ("num_output", "followed", "source"), [(20, 2, 2), (20, 3, 1), (8, 0, 2), (8, 1, 1), (3, 0, 2)]
    )
    def test_a_lost_prediction_needs_more(self, backend, num_output, followed, source):
        """The last token occurs in both; that of the context never needs more."""
        text = [*distinct(40), 700, 41]
        output = [*distinct(followed), *distinct(num_output - followed - 1, 500), 700]
        tokens, found = self.draft(
            backend, text, output, prompt=[700, 77], floor_lost=SURVIVAL_ONE // 2 + 1, length_factor=0.5
        )
        assert (tokens, found) == ([41 if source == 1 else 77], source)


@on_both
class TestWritten:
    def test_confidences_are_those_of_the_class(self, backend):
        # The output is back behind four tokens, and stands there; nothing disagrees, and most of it has followed.
        class_id = ((bucket(4, LENGTHS) * 10 + bucket(4, MARGINS)) * 8 + 0) * 3 + 2
        curves = np.ones((NUM_CLASSES, 8))
        curves[class_id] = curve = [60_000, 50_000, 49_999, 49_999, 20_000, 7, 3, 2]
        request = Request(
            backend, [*distinct(9), *distinct(9, 50)], curves=curves, floor=3, use_context=False
        )
        tokens, source, confidence = request.step([900, *distinct(4, 5)])
        assert (tokens, source) == (distinct(7, 50), Source.PREDICTION)
        before = [SURVIVAL_ONE, *curve]
        assert confidence == [
            float(np.float32(after / b)) for after, b in zip(curve[:7], before, strict=False)
        ]

    def test_a_token_outside_the_vocabulary_ends_the_draft(self, backend):
        for bad in (-1, 1000, 2**31 - 1, -(2**31)):
            request = Request(backend, distinct(20), curves=HALF)
            request.write_over(8, bad)
            assert request.step(distinct(5))[:2] == (distinct(3, 5), Source.PREDICTION)
            # At once: nothing is drafted, and the last token fills the row.
            assert request.step(distinct(8))[:2] == ([], Source.NONE)
            # In the context, and as the last token of all, which then cannot fill it.
            request = Request(backend, [], curves=HALF)
            assert request.step([4, 5, 6, bad, 4, 5]) == ([6], Source.CONTEXT, [0.5])
            assert request.step([4, 5, 6, bad]) == ([], Source.NONE, [])


def test_outputs_have_the_shapes_of_the_batch():
    draft = allocate_draft(3, 5, "cpu")
    assert [(tuple(t.shape), t.dtype) for t in draft] == [
        ((3, 5), torch.int64), ((3,), torch.int32), ((3, 5), torch.float32), ((3,), torch.int8),
    ]  # fmt: skip


CELL = distinct(5, 10)


@on_both
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        # What the output repeats goes on: a match that spans the period wraps around.
        *(
            ([5, *distinct(period, 10) * 2], (distinct(period, 10) * 16)[:16])
            for period in (1, 2, 3, 7, 15, 16)
        ),
        # Behind `a b c d e a b` nothing says yet that `a b c d e` comes a third time.
        *(([*CELL, *CELL[:matched]], CELL[matched:] + CELL[:matched]) for matched in range(1, 5)),
        (CELL * 2, (CELL * 4)[:16]),
    ],
)
def test_a_repetition(backend, output, expected):
    how = {"K": 16, "length_factor": 64, "min_survival": 0, "min_survival_lost": 0}
    assert Request(backend, [], (1,), **how).step(output).tokens == expected
    # It ends where the row of the engine ends.
    short = Request(backend, [], (1,), capacity=1 + len(output) + 3, **how).step(output).tokens
    assert short == expected[:3]


def test_a_row_of_zeros_takes_a_step_for_each_k():
    """Without going round, a draft would hold one token of it."""
    record = Record("zeros", [1, 2, 3], [], [4, 5, *[7] * 680, 6], None)
    assert replay(our_drafter([record]), record, 16).steps < 60
