"""Where a token occurs, in a prediction and in the context: everything against plain Python."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.ops import constants
from gpu_align.ops.constants import HASH, NEAREST, PAGE, WAYS, context_index_bits, index_bits, whole_pages
from gpu_align.ops.reference.suffix_match import (
    Context,
    bucket_of,
    insert_context,
    match_length,
    nearest,
    shift_of,
)
from gpu_align.ops.slots import occupy_slot, store_prediction
from gpu_align.ops.state import allocate_state
from tests.gpu_align.step_harness import DEVICE, POISON, request_in

SIZES = [1, 2, 3, 31, 32, 33, 255, 256, 257, 1000]


def bucket(token, bits):
    return (token * HASH % 2**32) // 2 ** (32 - bits)


def colliding(bits, count, below):
    """Different tokens of one bucket."""
    first = next(
        t for t in range(below) if sum(bucket(u, bits) == bucket(t, bits) for u in range(below)) >= count
    )
    return [t for t in range(below) if bucket(t, bits) == bucket(first, bits)][:count]


def make_state(predictions, capacity=64, device="cpu"):
    """Predictions one behind the other, a slot each, in a poisoned arena; a page of poison in front and behind."""
    size = PAGE + sum(whole_pages(len(p)) for p in predictions) + PAGE
    state = allocate_state(len(predictions), capacity, size, device)
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


@pytest.mark.parametrize("alphabet", [1, 5, 131_072])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_an_index_holds_every_end_once_by_bucket(num_tokens, alphabet):
    generator = random.Random(num_tokens)
    prediction = [generator.randrange(alphabet) for _ in range(num_tokens)]
    state = make_state([[1, 2, 3], prediction, [4]], device=DEVICE)
    base, bits = PAGE + PAGE, index_bits(whole_pages(num_tokens))
    ordered = sorted(range(1, num_tokens), key=lambda end: (bucket(prediction[end - 1], bits), end))
    starts = [sum(bucket(t, bits) < b for t in prediction[:-1]) for b in range(2**bits + 1)]
    order, first = state.positions.tolist(), state.offsets.tolist()
    assert order[base : base + num_tokens - 1] == ordered
    assert first[base : base + 2**bits + 1] == starts
    # Nothing is written beyond: the pages of the neighbours are as they were.
    assert first[base + 2**bits + 1 : base + whole_pages(num_tokens)] == [POISON] * (
        whole_pages(num_tokens) - 2**bits - 1
    )
    assert order[base + num_tokens - 1 : base + whole_pages(num_tokens)] == [POISON] * (
        whole_pages(num_tokens) - num_tokens + 1
    )
    assert order[:PAGE] == first[:PAGE] == [POISON] * PAGE
    assert order[PAGE : PAGE + 2] == sorted([1, 2], key=lambda end: (bucket(end, 7), end))


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


class TestContextIndex:
    """The latest ends of each token in contexts that grow."""

    def run(self, contexts, splits, capacity):
        """Enter the contexts, each in its own portions. Returns the buckets, and the places by plain Python."""
        bits = context_index_bits(capacity)
        index = np.full((len(contexts), 2**bits, WAYS), -1, dtype=np.int32)
        rows = np.full((len(contexts), capacity), POISON, dtype=np.int32)
        expected = [{} for _ in contexts]
        for slot, context in enumerate(contexts):
            rows[slot, : len(context)] = context
            # The end behind all tokens is no end yet: nothing follows it.
            for end, token in enumerate(context[:-1], 1):
                expected[slot][bucket(token, bits), end % WAYS] = end
            done = 0
            while done < len(context):
                total = min(done + next(splits), len(context))
                insert_context(Context(rows[slot, :total], 0, index[slot], 32 - bits, True), done)
                done = total
        return index, expected, bits

    @pytest.mark.parametrize("capacity", [1, 16, 17, 40, 300])
    def test_of_the_ends_that_share_a_place_the_latest_stays(self, capacity):
        generator = random.Random(capacity)
        for alphabet in (1, 3, 1000):
            contexts = [
                generator.choices(range(alphabet), k=generator.randint(0, capacity)) for _ in range(3)
            ]
            for splits in (iter(lambda: 10_000, 0), iter(lambda: generator.randint(1, 20), 0)):
                index, expected, bits = self.run(contexts, splits, capacity)
                for slot, places in enumerate(expected):
                    for b in range(2**bits):
                        wanted = [places.get((b, way), -1) for way in range(WAYS)]
                        assert index[slot, b].tolist() == wanted

    def test_a_token_at_every_place_is_remembered_for_its_last_sixteen(self):
        index, _, bits = self.run([[5] * 40], iter(lambda: 7, 0), 40)
        assert sorted(index[0, bucket(5, bits)].tolist()) == list(range(24, 40))

    @pytest.mark.parametrize("bits", [0, 1, 2, 9])
    def test_the_shift_is_that_of_the_number_of_buckets(self, bits):
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


def test_matches_of_many_places():
    generator = random.Random(4)
    for _ in range(60):
        alphabet = generator.choice([1, 2, 5])
        text = generator.choices(range(alphabet), k=generator.randint(1, 90))
        context = generator.choices(range(alphabet), k=90)
        for _ in range(9):
            end, total = generator.randint(0, len(text)), generator.randint(0, 90)
            most, base = generator.randint(0, min(total, 64)), generator.choice([0, 5])
            expected = 0
            while expected < min(end, most) and text[end - 1 - expected] == context[total - 1 - expected]:
                expected += 1
            assert length_of([POISON] * base + text, base, end, context, total, most) == expected


def test_a_vacant_slot_is_told_in_the_layout():
    state = allocate_state(2, 40, PAGE, "cpu")
    assert state.slot_meta[:, constants.OUTPUT_START].tolist() == [constants.VACANT] * 2
    assert state.slot_meta[:, constants.CONTEXT_START].tolist() == [constants.VACANT] * 2
    assert state.align_state[:, constants.SEEN].tolist() == [-1, -1]
    assert state.context_index.shape == (2, 4, WAYS)
