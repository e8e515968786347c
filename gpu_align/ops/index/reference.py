"""The indexes as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..host import layout, njit, to_int
from ..layout import ContextIndex, IntArray, SourceText


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
def insert_context(context: SourceText, indexed: int) -> None:
    """Enter the positions ``indexed <= p < length``: ``ways[bucket, p % layout.WAYS]`` is the latest of them.

    Of an index that is not cleared yet, or of which tokens were taken back, all positions in an empty one.

    The position after all tokens is entered with the next ones: nothing follows it yet.
    """
    if indexed < 0 or context.length < indexed:
        clear_index(context.index, 0, 1)
        indexed = 0
    for position in range(max(indexed, 1), context.length):
        bucket = layout.bucket_of(context.tokens[position - 1], context.index.shift)
        context.index.ways[bucket, position % layout.WAYS] = position


@njit
def clear_index(index: ContextIndex, i_part: int, num_parts: int) -> None:
    """Enter none in the buckets of a part of the index."""
    index.ways[i_part::num_parts] = -1


def append_reference(
    token_ids: IntArray, total_len: IntArray, slots: IntArray, num_new: IntArray, new_tokens: IntArray
) -> None:
    """Write new tokens after those that rows hold, see `ops.index.append`."""
    for b, slot in enumerate(slots):
        total = min(max(int(total_len[slot]), 0), token_ids.shape[1])
        num = min(int(num_new[b]), new_tokens.shape[1], token_ids.shape[1] - total)
        if num > 0:
            token_ids[slot, total : total + num] = new_tokens[b, :num]
            total_len[slot] = total + num


def admit_reference(
    state: Any, token_ids: IntArray, total_len: IntArray, staged: IntArray, num_rows: int, num_texts: int
) -> None:
    """Write rows of slots, and texts with their indexes, see `ops.index.admit`. state: `StepState` of arrays."""
    for row in staged[: num_rows * layout.STAGED_ROW].reshape(-1, layout.STAGED_ROW):
        slot, is_new, meta, (start, num) = int(row[0]), row[1], row[2:-2], row[-2:].tolist()
        if num >= 0:
            token_ids[slot, :num], total_len[slot] = staged[start : start + num], num
        align_state = state.align_state[slot]
        state.slot_meta[slot] = meta
        if is_new:
            align_state[layout.SEEN], align_state[layout.INDEXED] = -1, 0
            if meta[layout.USES_CONTEXT]:
                state.context_index[slot] = -1
        else:
            align_state[layout.SEEN] = min(align_state[layout.SEEN], 0)
    texts = staged[num_rows * layout.STAGED_ROW :][: num_texts * layout.STAGED_TEXT]
    for base, num_tokens, shift, start in texts.reshape(-1, layout.STAGED_TEXT).tolist():
        tokens, num_keys = staged[start : start + num_tokens], num_tokens - 1
        state.prediction_tokens[base : base + num_tokens] = tokens
        bucket = ((tokens[:-1].astype(np.int64) * layout.HASH) & 0xFFFFFFFF) >> shift
        # A radix sort, where 16 bits are enough.
        order = np.argsort(bucket.astype(np.uint16 if shift >= 16 else np.int32), kind="stable")
        state.positions[base : base + num_keys] = order + 1
        counts = np.bincount(bucket, minlength=1 << (32 - shift))
        state.offsets[base] = 0
        np.cumsum(counts, out=state.offsets[base + 1 : base + 1 + len(counts)])
