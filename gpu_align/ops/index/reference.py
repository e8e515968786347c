"""Lookups as loops: what the kernel is checked against, and what runs on the CPU. Context is one row [T]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._jit import njit
from ..layout import HASH, NEAREST, TEXT_BASE, TEXT_LEN, TEXT_SHIFT, WAYS
from ..state import StepArrays

IntArray = npt.NDArray[np.signedinteger[Any]]


@njit
def bucket_of(token: int, shift: int) -> int:
    """The upper ``32 - shift`` bits of the token's product with `HASH`, modulo 2**32."""
    return ((int(token) * HASH) & 0xFFFFFFFF) >> int(shift)


@njit
def nearest(state: StepArrays, slot: int, token: int, anchor: int) -> tuple[int, int]:
    """``order[begin:end]`` are the up to `NEAREST` ends whose last token shares the token's bucket.

    Those next to the anchor by rank: half of them before it, as far as there are any, and the others from it on.
    """
    about = state.about[slot]
    if about[TEXT_LEN] < 2:
        return 0, 0
    base = int(about[TEXT_BASE])
    at = base + bucket_of(token, about[TEXT_SHIFT])
    begin, end = base + int(state.first[at]), base + int(state.first[at + 1])
    if end - begin > NEAREST:
        before = int(np.searchsorted(state.order[begin:end], anchor))
        begin += min(max(before - NEAREST // 2, 0), end - begin - NEAREST)
        end = begin + NEAREST
    return begin, end


@njit
def recent_shift(recent: IntArray) -> int:
    """The shift of `bucket_of` for the index of a context. recent: [buckets, `WAYS`]."""
    shift = 32
    while len(recent) >> (32 - shift) > 1:
        shift -= 1
    return shift


@njit
def insert_recent(recent: IntArray, context: IntArray, seen: int, total: int) -> None:
    """Enter the ends ``seen <= e < total`` of one context: ``recent[bucket, e % WAYS]`` is the latest of them.

    The end behind all tokens is entered with the next ones: nothing follows it yet.
    """
    shift = recent_shift(recent)
    for end in range(max(seen, 1), total):
        recent[bucket_of(context[end - 1], shift), end % WAYS] = end


@njit
def match_length(text: IntArray, base: int, end: int, context: IntArray, total: int, most: int) -> int:
    """How many of the last tokens, at most `most`, ``text[base : base + end]`` and ``context[:total]`` share."""
    most = min(most, end)
    length = 0
    while length < most and text[base + end - 1 - length] == context[total - 1 - length]:
        length += 1
    return length
