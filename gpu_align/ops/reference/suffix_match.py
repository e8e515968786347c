"""What `kernels` does, as loops: what the kernels are checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..constants import FIRST_CONTEXT, HASH, MAX_MATCH, NEAREST, NUM_MATCHES, TIE, WAYS
from ..jit import njit

IntArray = npt.NDArray[np.signedinteger[Any]]


class PredictionArrays(NamedTuple):
    """One request's prediction and its index."""

    #: [n] int32: no tokens where there is no prediction.
    tokens: IntArray
    #: [n - 1] int32 or longer: positions by bucket.
    positions: IntArray
    #: [buckets + 1] int32 or longer: where each bucket begins.
    offsets: IntArray
    #: Of `bucket_of`.
    hash_shift: int


class ContextArrays(NamedTuple):
    """One request's prompt and output, and its index."""

    #: [total] int32.
    tokens: IntArray
    #: Tokens of the prompt.
    output_start: int
    #: [buckets, WAYS] int32: latest positions, -1 for none.
    ways: IntArray
    #: Of `bucket_of`.
    hash_shift: int
    #: Whether drafts may come from it.
    is_used: bool


@njit
def bucket_of(token: int, shift: int) -> int:
    """The upper ``32 - shift`` bits of the token's product with `HASH`, modulo 2**32."""
    return ((int(token) * HASH) & 0xFFFFFFFF) >> int(shift)


@njit
def shift_of(num_buckets: int, bits: int) -> int:
    """``bits - log2(num_buckets)``: a key of `bits` bits, shifted by this, is a bucket."""
    shift = bits
    while num_buckets >> (bits - shift) > 1:
        shift -= 1
    return shift


@njit
def rank_of(position: int, anchor: int) -> int:
    """Ties: the position nearest to the anchor has the lowest rank; at the same distance the one ahead of it."""
    return 2 * (position - anchor) if position >= anchor else 2 * (anchor - position) + 1


@njit
def position_of(rank: int, anchor: int) -> int:
    """The position that has this rank."""
    return anchor + rank // 2 if rank % 2 == 0 else anchor - rank // 2


@njit
def nearest(prediction: PredictionArrays, token: int, anchor: int) -> tuple[int, int]:
    """``(begin, end)`` in the prediction's positions: up to `NEAREST` of the token's bucket, around the anchor."""
    # Without two tokens there are no positions, and maybe no index.
    if len(prediction.tokens) < 2:
        return 0, 0
    bucket = bucket_of(token, prediction.hash_shift)
    begin, end = int(prediction.offsets[bucket]), int(prediction.offsets[bucket + 1])
    if end - begin > NEAREST:
        before = int(np.searchsorted(prediction.positions[begin:end], anchor))
        begin += min(max(before - NEAREST // 2, 0), end - begin - NEAREST)
        end = begin + NEAREST
    return begin, end


@njit
def match_length(text: IntArray, position: int, last: IntArray, most: int) -> int:
    """Length of the common end of ``text[:position]`` and `last`, at most `most`, which is at most len(last)."""
    most = min(most, position)
    length = 0
    while length < most and text[position - 1 - length] == last[len(last) - 1 - length]:
        length += 1
    return length


@njit
def find_matches(
    prediction: PredictionArrays,
    context: ContextArrays,
    cursor: int,
    min_match: int,
    min_context_match: int,
    keys: IntArray,
) -> None:
    """Write the keys of the `NUM_MATCHES` best matches of each text, in falling order; -1 for none.

    Matches in the prediction are in the first lanes, those in the context in the lanes from `FIRST_CONTEXT` on.
    """
    tokens, total = context.tokens, len(context.tokens)
    num_output = max(total - context.output_start, 0)
    keys[:] = -1
    if num_output > 0:
        begin, end = nearest(prediction, tokens[total - 1], cursor)
        for i in range(begin, end):
            position = int(prediction.positions[i])
            matched = match_length(prediction.tokens, position, tokens, min(num_output, MAX_MATCH))
            if matched >= min_match:
                enter(keys, 0, (matched - 1) * TIE + TIE - 1 - rank_of(position, cursor))
    if context.is_used and total > 0:
        bucket = bucket_of(tokens[total - 1], context.hash_shift)
        for way in range(WAYS):
            position = int(context.ways[bucket, way])
            if 0 < position < total:
                matched = match_length(tokens, position, tokens, MAX_MATCH)
                if matched >= min_context_match:
                    enter(keys, FIRST_CONTEXT, (matched - 1) * TIE + position)


@njit
def enter(keys: IntArray, first: int, key: int) -> None:
    """Put a key in its place among the `NUM_MATCHES` lanes from `first` on, if it is among the largest."""
    lane = first + NUM_MATCHES - 1
    if keys[lane] > key:
        return
    while lane > first and keys[lane - 1] < key:
        keys[lane] = keys[lane - 1]
        lane -= 1
    keys[lane] = key


@njit
def best_matches(keys: IntArray, cursor: int, position: IntArray, matched: IntArray) -> None:
    """Write the ``(position, matched)`` that each key stands for; -1, 0 for none."""
    for lane in range(len(keys)):
        key = int(keys[lane])
        position[lane], matched[lane] = -1, 0
        if key >= 0:
            tie = key % TIE
            position[lane] = tie if lane >= FIRST_CONTEXT else position_of(TIE - 1 - tie, cursor)
            matched[lane] = key // TIE + 1


@njit
def clear_context(context: ContextArrays) -> None:
    """``context_index[slot] = -1``."""
    context.ways[:] = -1


@njit
def insert_context(context: ContextArrays, seen: int) -> None:
    """Enter the positions ``seen <= p < total``: ``ways[bucket, p % WAYS]`` is the latest of them.

    The position behind all tokens is entered with the next ones: nothing follows it yet.
    """
    for position in range(max(seen, 1), len(context.tokens)):
        context.ways[bucket_of(context.tokens[position - 1], context.hash_shift), position % WAYS] = position


def scan(text: IntArray, context: IntArray, anchor: int | None, max_match: int) -> tuple[int, int]:
    """``(end, length)`` of the best match over all positions of one text; ``(-1, 0)`` where there is none."""
    limit = min(max_match, len(context))
    ends = np.flatnonzero(text[:-1] == context[-1]) + 1 if limit else np.zeros(0, dtype=np.int64)
    if ends.size == 0:
        return -1, 0
    back = np.arange(limit)
    same = text[np.maximum(ends[:, None] - 1 - back, 0)] == context[len(context) - 1 - back]
    same &= ends[:, None] > back
    lengths = np.where(same.all(axis=1), limit, same.argmin(axis=1))
    # Ties: the lowest `rank`; without an anchor the latest.
    ranks = -ends
    if anchor is not None:
        ranks = np.where(ends >= anchor, 2 * (ends - anchor), 2 * (anchor - ends) + 1)
    best = np.lexsort((ranks, -lengths))[0]
    return int(ends[best]), int(lengths[best])


def suffix_match_reference(
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    text: torch.Tensor,
    text_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    anchor: torch.Tensor | None,
    end: torch.Tensor,
    length: torch.Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Same arguments, same results and same order of axes as the kernel's launcher; all on the CPU."""
    starts, context_lens, text_lens = (t.numpy() for t in (context_start, context_len, text_len))
    contexts, texts, ends, lengths = context.numpy(), text.numpy(), end.numpy(), length.numpy()
    anchors = None if anchor is None else anchor.tolist()
    for b, (slot, is_active) in enumerate(zip(slots.tolist(), active.tolist(), strict=True)):
        tokens = texts[slot, : text_lens[slot]]
        last = contexts[slot, starts[slot] : context_lens[slot]]
        found = scan(tokens, last, None if anchors is None else anchors[b], max_match)
        ends[b], lengths[b] = found if is_active > 0 and found[1] >= min_match else (-1, 0)
