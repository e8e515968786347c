"""Device functions that class the candidates of a request and choose one."""

import triton
import triton.language as tl

from ..device import choose, layout, match
from . import Choice


@triton.jit
def _at_lane(b_values, lane):
    """One lane's value."""
    return tl.sum(tl.where(tl.arange(0, match.CANDIDATE_LANES) == lane, b_values, 0), axis=0)


@triton.jit
def margins(found, adherence):
    """By how much each candidate is ahead of those that expect another token, [CANDIDATE_LANES] int32."""
    o_c = tl.arange(0, match.CANDIDATE_LANES)
    m_live = found.position >= 0
    m_considered = m_live & ((found.source == layout.TEXT_CONTEXT) | (adherence != choose.ADHERENCE_LOST))
    b_reach = tl.where(m_considered, found.strength, -1)
    reach = tl.max(b_reach, axis=0)
    leader = tl.min(tl.where(b_reach == reach, o_c, match.CANDIDATE_LANES), axis=0)
    m_agrees = found.token == _at_lane(found.token, leader)
    runner_up = tl.max(tl.where(m_agrees, 0, tl.where(m_considered, found.strength, 0)), axis=0)
    # Where nothing is considered, nothing is ahead of anything.
    b_margin = found.strength - tl.where(m_agrees, runner_up, tl.maximum(reach, 0))
    return tl.where(m_live, b_margin, 0)


@triton.jit
def _bucket_number(b_value, EDGES: tl.constexpr, NUM: tl.constexpr):
    """[CANDIDATE_LANES] int32."""
    b_number = tl.zeros_like(b_value)
    for i in tl.static_range(NUM - 1):
        b_number += (b_value >= EDGES[i]).to(tl.int32)
    return b_number


@triton.jit
def votes(request, found):
    """Dissent and agreement of each candidate, [CANDIDATE_LANES] int32 both. A text's last token counts again."""
    m_live, m_context = found.position >= 0, found.source == layout.TEXT_CONTEXT
    p_text = tl.where(m_context, request.tokens, request.prediction.tokens)
    b_last = tl.where(m_context, request.total, request.prediction.length) - 1
    b_ahead = found.token
    for i in tl.static_range(1, choose.AHEAD):
        b_next = tl.load(p_text + tl.minimum(found.position + i, b_last), mask=m_live, other=0)
        b_ahead = choose.ahead_of(b_ahead, b_next)
    b_ahead = tl.where(m_live, b_ahead, -1)
    b_strength = tl.where(m_live, found.strength, -1)
    b_dissent, b_agree = tl.zeros_like(b_ahead), tl.zeros_like(b_ahead)
    for i in range(match.NUM_CANDIDATES):
        m_other = (found.token != _at_lane(found.token, i)) & (_at_lane(b_strength, i) >= b_strength)
        b_dissent += m_other.to(tl.int32)
        b_agree += (b_ahead == _at_lane(b_ahead, i)).to(tl.int32)
    return b_dissent, tl.minimum(b_agree, choose.NUM_ADHERENCES) - 1


@triton.jit
def classes(request, found, alignment, num_output):
    """Class of every candidate, [CANDIDATE_LANES] int32. num_output: with the adherence prior."""
    adherence = choose.adherence_of(alignment.num_in_sync, num_output)
    b_margin = _bucket_number(margins(found, adherence), choose.MARGIN_EDGES, choose.NUM_MARGINS)
    b_adherence = tl.zeros_like(b_margin) + adherence
    if request.prediction.rules.limits >= choose.SAMPLES:
        b_margin, b_adherence = votes(request, found)
    b_bucket = choose.alignment_bucket(found.position - alignment.cursor, found.deficit)
    b_bucket = tl.where(found.source == layout.TEXT_CONTEXT, choose.ALIGNMENT_CONTEXT, b_bucket)
    b_length = _bucket_number(found.strength, choose.LENGTH_EDGES, choose.NUM_LENGTHS)
    return choose.pack_class(b_length, b_margin, b_bucket, b_adherence)


@triton.jit
def choose_candidate(request, found, alignment, tables, length_quarters, K: tl.constexpr):
    """Expected drafts are at most ``K * 2**16``, K at most 256: with the lane they are a key of 31 bits."""
    o_c = tl.arange(0, match.CANDIDATE_LANES)
    rules = request.prediction.rules
    num_output = tl.maximum(request.total - request.output_start, 0) + rules.prior
    b_class = classes(request, found, alignment, num_output)
    b_table_row, m_live = b_class + rules.limits * choose.NUM_CLASSES, found.position >= 0
    b_num = tl.minimum(length_quarters * (found.matched + 1) // 4, K)
    b_num = tl.where(found.matched >= match.MAX_MATCH, K, b_num)
    # Expected drafts are a table of both limits: its load waits for no other.
    b_expected = tl.load(tables.expected_accepted + b_table_row * (K + 1) + b_num, mask=m_live, other=0)
    b_num = tl.minimum(b_num, tl.load(tables.max_draft_len + b_table_row, mask=m_live, other=0))
    m_exact = (o_c == match.AT_CURSOR) & choose.is_exact_prefix(alignment, num_output)
    b_num = tl.where(m_exact, K, b_num)
    b_expected = tl.where(m_exact, choose.EXACT_PREFIX, b_expected)
    b_key = b_expected * match.CANDIDATE_LANES + (-o_c + (match.CANDIDATE_LANES - 1))
    top = tl.max(tl.where(m_live, b_key, 0), axis=0)
    lane = -(top % match.CANDIDATE_LANES) + (match.CANDIDATE_LANES - 1)
    num = tl.where(top >= match.CANDIDATE_LANES, _at_lane(b_num, lane), 0)
    block = tl.load(request.meta + layout.IS_HOT)
    block = tl.where(rules.limits >= choose.SAMPLES, rules.limits - 1, block)
    return Choice(
        lane, _at_lane(found.source, lane), _at_lane(found.position, lane), _at_lane(found.matched, lane),
        _at_lane(b_class, lane) + block * choose.NUM_CLASSES, num, top // match.CANDIDATE_LANES,
    )  # fmt: skip
