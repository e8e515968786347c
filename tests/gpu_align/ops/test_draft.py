"""`draft`: plain Python, the reference and the kernel agree on tokens, length, confidence and source."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.ops.draft import (
    MAX_MATCH,
    NUM_CLASSES,
    SURVIVAL_ONE,
    Draft,
    Source,
    SurvivalTables,
    draft,
)
from gpu_align.ops.realign import Alignment
from gpu_align.ops.suffix_match import SuffixMatch

BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 50
NOTHING = (-1, 0)


class Request(NamedTuple):
    prediction: list[int]
    context: list[int]
    start: int = 0
    cursor: int = 0
    followed: int = 0
    # Best and second best match in the prediction, then in the context.
    matches: tuple[tuple[int, int], ...] = (NOTHING,) * 4
    active: int = 1


class Settings(NamedTuple):
    curves: np.ndarray  # [NUM_CLASSES, K]
    factor: float = 8.0
    # In units of 1/SURVIVAL_ONE: the threshold, and the one where the prediction is not followed.
    floor: int = 1
    floor_lost: int = 1


def common_suffix(a, b, limit):
    """Tokens that the ends of both share, at most `limit`."""
    length = 0
    while length < min(limit, len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def class_of(source, matched, margin, away, followed, num_output):
    """The class as the README of the operation numbers it."""
    length_edges = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
    margin_edges = (-3, -1, 0, 1, 2, 3, 5, 9, 17)
    length_bucket = sum(matched >= edge for edge in length_edges)
    margin_bucket = sum(margin >= edge for edge in margin_edges)
    if source == Source.CONTEXT:
        place = 7
    elif away < 0:
        place = 4 if away >= -2 else 5
    else:
        place = next((p for p, most in enumerate((0, 1, 4, 16)) if away <= most), 6)
    trust = 2
    if num_output >= 8:
        trust = 0 if followed < num_output / 8 else 1 if followed < num_output / 2 else 2
    return ((length_bucket * 10 + margin_bucket) * 8 + place) * 3 + trust


def oracle(r, how, capacity):
    """The loop of the docstring, in plain Python."""
    K = how.curves.shape[1]
    last = r.context[-1] if r.context and 0 <= r.context[-1] < VOCAB else 0
    nothing = ([last] * K, 0, [0.0] * K, 0)
    if not r.active:
        return nothing
    output = r.context[r.start :]
    best, second, own, own_second = r.matches
    found = [(Source.PREDICTION, r.prediction, *match) for match in (best, second)]
    for position in range(r.cursor - 2, r.cursor + 17):
        if 0 <= position < len(r.prediction):
            matched = common_suffix(output, r.prediction[:position], 64)
            found.append((Source.PREDICTION, r.prediction, position, matched))
    found += [(Source.CONTEXT, r.context, *match) for match in (own, own_second)]
    whole = found[0] if best == (len(output), 64) and len(output) <= 64 else None
    found = [c for c in found if 0 <= c[2] < len(c[1])]
    chosen, most = None, 0
    for c in found:
        source, text, position, matched = c
        rivals = [m for _, other, at, m in found if other[at] != text[position]]
        margin = matched - max(rivals, default=0)
        klass = class_of(source, matched, margin, position - r.cursor, r.followed, len(output))
        lost = source == Source.PREDICTION and klass % 3 == 0
        floor = max(how.floor, how.floor_lost) if lost else how.floor
        limit = K if matched >= 64 else int(min(how.factor * matched // 1 + 1, K))
        kept = [int(s) for s in how.curves[klass, :limit] if s >= floor]
        value, num = sum(kept), len(kept)
        if c is whole:
            value, num = float("inf"), K
        if value > most:
            chosen, most = (source, text, position, klass, num), value
    if chosen is None:
        return nothing
    source, text, position, klass, num = chosen
    tokens = []
    for token in text[position : position + min(num, capacity - len(r.context))]:
        if not 0 <= token < VOCAB:
            break
        tokens.append(token)
    n = len(tokens)
    curve = [SURVIVAL_ONE, *how.curves[klass].tolist()]
    confidence = [float(np.float32(curve[k + 1] / curve[k])) for k in range(n)]
    return tokens + [last] * (K - n), n, confidence + [0.0] * (K - n), int(source) if n else 0


def run(backend, requests, how, capacity, order=None):
    """[(tokens, length, confidence, source)] of the requests, in batch order."""
    device = DEVICE if backend == "triton" else "cpu"
    order = list(range(len(requests))) if order is None else order
    K = how.curves.shape[1]
    prediction = torch.full((len(requests), 80), -123, dtype=torch.int32)
    context = torch.full((len(requests), capacity), -456, dtype=torch.int32)
    for s, r in enumerate(requests):
        prediction[s, : len(r.prediction)] = torch.tensor(r.prediction, dtype=torch.int32)
        context[s, : len(r.context)] = torch.tensor(r.context, dtype=torch.int32)

    def int32(values):
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    batch = [requests[s] for s in order]
    matches = [SuffixMatch(*(int32(r.matches[i][j] for r in batch) for j in range(2))) for i in range(4)]
    out = Draft(
        torch.full((len(order), K), -999, dtype=torch.int64, device=device),
        torch.full((len(order),), -999, dtype=torch.int32, device=device),
        torch.full((len(order), K), float("nan"), device=device),
        torch.full((len(order),), 99, dtype=torch.int8, device=device),
    )
    floors = how.floor / SURVIVAL_ONE, how.floor_lost / SURVIVAL_ONE
    draft(
        prediction.to(device),
        int32(len(r.prediction) for r in requests),
        context.to(device),
        int32(r.start for r in requests),
        int32(len(r.context) for r in requests),
        torch.tensor(order, dtype=torch.int64, device=device),
        Alignment(int32(r.cursor for r in batch), int32(r.followed for r in batch)),
        (matches[0], matches[1]),
        (matches[2], matches[3]),
        SurvivalTables.from_survival(how.curves.astype(np.int32), device, *floors),
        vocab_size=VOCAB,
        active=int32(r.active for r in batch),
        length_factor=how.factor,
        out=out,
        backend=backend,
    )
    return list(zip(*(t.tolist() for t in out), strict=True))


def best_two(text, suffix_of):
    """``(end, length)`` of the two longest suffixes in a text, `NOTHING` where there is none."""
    found = [(end, common_suffix(text[:end], suffix_of, MAX_MATCH)) for end in range(1, len(text))]
    found = sorted((match for match in found if match[1]), key=lambda match: -match[1])
    return [*found, NOTHING, NOTHING][:2]


@st.composite
def requests_(draw):
    # Small alphabets make long matches that disagree; a bad token must never be emitted.
    tokens = st.integers(0, draw(st.sampled_from([0, 1, 2, VOCAB - 1])))

    def some(most):
        values = draw(st.lists(tokens, min_size=draw(st.integers(0, most)), max_size=most))
        if values and draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(values) - 1))
            values[at] = draw(st.sampled_from([-1, VOCAB, 2**31 - 1, -(2**31)]))
        return values

    prediction, prompt, output = some(70), some(10), some(12)
    if draw(st.booleans()):
        # What an edit leaves: a beginning, something else, and a part from further on.
        a, b, c = (draw(st.integers(0, len(prediction))) for _ in range(3))
        output = prediction[:a] + output[:4] + prediction[b:c]
    context = prompt + output
    matched = st.one_of(st.integers(1, 9), st.integers(1, MAX_MATCH), st.just(MAX_MATCH))

    def any_match(length):
        return (draw(st.integers(0, length - 1)), draw(matched)) if length else NOTHING

    matches = best_two(prediction, output) + best_two(context, context)
    for i, text in enumerate((prediction, prediction, context, context)):
        kind = draw(st.integers(0, 5))
        matches[i] = NOTHING if kind == 0 else any_match(len(text)) if kind == 1 else matches[i]
    if len(output) < len(prediction) and draw(st.integers(0, 5)) == 0:
        matches[0] = (len(output), MAX_MATCH)
    near = max(matches[0][0], 0)
    return Request(
        prediction,
        context,
        len(prompt),
        draw(st.one_of(st.integers(0, len(prediction)), st.integers(near, min(near + 3, len(prediction))))),
        draw(st.integers(0, len(output))),
        tuple(matches),
        draw(st.sampled_from([1, 1, 1, 1, 1, 0, 4])),
    )


def random_curves(seed, K):
    """[NUM_CLASSES, K], never rising and 1 or more, some steep and some flat."""
    random = np.random.default_rng(seed)
    top = SURVIVAL_ONE * random.random((NUM_CLASSES, 1))
    rate = random.choice([0.3, 0.8, 0.99, 1.0], (NUM_CLASSES, 1))
    return np.maximum(np.floor(top * rate ** np.arange(K)), 1).astype(np.int64)


def flat_curves(value, K=8):
    return np.full((NUM_CLASSES, K), value)


@st.composite
def cases(draw):
    requests = draw(st.lists(requests_(), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(requests))))[: draw(st.integers(0, 9))]
    # The curves come from a seed: thousands of numbers would bury a failing example. One seed in four has all
    # curves equal, so that candidates tie.
    K, seed = draw(st.sampled_from([1, 3, 8, 64, 65])), draw(st.integers(0, 2**32 - 1))
    curves = random_curves(seed, K) if seed % 4 else flat_curves(SURVIVAL_ONE // 2, K)
    floors = st.sampled_from([0, 1, SURVIVAL_ONE // 20, SURVIVAL_ONE // 3, SURVIVAL_ONE // 2, SURVIVAL_ONE])
    how = Settings(curves, draw(st.sampled_from([0, 0.25, 1.5, 2, 8, 64])), draw(floors), draw(floors))
    widest = max(len(r.context) for r in requests)
    return requests, order, how, max(widest + draw(st.sampled_from([0, 1, 3, 80])), 1)


@settings(max_examples=160, deadline=None, database=None)
@given(cases())
def test_three_oracles_agree(case):
    requests, order, how, capacity = case
    expected = [oracle(requests[s], how, capacity) for s in order]
    for backend in BACKENDS:
        assert run(backend, requests, how, capacity, order) == expected, backend


HALF = flat_curves(SURVIVAL_ONE // 2)


@pytest.mark.parametrize("backend", BACKENDS)
class TestChoice:
    def draft(self, backend, request, capacity=128, **how):
        """What one request gets: ``(tokens, source)``."""
        [(tokens, length, _, source)] = run(backend, [request], Settings(**{"curves": HALF, **how}), capacity)
        return tokens[:length], source

    def test_ties_go_to_the_earlier_candidate(self, backend):
        text, own = list(range(10, 30)), list(range(30, 50))
        matches = [(4, 5), (9, 5), (3, 5), (8, 5)]
        expected = [(14, 1), (19, 1), (33, 2), (38, 2)]
        for dropped in range(4):
            left = (*[NOTHING] * dropped, *matches[dropped:])
            request = Request(text, own, 0, len(text), 20, left)
            tokens, source = self.draft(backend, request)
            assert (tokens[0], source) == expected[dropped]

    def test_of_the_window_the_first_that_matches_longest(self, backend):
        # Nothing matches at 1 … 6; two tokens do at 7, and at 10.
        text = [9, 9, 9, 9, 9, 1, 2, 3, 1, 2, 4, 5]
        request = Request(text, [1, 2], 0, 3)
        assert self.draft(backend, request, factor=1) == ([3, 1, 2], Source.PREDICTION)

    def test_the_window_is_two_behind_to_sixteen_ahead(self, backend):
        text = list(range(40))
        for at, seen in ((17, False), (18, True), (20, True), (36, True), (37, False)):
            tokens, _ = self.draft(backend, Request(text, [at - 1], 0, 20), factor=2)
            # Outside it the cursor's neighbours are left, with nothing matched.
            assert tokens == (text[at : at + 3] if seen else [18]), at

    def test_more_room_does_not_buy_a_doubtful_candidate(self, backend):
        curves = HALF.copy()
        curves[np.arange(NUM_CLASSES) // 3 % 8 == 7] = SURVIVAL_ONE // 2 - 1
        matches = ((2, 8), NOTHING, (3, 8), NOTHING)
        request = Request([1, 2, 3], list(range(20)), 0, 3, 20, matches)
        assert self.draft(backend, request, curves=curves) == ([3], Source.PREDICTION)

    def test_a_whole_match_wins_whatever_the_table_says(self, backend):
        curves = flat_curves(1)
        curves[np.arange(NUM_CLASSES) // 3 % 8 == 7] = SURVIVAL_ONE
        for num_output in (0, 1, 63, 64, 65):
            text, output = [*[7] * 66, *range(14)], [7] * num_output
            matches = ((num_output, MAX_MATCH), NOTHING, (1, MAX_MATCH), NOTHING)
            request = Request(text, [9, 9, 9, *output], 3, num_output, num_output, matches)
            tokens, source = self.draft(backend, request, curves=curves, floor=2, floor_lost=SURVIVAL_ONE)
            wins = num_output <= MAX_MATCH
            assert source == (Source.PREDICTION if wins else Source.CONTEXT)
            assert not wins or tokens == text[num_output : num_output + 8]

    def test_length_grows_with_the_match(self, backend):
        for factor, lengths in ((0, [1, 1, 1, 8]), (0.25, [1, 1, 2, 8]), (1.5, [2, 4, 7, 8])):
            for matched, length in zip((1, 2, 4, 64), lengths, strict=True):
                request = Request(list(range(40)), [49], 0, 40, 1, ((5, matched), *[NOTHING] * 3))
                assert len(self.draft(backend, request, factor=factor)[0]) == length

    def test_a_lost_prediction_needs_more(self, backend):
        # Lost is less than an eighth of 8 tokens or more; a match of the same length in the context never is.
        for num_output, followed, found in ((20, 2, 2), (20, 3, 1), (8, 0, 2), (8, 1, 1), (7, 0, 1)):
            matches = ((5, 3), NOTHING, (5, 3), NOTHING)
            request = Request(list(range(40)), [49] * num_output, 0, 40, followed, matches)
            assert self.draft(backend, request, floor_lost=SURVIVAL_ONE // 2 + 1)[1] == found

    def test_a_token_outside_the_vocabulary_ends_the_draft(self, backend):
        for bad in (-1, VOCAB, 2**31 - 1, -(2**31)):
            request = Request([1, 2, bad, 3], [7], 0, 0, 0, ((0, 64), *[NOTHING] * 3))
            [(tokens, length, confidence, _)] = run(backend, [request], Settings(HALF), 20)
            assert (tokens, length) == ([1, 2, 7, 7, 7, 7, 7, 7], 2)
            assert confidence == [0.5, 1.0] + [0.0] * 6

    def test_never_past_the_end_of_the_context_row(self, backend):
        request = Request(list(range(30)), [9] * 10, 0, 5, 0, ((5, 64), *[NOTHING] * 3))
        for room in (0, 1, 5):
            assert len(self.draft(backend, request, capacity=10 + room)[0]) == room


ONE = torch.zeros(1, dtype=torch.int32)
INTS, FLOATS = SuffixMatch(ONE, ONE), SuffixMatch(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"length_factor": -1}, ValueError, ["length_factor", "-1"]),
        (
            {"alignment": Alignment(ONE, torch.zeros(2).int())},
            ValueError,
            ["alignment.followed", "[1]", "[2]"],
        ),
        ({"prediction": torch.zeros((1, 3))}, TypeError, ["prediction", "int32", "float32"]),
        ({"prediction_matches": (FLOATS, FLOATS)}, TypeError, ["prediction_matches[0].end", "float32"]),
        ({"context_matches": (INTS, FLOATS)}, TypeError, ["context_matches[1].end", "float32"]),
        ({"active": [1]}, TypeError, ["active", "list"]),
        ({"slots": ONE}, TypeError, ["slots", "int64", "int32"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    good = {
        "prediction": torch.zeros((1, 3), dtype=torch.int32), "prediction_len": ONE,
        "context": torch.zeros((1, 3), dtype=torch.int32), "context_start": ONE, "context_len": ONE,
        "slots": torch.zeros(1, dtype=torch.int64), "alignment": Alignment(ONE, ONE),
        "prediction_matches": (INTS, INTS), "context_matches": (INTS, INTS),
        "tables": SurvivalTables.load(4, "cpu"), "vocab_size": 9,
    }  # fmt: skip
    for backend in BACKENDS:
        with pytest.raises(error) as caught:
            draft(**{**good, "backend": backend, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
