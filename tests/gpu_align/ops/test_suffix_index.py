"""Where a token occurs, in a prediction and in the context: everything against plain Python."""

import random
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.ops import constants
from gpu_align.ops.constants import HASH, NEAREST, PAGE, WAYS, context_index_bits, index_bits, whole_pages
from gpu_align.ops.reference.suffix_match import bucket_of, match_length, nearest, shift_of
from gpu_align.ops.slots import occupy_slot, store_prediction
from gpu_align.ops.state import allocate_state
from gpu_align.ops.suffix_match import BLOCK, build_index
from tests.gpu_align.step_harness import BACKENDS, POISON, device_of, request_in


def bucket(token, bits):
    return (token * HASH % 2**32) >> (32 - bits)


def colliding(bits, count, below):
    """Different tokens of one bucket."""
    first = next(
        t for t in range(below) if sum(bucket(u, bits) == bucket(t, bits) for u in range(below)) >= count
    )
    return [t for t in range(below) if bucket(t, bits) == bucket(first, bits)][:count]


def make_state(predictions):
    """Predictions one behind the other, a slot each, in a poisoned arena; a page of poison in front and behind."""
    size = PAGE + sum(whole_pages(len(p)) for p in predictions) + PAGE
    state = allocate_state(len(predictions), 64, size, "cpu")
    for tensor in (state.prediction_tokens, state.positions, state.offsets):
        tensor.fill_(POISON)
    base = PAGE
    for slot, prediction in enumerate(predictions):
        if prediction:
            store_prediction(state, base, np.array(prediction, dtype=np.int32))
        occupy_slot(state, slot, base, len(prediction), 0, use_context=True)
        base += whole_pages(len(prediction))
    return state


def ends_of(prediction, token):
    """All ends behind a token of its bucket, ascending: what a lookup chooses from."""
    bits = index_bits(whole_pages(len(prediction)))
    return [e for e in range(1, len(prediction)) if bucket(prediction[e - 1], bits) == bucket(token, bits)]


def test_sizes_of_an_index():
    assert [index_bits(n) for n in (256, 512, 768, 1024, 1 << 20)] == [7, 8, 8, 9, 19]
    assert [context_index_bits(n) for n in (1, 16, 17, 32, 33, 8192)] == [0, 0, 1, 1, 2, 9]
    # As many entries as the context has tokens, or up to twice as many.
    assert all(n <= WAYS << context_index_bits(n) < 2 * max(n, WAYS) + WAYS for n in range(1, 3000))


@pytest.mark.parametrize("bits", [1, 7, 19, 31])
def test_buckets(bits):
    for token in (0, 1, 2, 131_071, 2**31 - 1, -1, -(2**31)):
        assert bucket_of(np.int32(token), np.int32(32 - bits)) == bucket(token, bits)


def token_in(bucket, bits):
    """The int32 whose product with `HASH` has `bucket` in its upper bits, and nothing below."""
    token = (bucket << 32 - bits) * pow(HASH, -1, 2**32) % 2**32
    return token - (token >> 31 << 32)


def check_index(text, bits, backend):
    """The index of a text against plain Python; what is beside it stays as it was."""
    size, device = len(text), device_of(backend)
    room = max(size, 2**bits + 1)
    tensors = [torch.full((room + 20,), POISON, dtype=torch.int32, device=device) for _ in range(3)]
    tensors[0][10 : 10 + size] = torch.tensor(text, dtype=torch.int32, device=device)
    build_index(*tensors, 10, size, bits, backend)
    buckets = [bucket(token, bits) for token in text]
    ends = sorted(range(1, size), key=lambda e: (buckets[e - 1], e))
    counts = Counter(buckets[:-1])
    starts = list(accumulate((counts[b] for b in range(2**bits)), initial=0))
    around = [POISON] * 10
    assert tensors[1].tolist() == around + ends + [POISON] * (room + 10 - len(ends))
    assert tensors[2].tolist() == around + starts + [POISON] * (room + 10 - len(starts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [0, 1, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 4000])
def test_index(size, bits, backend):
    rng = random.Random(size)
    check_index(
        [rng.choice([3, 3, rng.randrange(131072), -5, 2**31 - 1]) for _ in range(size)], bits, backend
    )


#: Sizes whose keys, and offsets, are around those of one program and of two; from 16 bits on keys have 32.
AROUND_BLOCKS = [
    (1, 10),
    (2, 10),
    *((BLOCK + n, 9) for n in (-1, 0, 1, 2)),
    (2 * BLOCK, 10),
    (2 * BLOCK + 1, 11),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["first", "last", "first and last", "middle", "every"])
@pytest.mark.parametrize(("size", "bits"), [*AROUND_BLOCKS, (3000, 16)])
def test_index_of_few_buckets(size, bits, used, backend):
    last = 2**bits - 1
    of = {"first": [0], "last": [last], "first and last": [last, 0, 0], "middle": [2 ** (bits - 1)]}
    buckets = of.get(used, range(last, -1, -1))
    tokens = [token_in(b, bits) for b in buckets]
    assert [bucket(token, bits) for token in tokens] == list(buckets)
    check_index([tokens[i % len(tokens)] for i in range(size)], bits, backend)


def look_up(predictions, slots, tokens, anchors):
    """Ends of each request."""
    state = make_state(predictions)
    found = []
    for slot, token, anchor in zip(slots, tokens, anchors, strict=True):
        prediction = request_in(state, slot, []).prediction
        begin, end = nearest(prediction, np.int32(token), anchor)
        assert 0 <= end - begin <= NEAREST
        found.append(prediction.positions[begin:end].tolist())
    return found


def window_of(ends, anchor):
    """32 of the ends: 16 before the anchor and 16 from it on, or more of the one where the other has fewer."""
    if len(ends) <= NEAREST:
        return ends
    before = len([e for e in ends if e < anchor])
    low = min(max(before - 16, 0), len(ends) - 32)
    return ends[low : low + 32]


def test_of_many_occurrences_those_around_the_anchor():
    # The token 7 at every third place, behind tokens of other buckets.
    others = [t for t in range(500, 800) if bucket(t, 8) != bucket(7, 8)]
    prediction = [t for i in range(100) for t in (others[i], others[100 + i], 7)]
    assert ends_of(prediction, 7) == list(range(3, 300, 3))
    [middle, begin, end, exact] = look_up([prediction], [0] * 4, [7] * 4, [150, 0, 300, 151])
    assert middle == list(range(150 - 16 * 3, 150 + 16 * 3, 3))  # 16 before 150; 150 itself is not before it
    assert exact == list(range(153 - 16 * 3, 153 + 16 * 3, 3))
    assert begin == list(range(3, 99, 3))
    assert end == list(range(297 - 31 * 3, 300, 3))


@pytest.mark.parametrize("count", [31, 32, 33])
def test_the_last_end_is_no_end(count):
    """Nothing follows the end of a prediction, so it is not looked up."""
    [found] = look_up([[9] * (count + 1)], [0], [9], [5])
    assert found == window_of(list(range(1, count + 1)), 5)
    assert len(found) == min(count, 32)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_texts_without_an_index_to_speak_of(num_tokens):
    predictions = [[4] * 300, [4] * num_tokens]
    [found] = look_up(predictions, [1], [4], [0])
    assert found == list(range(1, num_tokens))


def test_tokens_of_one_bucket_are_all_candidates():
    """The bucket is looked up, not the token: `match_length` tells them apart."""
    a, b = colliding(7, 2, 400)
    prediction = [a, 399, b, 399, a, b, 399]
    ends = [1, 3, 5, 6]
    assert ends_of(prediction, a) == ends
    assert look_up([prediction], [0, 0], [a, b], [0, 7]) == [ends, ends]
    # Where they are more than 32, they push each other out of the window.
    many = [t for _ in range(40) for t in (a, b)]
    [found] = look_up([many], [0], [a], [40])
    assert found == list(range(24, 56))


@st.composite
def lookups(draw):
    predictions = [
        draw(
            st.one_of(
                st.lists(st.integers(0, draw(st.sampled_from([0, 1, 3, 200]))), max_size=60),
                st.integers(0, 2**32).map(lambda seed: random.Random(seed).choices(range(4), k=300)),
            )
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    slots = draw(st.permutations(range(len(predictions))))
    tokens = [draw(st.one_of(st.integers(0, 4), st.sampled_from([200, -1, 2**31 - 1]))) for _ in slots]
    return predictions, slots, tokens, [draw(st.integers(0, len(predictions[s]) + 3)) for s in slots]


@settings(max_examples=150, deadline=None, database=None)
@given(lookups())
def test_lookups_of_a_batch(case):
    predictions, slots, tokens, anchors = case
    expected = [
        window_of(ends_of(predictions[s], token), anchor)
        for s, token, anchor in zip(slots, tokens, anchors, strict=True)
    ]
    assert look_up(*case) == expected


@pytest.mark.parametrize("bits", [0, 1, 2, 9])
def test_the_shift_is_that_of_the_number_of_buckets(bits):
    assert shift_of(2**bits, 32) == 32 - bits


LENGTHS = [0, 1, 2, 7, 8, 9, 63, 64, 65, 80]


def length_of(text, base, end, context, total, most):
    return match_length(np.array(text, np.int32)[base:], end, np.array(context, np.int32)[:total], most)


@pytest.mark.parametrize("most", [1, 7, 8, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_match_of_each_length(length, most):
    """It ends where a token differs, or the text or the counting does."""
    run = list(range(200, 200 + length))
    assert length_of([1, 2, *run], 0, length + 2, [3, 4, *run], length + 2, most) == min(length, most)
    # The beginning of the text, with garbage before it that happens to match.
    before = [7, 8, *run]
    assert length_of([*before, 9], 2, length, before, length + 2, most) == min(length, most)


def test_a_vacant_slot_is_told_in_the_layout():
    state = allocate_state(2, 40, PAGE, "cpu")
    assert state.slot_meta[:, constants.OUTPUT_START].tolist() == [constants.VACANT] * 2
    assert state.slot_meta[:, constants.CONTEXT_START].tolist() == [constants.VACANT] * 2
    assert state.align_state[:, constants.SEEN].tolist() == [-1, -1]
    assert state.context_index.shape == (2, 4, WAYS)
