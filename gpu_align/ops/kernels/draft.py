"""Device functions of a step that weigh the candidates of a request and compose its draft.

Candidates are lanes: four matches in the prediction, the positions around the cursor, four matches in the context,
then nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constexprs import *
from .realign import has_key
from .suffix_match import best_matches, find_matches, load_back_clamped, load_ways, match_length


class Candidates(NamedTuple):
    """Where the next tokens may be read from."""

    b_position: Any  # [LANES] int32; -1: there is no candidate
    b_matched: Any  # [LANES] int32
    b_token: Any  # [LANES] int32: what it expects next


class TablePointers(NamedTuple):
    """The survival tables for K."""

    p_max_draft_len: Any  # [NUM_CLASSES] int32, of this slot
    p_expected: Any  # [NUM_CLASSES, K + 1] int32, of this slot
    p_confidence: Any  # [NUM_CLASSES, K] float32


@triton.jit
def at_lane(b_values, lane):
    """One lane's value."""
    return tl.sum(tl.where(tl.arange(0, LANES) == lane, b_values, 0), axis=0)


@triton.jit
def candidates(prediction, context, bucket, cursor, num_common, min_match, min_context_match):
    """All candidates of a request that stands at `cursor`, with `num_common` tokens before it that agree."""
    o_c = tl.arange(0, LANES)
    o_near = cursor + o_c - AT_CURSOR
    m_near = (o_c >= NUM_MATCHES) & (o_c < FIRST_CONTEXT) & (o_near >= 0) & (o_near < prediction.length)
    num_output = context.total - context.output_start
    b_most = tl.where(m_near, tl.maximum(tl.minimum(tl.minimum(o_near, num_output), MAX_MATCH), 0), 0)
    b_known = tl.where((o_c == AT_CURSOR) & (num_common >= b_most), b_most, 0)
    p_last = context.p_tokens + context.total
    o_way = load_ways(context)  # before what takes long
    last = load_back_clamped(p_last - 1, context.total - 1, 16)
    b_near = b_known + match_length(
        prediction.p_tokens, o_near, b_most - b_known, p_last, num_output, last, 16, 16
    )
    b_key = find_matches(
        prediction, context, bucket, cursor, num_common, min_match, min_context_match, last, o_way
    )
    b_position, b_matched = best_matches(b_key, cursor)
    b_matched += b_near
    b_position = tl.where(m_near, o_near, b_position)
    m_live = b_position >= 0
    b_token = tl.load(context.p_tokens + b_position, mask=m_live & (o_c >= FIRST_CONTEXT), other=0)
    p_prediction = prediction.p_tokens + b_position
    b_token = tl.load(p_prediction, mask=m_live & (o_c < FIRST_CONTEXT), other=0) + b_token
    return Candidates(b_position, b_matched, b_token)


@triton.jit
def adherence_of(num_in_sync, num_output):
    is_loose = num_in_sync * LOOSE_SHARE < num_output
    adherence = tl.where(is_loose, ADHERENCE_LOOSE, ADHERENCE_CLOSE)
    return tl.where(num_in_sync * LOST_SHARE < num_output, ADHERENCE_LOST, adherence)


@triton.jit
def margins(found, adherence):
    """[LANES] int32."""
    o_c = tl.arange(0, LANES)
    m_live = found.b_position >= 0
    m_considered = m_live & (o_c >= tl.where(adherence == ADHERENCE_LOST, FIRST_CONTEXT, 0))
    b_reach = tl.where(m_considered, found.b_matched, -1)
    reach = tl.max(b_reach, axis=0)
    leader = tl.min(tl.where(b_reach == reach, o_c, LANES), axis=0)
    m_agrees = found.b_token == at_lane(found.b_token, leader)
    runner_up = tl.max(tl.where(m_agrees, 0, tl.where(m_considered, found.b_matched, 0)), axis=0)
    # Where nothing is considered, nothing is ahead of anything.
    b_margin = found.b_matched - tl.where(m_agrees, runner_up, tl.maximum(reach, 0))
    return tl.where(m_live, b_margin, 0)


@triton.jit
def score_deficit(b_position, alignment, p_row, num_window, top):
    """[LANES] int32."""
    b_ahead = b_position - alignment.cursor
    b_deficit = tl.where(b_ahead > 0, b_ahead, -b_ahead + BACKWARD_DEFICIT)
    if alignment.in_sync == 0:
        o_j = b_position - alignment.anchor
        m_row = (o_j >= 1) & (o_j <= num_window)
        b_common = tl.load(p_row + o_j - 1, mask=m_row, other=0).to(tl.int32)
        m_window = (o_j >= 0) & (o_j <= num_window)
        b_deficit = tl.where(m_window, top - (b_common * MATCH_WEIGHT - o_j), NO_SCORE)
    return b_deficit


@triton.jit
def alignment_bucket(b_position, cursor, b_deficit):
    """Alignment bucket of every candidate, [LANES] int32."""
    b_ahead = b_position - cursor
    b_near = tl.where(b_deficit <= MEDIUM_DEFICIT, ALIGNMENT_MEDIUM, ALIGNMENT_NEAR)
    b_near = tl.where(b_deficit <= SMALL_DEFICIT, ALIGNMENT_SMALL, b_near)
    b_far = tl.where(b_deficit <= LARGE_DEFICIT, ALIGNMENT_LARGE, ALIGNMENT_FAR)
    b_bucket = tl.where((b_ahead >= -CURSOR_BEHIND) & (b_ahead <= CURSOR_AHEAD), b_near, b_far)
    # At the cursor and next to it the distance is the bucket.
    b_bucket = tl.where((b_ahead == 0) | (b_ahead == ALIGNMENT_NEXT), b_ahead, b_bucket)
    return tl.where(tl.arange(0, LANES) < FIRST_CONTEXT, b_bucket, ALIGNMENT_CONTEXT)


@triton.jit
def bucket_number(b_value, EDGES: tl.constexpr, NUM: tl.constexpr):
    """How many of the ``NUM - 1`` edges each value has reached, [LANES] int32."""
    b_number = tl.zeros_like(b_value)
    for i in tl.static_range(NUM - 1):
        b_number += (b_value >= EDGES[i]).to(tl.int32)
    return b_number


@triton.jit
def classes(prediction, found, alignment, p_row, top, num_output):
    """Class of every candidate, [LANES] int32. num_output: with the adherence prior."""
    adherence = adherence_of(alignment.num_in_sync, num_output)
    num_window = tl.minimum(prediction.length - alignment.anchor, WINDOW)
    b_deficit = score_deficit(found.b_position, alignment, p_row, num_window, top)
    b_margin = margins(found, adherence)
    b_bucket = alignment_bucket(found.b_position, alignment.cursor, b_deficit)
    b_class = bucket_number(found.b_matched, LENGTH_EDGES, NUM_LENGTHS) * NUM_MARGINS
    b_class += bucket_number(b_margin, MARGIN_EDGES, NUM_MARGINS)
    return (b_class * NUM_ALIGNMENTS + b_bucket) * NUM_ADHERENCES + adherence


@triton.jit
def is_exact_prefix(alignment, num_output):
    is_all = (alignment.cursor == num_output) & (alignment.num_in_sync == num_output)
    return (alignment.in_sync > 0) & is_all & (num_output <= MAX_MATCH)


@triton.jit
def worth(found, b_class, tables, length_quarters, K: tl.constexpr):
    """``(num, expected)``, [LANES] int32 each."""
    m_live = found.b_position >= 0
    b_num = tl.minimum(length_quarters * (found.b_matched + 1) // 4, K)
    b_num = tl.where(found.b_matched >= MAX_MATCH, K, b_num)
    # Expected drafts are a table of both limits: its load waits for no other.
    b_expected = tl.load(tables.p_expected + b_class * (K + 1) + b_num, mask=m_live, other=0)
    b_num = tl.minimum(b_num, tl.load(tables.p_max_draft_len + b_class, mask=m_live, other=0))
    return b_num, b_expected


@triton.jit
def choose(found, b_class, is_exact_prefix, tables, length_quarters, K: tl.constexpr):
    """Expected drafts are below ``K * 2**16``, K at most 256: with the lane they are a key of 31 bits."""
    o_c = tl.arange(0, LANES)
    m_exact = o_c == tl.where(is_exact_prefix, AT_CURSOR, LANES)
    b_num, b_expected = worth(found, b_class, tables, length_quarters, K)
    b_num = tl.where(m_exact, K, b_num)
    b_expected = tl.where(m_exact, EXACT_PREFIX, b_expected)
    top = tl.max(tl.where(found.b_position >= 0, b_expected * LANES + (-o_c + (LANES - 1)), 0), axis=0)
    lane = -(top % LANES) + (LANES - 1)
    return lane, tl.where(top >= LANES, at_lane(b_num, lane), 0), top // LANES


@triton.jit
def wraps_around(matched, period):
    return matched >= period


@triton.jit
def trusts_edits(edits):
    m_valid = edits.b_before != NO_EDIT
    invalid = tl.minimum(edits.count, MAX_EDITS) - tl.sum(m_valid.to(tl.int32), axis=0)
    return tl.sum(tl.where(m_valid, edits.b_seen_before, 0), axis=0) >= invalid


@triton.jit
def latest_edit(prediction, edits, b_age, m_trusted, o_position, o_look, num):
    """``look * MAX_EDITS + age`` of the first position with the key of an edit, and of its edits the latest one.

    `NOWHERE` where no position has one. o_look: [EDIT_LOOKUPS], the draft at each position, below `num`.
    """
    m_edit = has_key(prediction, edits, o_position, o_look < num)
    m_edit = m_edit & (o_position[:, None] + edits.b_old[None, :] <= prediction.length)
    m_edit = m_edit & m_trusted[None, :]
    b_key = tl.where(m_edit, (o_look * MAX_EDITS)[:, None] + b_age[None, :], NOWHERE)
    return tl.min(tl.min(b_key, axis=0), axis=0)


@triton.jit
def compose(prediction, output_start, edits, position, num, BLOCK_K: tl.constexpr):
    """``(offset [BLOCK_K], from_context [BLOCK_K], num)``: where each draft is read, and how many there are."""
    o_k = tl.arange(0, BLOCK_K)
    o_way = tl.arange(0, MAX_EDITS)
    o_source = position + o_k
    b_context = tl.zeros([BLOCK_K], tl.int32)
    # From draft `since` on the prediction is read on from `position`; edits are looked for from `clear` on.
    since = 0
    clear = 0
    replays = tl.where(edits.count > 0, 0, MAX_REPLAYS)
    m_trusted = (edits.b_seen_before > 0) | trusts_edits(edits)
    while (replays < MAX_REPLAYS) & (clear < num):
        o_look = clear + tl.arange(0, EDIT_LOOKUPS)
        o_position = position + o_look - since
        # `age` 0 is that of the last lane written.
        b_age = (edits.count - 1 - o_way) & (MAX_EDITS - 1)
        key = latest_edit(prediction, edits, b_age, m_trusted, o_position, o_look, num)
        clear += EDIT_LOOKUPS
        if key != NOWHERE:
            replays += 1
            k = key // MAX_EDITS
            m_way = b_age == key % MAX_EDITS
            position += k - since + tl.sum(tl.where(m_way, edits.b_old, 0), axis=0)
            since = k + tl.sum(tl.where(m_way, edits.b_new, 0), axis=0)
            clear = since + 1
            start = output_start + tl.sum(tl.where(m_way, edits.b_start, 0), axis=0)
            o_new = tl.where(o_k < since, start + o_k - k, position + o_k - since)
            o_source = tl.where(o_k >= k, o_new, o_source)
            b_context = tl.where(o_k >= k, (o_k < since).to(tl.int32), b_context)
    return o_source, b_context, tl.minimum(num, since + prediction.length - position)


@triton.jit
def line_layout(recipes, b_token):
    """The table must not be empty."""
    return tl.load(recipes.p_indents + NUM_RUNS + tl.minimum(tl.maximum(b_token, 0), recipes.num_indents - 1))


@triton.jit
def indentation_shift(prediction, context, recipes, position, matched, in_context):
    i = position - matched - 1
    j = context.total - matched - 1
    shift = 0
    if (recipes.num_indents > 0) & (matched < MAX_MATCH) & (i >= 1) & (j > context.output_start):
        p_text = tl.where(in_context, context.p_tokens, prediction.p_tokens) + i
        p_output = context.p_tokens + j
        run = line_layout(recipes, tl.load(p_text))
        run_output = line_layout(recipes, tl.load(p_output))
        is_line = line_layout(recipes, tl.load(p_text - 1)) == LINE_END
        is_line = is_line & (line_layout(recipes, tl.load(p_output - 1)) == LINE_END)
        wider = run_output - run
        shift = tl.where(is_line & (run > 0) & (run_output > 0) & (wider % 2 == 0), wider, 0)
    return shift


@triton.jit
def shifted(recipes, p_source, o_source, b_tokens, shift, m_copied):
    """[BLOCK_K] int32. m_copied: which drafts this is about."""
    m_inside = m_copied & (o_source > 0)
    b_before = tl.load(p_source - 1, mask=m_inside, other=0)
    b_run = line_layout(recipes, b_tokens)
    m_run = m_inside & (b_run > 0) & (line_layout(recipes, b_before) == LINE_END)
    b_wider = b_run + shift
    m_there = m_run & (b_wider >= 2) & (b_wider < NUM_RUNS)
    return tl.where(m_run, tl.load(recipes.p_indents + b_wider, mask=m_there, other=-1), b_tokens)
