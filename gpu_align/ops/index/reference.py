"""The indexes as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np

from ..host import layout, njit, to_int
from ..layout import SourceText


@njit
def load_bucket(prediction: SourceText, token: int) -> tuple[int, int]:
    """``(begin, end)``: the positions after a token in the prediction."""
    if prediction.length < 2:  # without positions there may be no index
        return 0, 0
    bucket, offsets = layout.bucket_of(token, prediction.index.shift), prediction.index.offsets
    return to_int(offsets[bucket]), to_int(offsets[bucket + 1])


@njit
def nearest(prediction: SourceText, bucket: tuple[int, int], anchor: int, most: int) -> tuple[int, int]:
    """``(begin, end)`` in the prediction's positions: up to `most` of a bucket, around the anchor."""
    begin, end = bucket
    if end - begin > most:
        before = int(np.searchsorted(prediction.index.positions[begin:end], anchor))
        begin += min(max(before - most // 2, 0), end - begin - most)
        end = begin + most
    return begin, end


@njit
def insert_context(context: SourceText, seen: int) -> None:
    """Enter the positions ``seen <= p < length``: ``ways[bucket, p % layout.WAYS]`` is the latest of them.

    A request that `starts_over` enters all of its positions in an empty index.

    The position after all tokens is entered with the next ones: nothing follows it yet.
    """
    if context.length > 0 and layout.starts_over(context.length, seen):
        context.index.ways[:] = -1
        seen = 0
    for position in range(max(seen, 1), context.length):
        bucket = layout.bucket_of(context.tokens[position - 1], context.index.shift)
        context.index.ways[bucket, position % layout.WAYS] = position
