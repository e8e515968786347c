"""`draft`: plain Python, the reference and the kernel agree on tokens, length, confidence and source."""

import dataclasses

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
from gpu_align.ops.draft.tables import (
    CLASS_CONTEXT,
    CLASS_CURSOR_ALONE,
    CLASS_CURSOR_BESIDE_MATCH,
    CLASS_WHOLE,
    LENGTH_EDGES,
    NUM_DISTANCES,
    NUM_LENGTHS,
    fit_curves,
    read_survival,
)
from gpu_align.ops.suffix_match import SuffixMatch

BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 50
NOTHING = (-1, 0)


def oracle(request, curves, length_factor, min_survival, capacity):
    """The loop of the docstring, in plain Python."""
    prediction, context, start = request["prediction"], request["context"], request["start"]
    K = len(curves[0])
    last = context[-1] if context and 0 <= context[-1] < VOCAB else 0
    nothing = ([last] * K, 0, [0.0] * K, 0)
    if not request["active"]:
        return nothing

    def bucket(length):
        return sum(length >= edge for edge in LENGTH_EDGES)

    num_output = len(context) - start
    (end, matched), (own_end, own_matched) = request["prediction_match"], request["context_match"]
    found = []
    if end >= 0:
        away = end - request["cursor"]
        distance = 4 if away < 0 else 0 if away == 0 else 1 if away == 1 else 2 if away <= 16 else 3
        klass = bucket(matched) * NUM_DISTANCES + distance
        if matched == MAX_MATCH and end == num_output <= MAX_MATCH:
            klass = CLASS_WHOLE
        found.append((1, prediction, end, matched, klass))
    if request["cursor"] != end:
        klass = CLASS_CURSOR_ALONE if end < 0 else CLASS_CURSOR_BESIDE_MATCH
        found.append((1, prediction, request["cursor"], 0, klass))
    if own_end >= 0:
        found.append((2, context, own_end, own_matched, CLASS_CONTEXT + bucket(own_matched)))
    best, best_gain = None, 0
    for source, text, position, matched, klass in found:
        if position >= len(text):
            continue
        limit = K if matched >= MAX_MATCH else min(length_factor * matched + 1, K)
        keep = [p for p in curves[klass][:limit] if p >= min_survival]
        gain = float("inf") if klass == CLASS_WHOLE else sum(keep)
        if gain > best_gain:
            best, best_gain = (source, text, position, klass, len(keep)), gain
    if best is None:
        return nothing
    source, text, position, klass, keep = best
    tokens = []
    for token in text[position : position + min(keep, capacity - len(context))]:
        if not 0 <= token < VOCAB:
            break
        tokens.append(token)
    n = len(tokens)
    before = [SURVIVAL_ONE, *curves[klass]]
    confidence = [float(np.float32(curves[klass][k] / before[k])) for k in range(n)]
    return tokens + [last] * (K - n), n, confidence + [0.0] * (K - n), source if n else 0


def tables_from(curves, device="cpu"):
    """Tables of given integer curves, [NUM_CLASSES][K]."""
    K = len(curves[0])
    survival = np.array(curves, dtype=np.int32)
    before = np.concatenate([np.full((NUM_CLASSES, 1), SURVIVAL_ONE), survival[:, :-1]], axis=1)
    template = SurvivalTables.load(K, device)
    return dataclasses.replace(
        template,
        survival=torch.from_numpy(survival).to(device),
        confidence=torch.from_numpy((survival / before).astype(np.float32)).to(device),
    )


def run(backend, requests, order, curves, length_factor, min_survival, capacity):
    device = DEVICE if backend == "triton" else "cpu"
    num_slots, K = len(requests), len(curves[0])
    widest = max((len(r["prediction"]) for r in requests), default=0) + 1
    prediction = torch.full((num_slots, widest), -123, dtype=torch.int32)
    context = torch.full((num_slots, capacity), -456, dtype=torch.int32)
    for s, r in enumerate(requests):
        prediction[s, : len(r["prediction"])] = torch.tensor(r["prediction"], dtype=torch.int32)
        context[s, : len(r["context"])] = torch.tensor(r["context"], dtype=torch.int32)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    in_order = [requests[s] for s in order]
    out = Draft(
        torch.full((len(order), K), -999, dtype=torch.int64, device=device),
        torch.full((len(order),), -999, dtype=torch.int32, device=device),
        torch.full((len(order), K), float("nan"), device=device),
        torch.full((len(order),), 99, dtype=torch.int8, device=device),
    )
    draft(
        prediction.to(device),
        int32([len(r["prediction"]) for r in requests]),
        context.to(device),
        int32([r["start"] for r in requests]),
        int32([len(r["context"]) for r in requests]),
        torch.tensor(order, dtype=torch.int64, device=device),
        int32([r["cursor"] for r in in_order]),
        SuffixMatch(*(int32([r["prediction_match"][i] for r in in_order]) for i in range(2))),
        SuffixMatch(*(int32([r["context_match"][i] for r in in_order]) for i in range(2))),
        tables_from(curves, device),
        vocab_size=VOCAB,
        active=int32([r["active"] for r in in_order]),
        length_factor=length_factor,
        min_survival=min_survival / SURVIVAL_ONE,
        out=out,
        backend=backend,
    )
    return [tuple(row) for row in zip(*(t.tolist() for t in out), strict=True)]


def make_request(
    prediction=(), context=(), start=0, cursor=0, prediction_match=NOTHING, context_match=NOTHING
):
    return {
        "prediction": list(prediction),
        "context": list(context),
        "start": start,
        "cursor": cursor,
        "prediction_match": prediction_match,
        "context_match": context_match,
        "active": 1,
    }


@st.composite
def requests_(draw):
    # Mostly tokens of the vocabulary, now and then one that must not be emitted.
    token = st.one_of(
        st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1), st.sampled_from([-1, VOCAB, 2**31 - 1])
    )
    num_text = draw(st.one_of(st.sampled_from([0, 1, 5]), st.integers(0, 40)))
    num_context = draw(st.integers(0, 40))
    text = draw(st.lists(token, min_size=num_text, max_size=num_text))
    context = draw(st.lists(token, min_size=num_context, max_size=num_context))
    start = draw(st.integers(0, num_context))
    matched = st.one_of(st.integers(1, 6), st.sampled_from([16, 17, 63, 64, 64]))

    def match(length, limit):
        none = st.just(NOTHING)
        if limit == 0:
            return draw(none)
        places = st.one_of(st.just(num_context - start), st.integers(0, limit - 1)).filter(
            lambda e: e < limit
        )
        if length == num_text and num_context - start >= limit:
            places = st.integers(0, limit - 1)
        return draw(st.one_of(none, st.tuples(places, matched), st.tuples(places, matched)))

    prediction_match = match(num_text, num_text)
    cursors = st.integers(0, num_text)
    if prediction_match[0] >= 0:
        cursors = st.one_of(st.just(prediction_match[0]), cursors)
    own = draw(st.one_of(st.just(NOTHING), st.tuples(st.integers(0, max(num_context - 1, 0)), matched)))
    return {
        "prediction": text,
        "context": context,
        "start": start,
        "cursor": draw(cursors),
        "prediction_match": prediction_match,
        "context_match": own if num_context else NOTHING,
        "active": draw(st.sampled_from([0, 1, 1, 1, 4])),
    }


@st.composite
def cases(draw):
    requests = draw(st.lists(requests_(), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(requests))))[: draw(st.integers(0, len(requests)))]
    K = draw(st.sampled_from([1, 2, 4, 7, 31, 32, 33]))
    widest = max(len(r["context"]) for r in requests)
    return {
        "requests": requests,
        "order": order,
        "K": K,
        "seed": draw(st.integers(0, 2**32 - 1)),
        "length_factor": draw(st.integers(0, 5)),
        "min_survival": draw(st.sampled_from([1, SURVIVAL_ONE // 3, SURVIVAL_ONE])),
        "capacity": widest + draw(st.sampled_from([0, 1, 3, 64])) or 1,
    }


@settings(max_examples=2000, deadline=None, database=None)
@given(cases())
def test_three_oracles_agree(case):
    # The curves come from a seed: thousands of numbers would bury a failing example.
    K, seed = case.pop("K"), case.pop("seed")
    falling = np.random.default_rng(seed).integers(0, SURVIVAL_ONE + 1, (NUM_CLASSES, K))
    case["curves"] = np.maximum(np.sort(falling, axis=1)[:, ::-1], 1).tolist()
    settings_ = {k: case[k] for k in ("curves", "length_factor", "min_survival", "capacity")}
    expected = [oracle(case["requests"][s], **settings_) for s in case["order"]]
    for backend in BACKENDS:
        found = run(backend, **case)
        assert found == [tuple(e) for e in expected], backend


FLAT = [[SURVIVAL_ONE // 2] * 8 for _ in range(NUM_CLASSES)]


@pytest.mark.parametrize("backend", BACKENDS)
class TestChoice:
    def draft(self, backend, request, curves=FLAT, length_factor=4, capacity=128):
        (row,) = run(backend, [request], [0], curves, length_factor, 1, capacity)
        return row

    def test_ties_go_to_the_prediction(self, backend):
        request = make_request([1, 2, 3], [4, 4, 4], 0, 1, (1, 2), (1, 2))
        assert self.draft(backend, request)[3] == Source.PREDICTION

    def test_more_room_does_not_buy_a_doubtful_candidate(self, backend):
        curves = [[c * SURVIVAL_ONE // NUM_CLASSES + 1] * 8 for c in range(NUM_CLASSES)]
        curves[CLASS_CONTEXT + 2] = [9] * 8
        request = make_request([1, 2, 3], list(range(20)), 0, 2, (2, 2), (3, 2))
        tokens, length, _, source = self.draft(backend, request, curves)
        assert (tokens[:length], source) == ([3], Source.PREDICTION)

    def test_a_whole_match_wins_whatever_the_table_says(self, backend):
        curves = [[SURVIVAL_ONE] * 8 for _ in range(NUM_CLASSES)]
        curves[CLASS_WHOLE] = [1] * 8
        request = make_request(list(range(20)), [9, 0], 1, 1, (1, MAX_MATCH), (1, MAX_MATCH))
        tokens, length, _, source = self.draft(backend, request, curves)
        assert (tokens[:length], source) == (list(range(1, 9)), Source.PREDICTION)

    def test_length_grows_with_the_match(self, backend):
        for matched, want in [(1, 3), (2, 5), (3, 7), (4, 8), (64, 8)]:
            request = make_request(list(range(30)), [9] * 70, 0, 5, (5, matched))
            assert self.draft(backend, request, length_factor=2)[1] == want

    def test_a_token_outside_the_vocabulary_ends_the_draft(self, backend):
        for bad in (-1, VOCAB, 2**31 - 1, -(2**31)):
            request = make_request([1, 2, bad, 3], [7], 0, 0, (0, 64))
            tokens, length, confidence, _ = self.draft(backend, request)
            assert (tokens, length) == ([1, 2, 7, 7, 7, 7, 7, 7], 2)
            assert confidence[1] > 0
            assert confidence[2:] == [0.0] * 6

    def test_never_past_the_end_of_the_context_row(self, backend):
        request = make_request(list(range(30)), [9] * 10, 0, 5, (5, 64))
        for room in (0, 1, 5):
            assert self.draft(backend, request, capacity=10 + room)[1] == room

    def test_batch_order_does_not_matter(self, backend):
        requests = [make_request([s, s + 1, s + 2], [s], 0, 0, (0, 3)) for s in range(3)]
        straight = run(backend, requests, [0, 1, 2], FLAT, 4, 1, 9)
        assert run(backend, requests, [2, 0, 1], FLAT, 4, 1, 9) == [straight[i] for i in (2, 0, 1)]


class TestTables:
    def test_shipped_table_is_sane(self):
        tables = SurvivalTables.load(64, "cpu")
        survival = tables.survival
        assert survival.shape == (NUM_CLASSES, 64)
        assert (survival[:, 1:] <= survival[:, :-1]).all()
        assert (tables.confidence > 0).all()
        assert (tables.confidence <= 1).all()
        # What a perfect prediction rests on: its classes beat every class of the context at every length.
        longest = (NUM_LENGTHS - 1) * NUM_DISTANCES
        assert (survival[longest] >= survival[CLASS_CONTEXT:]).all()
        assert (survival[CLASS_WHOLE] >= survival[CLASS_CONTEXT:]).all()

    @pytest.mark.parametrize("num_draft_tokens", [1, 16, 64, 65, 256])
    def test_fits_any_number_of_drafts(self, num_draft_tokens):
        tables = SurvivalTables.load(num_draft_tokens, "cpu")
        shipped = SurvivalTables.load(64, "cpu")
        both = min(num_draft_tokens, 64)
        assert torch.equal(tables.survival[:, :both], shipped.survival[:, :both])
        assert (tables.survival[:, 1:] <= tables.survival[:, :-1]).all()
        assert int(tables.survival.min()) >= 1

    def test_continues_at_the_rate_it_ended_with(self):
        curve = np.array([[0.5**k for k in range(1, 5)]])
        assert np.allclose(fit_curves(curve, 8), [[0.5**k for k in range(1, 9)]])

    @pytest.mark.parametrize(
        ("survival", "words"),
        [
            ([[0.5, 0.4]], f"[{NUM_CLASSES}"),
            ([[0.5, 0.6]] * NUM_CLASSES, "never rises"),
            ([[1.5, 0.6]] * NUM_CLASSES, "0 and 1"),
        ],
    )
    def test_a_bad_file_is_named(self, tmp_path, survival, words):
        path = tmp_path / "table.json"
        path.write_text(f'{{"survival": {survival}}}')
        with pytest.raises(ValueError, match=r"table\.json") as caught:
            read_survival(path)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"vocab_size": 5, "length_factor": -1}, ValueError, ["length_factor", "-1"]),
        ({"min_survival": 1.5}, ValueError, ["min_survival", "1.5"]),
        ({"cursor": torch.zeros(2, dtype=torch.int32)}, ValueError, ["cursor", "[1]", "[2]"]),
        ({"prediction": torch.zeros((1, 3))}, TypeError, ["prediction", "int32", "float32"]),
        ({"context_match": SuffixMatch(torch.zeros(1), torch.zeros(1))}, TypeError, ["context_match.end"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    one = torch.zeros(1, dtype=torch.int32)
    good = {
        "prediction": torch.zeros((1, 3), dtype=torch.int32), "prediction_len": one,
        "context": torch.zeros((1, 3), dtype=torch.int32), "context_start": one, "context_len": one,
        "slots": torch.zeros(1, dtype=torch.int64), "cursor": one,
        "prediction_match": SuffixMatch(one, one), "context_match": SuffixMatch(one, one),
        "tables": SurvivalTables.load(4, "cpu"), "vocab_size": 9,
    }  # fmt: skip
    for backend in BACKENDS:
        with pytest.raises(error) as caught:
            draft(**{**good, "backend": backend, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
