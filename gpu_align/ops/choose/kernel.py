"""Device functions that class the candidates of a request and choose one."""

import triton
import triton.language as tl

from ..device import (
    ADHERENCE_LOST,
    ALIGNMENT_CONTEXT,
    AT_CURSOR,
    EXACT_PREFIX,
    FIRST_CONTEXT,
    LANES,
    LENGTH_EDGES,
    MARGIN_EDGES,
    MAX_MATCH,
    NO_SCORE,
    NUM_LENGTHS,
    NUM_MARGINS,
    WINDOW,
    adherence_of,
    alignment_bucket,
    deficit_of,
    pack_class,
    score_at,
)
from ..match.kernel import at_lane


@triton.jit
def margins(found, adherence):
    """[LANES] int32."""
    o_c = tl.arange(0, LANES)
    m_live = found.position >= 0
    m_considered = m_live & (o_c >= tl.where(adherence == ADHERENCE_LOST, FIRST_CONTEXT, 0))
    b_reach = tl.where(m_considered, found.matched, -1)
    reach = tl.max(b_reach, axis=0)
    leader = tl.min(tl.where(b_reach == reach, o_c, LANES), axis=0)
    m_agrees = found.token == at_lane(found.token, leader)
    runner_up = tl.max(tl.where(m_agrees, 0, tl.where(m_considered, found.matched, 0)), axis=0)
    # Where nothing is considered, nothing is ahead of anything.
    b_margin = found.matched - tl.where(m_agrees, runner_up, tl.maximum(reach, 0))
    return tl.where(m_live, b_margin, 0)


@triton.jit
def score_deficit(position, alignment):
    """[LANES] int32."""
    b_deficit = deficit_of(position - alignment.cursor)
    if alignment.in_sync == 0:
        o_j = position - alignment.anchor
        m_window = (o_j >= 0) & (o_j <= WINDOW)
        top = score_at(alignment.row, alignment.cursor - alignment.anchor)
        b_score = score_at(alignment.row, tl.where(m_window, o_j, 0))
        b_deficit = tl.where(m_window, top - b_score, NO_SCORE)
    return b_deficit


@triton.jit
def _bucket_number(b_value, EDGES: tl.constexpr, NUM: tl.constexpr):
    """How many of the ``NUM - 1`` edges each value has reached, [LANES] int32."""
    b_number = tl.zeros_like(b_value)
    for i in tl.static_range(NUM - 1):
        b_number += (b_value >= EDGES[i]).to(tl.int32)
    return b_number


@triton.jit
def classes(found, alignment, num_output):
    """Class of every candidate, [LANES] int32. num_output: with the adherence prior."""
    adherence = adherence_of(alignment.num_in_sync, num_output)
    b_deficit = score_deficit(found.position, alignment)
    b_margin = margins(found, adherence)
    b_bucket = alignment_bucket(found.position - alignment.cursor, b_deficit)
    b_bucket = tl.where(tl.arange(0, LANES) < FIRST_CONTEXT, b_bucket, ALIGNMENT_CONTEXT)
    b_length = _bucket_number(found.matched, LENGTH_EDGES, NUM_LENGTHS)
    return pack_class(b_length, _bucket_number(b_margin, MARGIN_EDGES, NUM_MARGINS), b_bucket, adherence)


@triton.jit
def _worth(found, b_class, limits, length_quarters, K: tl.constexpr):
    """``(num, expected)``, [LANES] int32 each."""
    m_live = found.position >= 0
    b_num = tl.minimum(length_quarters * (found.matched + 1) // 4, K)
    b_num = tl.where(found.matched >= MAX_MATCH, K, b_num)
    # Expected drafts are a table of both limits: its load waits for no other.
    b_expected = tl.load(limits.expected_accepted + b_class * (K + 1) + b_num, mask=m_live, other=0)
    b_num = tl.minimum(b_num, tl.load(limits.max_draft_len + b_class, mask=m_live, other=0))
    return b_num, b_expected


@triton.jit
def choose(found, b_class, exact_prefix, limits, length_quarters, K: tl.constexpr):
    """Expected drafts are below ``K * 2**16``, K at most 256: with the lane they are a key of 31 bits."""
    o_c = tl.arange(0, LANES)
    m_exact = o_c == tl.where(exact_prefix, AT_CURSOR, LANES)
    b_num, b_expected = _worth(found, b_class, limits, length_quarters, K)
    b_num = tl.where(m_exact, K, b_num)
    b_expected = tl.where(m_exact, EXACT_PREFIX, b_expected)
    top = tl.max(tl.where(found.position >= 0, b_expected * LANES + (-o_c + (LANES - 1)), 0), axis=0)
    lane = -(top % LANES) + (LANES - 1)
    return lane, tl.where(top >= LANES, at_lane(b_num, lane), 0), top // LANES
