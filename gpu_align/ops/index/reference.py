"""The indexes as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..host import bucket_of, starts_over
from ..jit import njit, to_int
from ..layout import NEAREST, WAYS, Bucket, SourceText

IntArray = npt.NDArray[np.signedinteger[Any]]


@njit
def load_bucket(prediction: SourceText, token: int, is_token: bool) -> Bucket:
    """The `Bucket` of a token in the prediction; an empty one where there is no token."""
    # Without positions there may be no index.
    if not is_token or prediction.length < 2:
        return Bucket(0, 0)
    bucket, offsets = bucket_of(token, prediction.index.shift), prediction.index.offsets
    return Bucket(to_int(offsets[bucket]), to_int(offsets[bucket + 1]))


@njit
def nearest(prediction: SourceText, bucket: Bucket, anchor: int) -> tuple[int, int]:
    """``(begin, end)`` in the prediction's positions: up to `NEAREST` of a bucket, around the anchor."""
    begin, end = bucket.begin, bucket.end
    if end - begin > NEAREST:
        before = int(np.searchsorted(prediction.index.positions[begin:end], anchor))
        begin += min(max(before - NEAREST // 2, 0), end - begin - NEAREST)
        end = begin + NEAREST
    return begin, end


@njit
def insert_context(context: SourceText, seen: int) -> None:
    """Enter the positions ``seen <= p < length``: ``ways[bucket, p % WAYS]`` is the latest of them.

    A request that `starts_over` enters all of its positions in an empty index.

    The position after all tokens is entered with the next ones: nothing follows it yet.
    """
    if starts_over(context.length, seen):
        context.index.ways[:] = -1
        seen = 0
    for position in range(max(seen, 1), context.length):
        bucket = bucket_of(context.tokens[position - 1], context.index.shift)
        context.index.ways[bucket, position % WAYS] = position
