"""Lookups in NumPy, for many requests at once: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import HASH, NEAREST, TEXT_BASE, TEXT_LEN, TEXT_SHIFT, WAYS
from ..state import StepArrays

IntArray = npt.NDArray[np.signedinteger[Any]]
_NEAREST, _WAYS = np.arange(NEAREST), np.arange(WAYS)


def bucket_of(tokens: IntArray, shift: IntArray | int) -> npt.NDArray[np.int64]:
    """Bucket of each token: the upper ``32 - shift`` bits of its product with `HASH`, modulo 2**32."""
    found: npt.NDArray[np.int64] = ((tokens.astype(np.int64) * HASH) & 0xFFFFFFFF) >> shift
    return found


def nearest(state: StepArrays, slots: IntArray, tokens: IntArray, anchors: IntArray) -> npt.NDArray[np.int64]:
    """[R, `NEAREST`]: ends in each prediction whose last token shares the bucket of ``tokens[r]``; -1 for none.

    Those next to the anchor by rank: half of them before it, as far as there are any, and the others from it on.
    """
    about = state.about[slots]
    base, num_text = about[:, TEXT_BASE].astype(np.int64), about[:, TEXT_LEN]
    # A request without a prediction looks at the arena's first bucket, and is told that it is empty.
    at = base + np.where(num_text > 0, bucket_of(tokens, about[:, TEXT_SHIFT]), 0)
    begin = state.first[at].astype(np.int64)
    count = np.where(num_text > 1, state.first[at + 1] - begin, 0)
    begin += base
    low = np.zeros(len(slots), dtype=np.int64)
    large = np.flatnonzero(count > NEAREST)
    if large.size:
        before = _count_below(state.order, begin[large], count[large], anchors[large])
        low[large] = np.clip(before - NEAREST // 2, 0, count[large] - NEAREST)
    rank = low[:, None] + _NEAREST
    inside = rank < count[:, None]
    return np.where(inside, state.order[np.where(inside, begin[:, None] + rank, 0)], -1).astype(np.int64)


def _count_below(
    order: IntArray, begin: npt.NDArray[np.int64], count: IntArray, anchors: IntArray
) -> npt.NDArray[np.int64]:
    """How many of ``order[begin : begin + count]``, which ascends, are below the anchor."""
    low, high = np.zeros_like(begin), count.astype(np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        below = order[begin + np.minimum(middle, count - 1)] < anchors
        open_ = low < high
        low = np.where(open_ & below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def insert_recent(
    recent: IntArray, context: IntArray, slots: IntArray, begin: IntArray, new: IntArray, shift: int
) -> None:
    """Enter the ends ``begin[r] + 1 … begin[r] + new[r]`` of each context."""
    request = np.repeat(np.arange(len(slots)), new)
    ends = np.arange(len(request)) - np.repeat(np.cumsum(new) - new, new) + begin[request] + 1
    slot = slots[request]
    # Ends ascend, so of two that meet in one place the later is written last and stays.
    recent[slot, bucket_of(context[slot, ends - 1], shift), ends % WAYS] = ends


def recent_ends(recent: IntArray, slots: IntArray, tokens: IntArray, shift: int) -> npt.NDArray[np.int64]:
    """[R, `WAYS`]: latest ends in each context whose last token shares the bucket of ``tokens[r]``; -1: none."""
    ends: npt.NDArray[np.int64] = recent[slots[:, None], bucket_of(tokens, shift)[:, None], _WAYS].astype(
        np.int64
    )
    return ends


def match_lengths(
    text: IntArray,
    base: IntArray,
    ends: IntArray,
    context: IntArray,
    context_end: IntArray,
    limit: IntArray,
    most: int,
) -> npt.NDArray[np.int64]:
    """[R, L]: tokens that ``text[: base + end]`` and ``context[: context_end]`` have in common at their ends.

    At most `most`, ``limit[r]`` and ``end``; 0 where the end is negative. text and context are flat.
    """
    lengths = np.zeros(ends.shape, dtype=np.int64)
    flat = lengths.reshape(-1)
    ahead = np.minimum(ends, np.minimum(limit, most)[:, None]).reshape(-1)
    at = np.flatnonzero(ahead > 0)
    row = at // ends.shape[1]
    place = (base[row] + ends.reshape(-1)[at] - 1).astype(np.int64)
    last = context_end[row].astype(np.int64) - 1
    done = 0
    # One token first: most places end there. Then a few, then all the others.
    for width in (1, 7, most):
        if not at.size or done == most:
            break
        back = np.arange(done, min(done + width, most))
        inside = back < ahead[at, None]
        same = (
            text[np.where(inside, place[:, None] - back, 0)]
            == context[np.where(inside, last[:, None] - back, 0)]
        )
        same &= inside
        whole = same.all(axis=1)
        flat[at] += np.where(whole, len(back), same.argmin(axis=1))
        done += len(back)
        at, place, last = at[whole], place[whole], last[whole]
    return lengths
