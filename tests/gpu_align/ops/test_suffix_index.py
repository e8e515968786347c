"""Where a token occurs, in a prediction and in the context: everything against plain Python."""

import random
from collections import Counter
from itertools import accumulate

import pytest
import torch

from gpu_align.ops.index import BLOCK, build_index
from gpu_align.ops.layout import HASH, WAYS, context_index_bits, index_bits
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
def test_index(bits, backend):
    rng = random.Random(bits)
    for size in (1, 2, 3, 255, 256, 257, 4000):
        text = [rng.choice([3, 3, rng.randrange(131072), -5, 2**31 - 1]) for _ in range(size)]
        check_index(text, bits, backend)


#: Sizes whose keys, and offsets, are around those of one program and of two; from 16 bits on keys have 32.
BLOCKS = [(1, 10), (2, 10), (2 * BLOCK, 10), (2 * BLOCK + 1, 11), (3000, 16)]
BLOCKS += [(BLOCK + n, 9) for n in (-1, 0, 1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "bits"), BLOCKS)
def test_index_of_few_buckets(size, bits, backend):
    last = 2**bits - 1
    for buckets in ([0], [last], [last, 0, 0], [2 ** (bits - 1)], range(last, -1, -1)):
        tokens = [token_in(b, bits) for b in buckets[:size]]
        assert [bucket(token, bits) for token in tokens] == list(buckets[:size])
        check_index([tokens[i % len(tokens)] for i in range(size)], bits, backend)
