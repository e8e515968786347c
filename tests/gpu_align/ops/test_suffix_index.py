"""Where a token occurs, in a prediction and in the context: everything against plain Python."""

import random
from collections import Counter
from itertools import accumulate, chain

import pytest
import torch

from gpu_align.ops.index import BLOCK, admit
from gpu_align.ops.layout import (
    HASH,
    STAGED_TEXT,
    WAYS,
    allocate_state,
    context_index_bits,
    index_bits,
    whole_pages,
)
from tests.gpu_align.engine import BACKENDS, POISON, device_of


def bucket(token, bits):
    return (token * HASH % 2**32) >> (32 - bits)


def test_sizes_of_an_index():
    assert [index_bits(n) for n in (256, 512, 768, 1024, 1 << 20)] == [7, 8, 8, 9, 19]
    assert [context_index_bits(n) for n in (1, 8192, 8193, 16_384, 16_385)] == [9, 9, 10, 10, 11]
    # As many entries as the context has tokens, or up to twice as many.
    assert all(n <= WAYS << context_index_bits(n) < 2 * max(n, 4096) + WAYS for n in range(1, 30_000))


def token_in(bucket, bits):
    """The int32 whose product with `HASH` has `bucket` in its upper bits, and nothing below."""
    token = (bucket << 32 - bits) * pow(HASH, -1, 2**32) % 2**32
    return token - (token >> 31 << 32)


def check_index(texts, bits, backend):
    """The indexes of texts that come together against plain Python; what is beside them stays as it was."""
    device, table, tokens, rooms, base = device_of(backend), [], [], [], 10
    for text in texts:
        rooms.append(max(len(text), 2**bits + 1))
        table.append([base, len(text), 32 - bits, STAGED_TEXT * len(texts) + len(tokens)])
        tokens += text
        base += rooms[-1] + 10
    state = allocate_state(1, 64, base, device)
    for tensor in state:
        tensor.fill_(POISON)
    staged = torch.tensor([*chain(*table), *tokens], dtype=torch.int32, device=device)
    rows = torch.zeros((1, 64), dtype=torch.int32, device=device)
    admit(state, rows, rows[:, 0], staged, 0, len(texts), max(map(len, texts)), 23, backend)
    found = [tensor.tolist() for tensor in state[:3]]
    for text, room, (base, size, *_) in zip(texts, rooms, table, strict=True):
        buckets = [bucket(token, bits) for token in text]
        ends = sorted(range(1, size), key=lambda e: (buckets[e - 1], e))
        counts = Counter(buckets[:-1])
        starts = list(accumulate((counts[b] for b in range(2**bits)), initial=0))
        for column, expected in zip(found, (text, ends, starts), strict=True):
            assert column[base - 10 : base] == [POISON] * 10
            assert column[base : base + len(expected)] == expected
            assert column[base + room :][:10] == [POISON] * 10
    assert all((tensor == POISON).all() for tensor in state[3:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [0, 1, 7, 11])
def test_index(bits, backend):
    rng = random.Random(bits)
    sizes = [size for size in (1, 2, 3, 255, 256, 257, 4000) if 2 << bits <= whole_pages(size)]
    words = [
        [rng.choice([3, 3, rng.randrange(131072), -5, 2**31 - 1]) for _ in range(size)] for size in sizes
    ]
    check_index(words, bits, backend)
    check_index(words[:1], bits, backend)


#: Sizes whose keys, and offsets, are around those of one program and of two.
BLOCKS = [(1, 7), (2, 7), (2 * BLOCK, 10), (2 * BLOCK + 1, 10)] + [(BLOCK + n, 9) for n in (-1, 0, 1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "bits"), BLOCKS)
def test_index_of_few_buckets(size, bits, backend):
    last = 2**bits - 1
    for buckets in ([0], [last], [last, 0, 0], [2 ** (bits - 1)], range(last, -1, -1)):
        tokens = [token_in(b, bits) for b in buckets[:size]]
        assert [bucket(token, bits) for token in tokens] == list(buckets[:size])
        check_index([[tokens[i % len(tokens)] for i in range(size)]], bits, backend)
