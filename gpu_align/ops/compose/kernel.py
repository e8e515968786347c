"""Device functions that write the draft of a choice: edits replayed, indentation shifted, repetitions."""

import triton
import triton.language as tl

from ..align.kernel import LANES, have_keys
from ..device import align, compose, layout, match, recipes


@triton.jit
def _next_edit(prediction, edits, b_age, m_trusted, o_position, o_look, num):
    """``look * MAX_EDITS + age`` of the first position with the key of an edit, and of its edits the latest one.

    `NOWHERE` where no position has one. o_look: [LANES], the draft at each position, below `num`.
    """
    m_edit = have_keys(prediction, edits, o_position, o_look < num)
    m_edit = m_edit & (o_position[:, None] + edits.old[None, :] <= prediction.length)
    m_edit = m_edit & m_trusted[None, :]
    b_key = tl.where(m_edit, (o_look * layout.MAX_EDITS)[:, None] + b_age[None, :], layout.NOWHERE)
    return tl.min(tl.min(b_key, axis=0), axis=0)


@triton.jit
def _replay_edits(request, edits, position, num, BLOCK_K: tl.constexpr):
    """``(offset [BLOCK_K], is_edit [BLOCK_K], num)``: where each draft is read, in the prediction or, of an
    edit, in the context, and how many there are."""
    prediction = request.prediction
    o_k = tl.arange(0, BLOCK_K)
    o_way = tl.arange(0, layout.MAX_EDITS)
    o_source = position + o_k
    b_is_edit = tl.zeros([BLOCK_K], tl.int32)
    # From draft `since` on the prediction is read on from `position`; edits are looked for from `clear` on.
    since = 0
    clear = 0
    replays = tl.where(edits.count > 0, 0, compose.MAX_REPLAYS)
    m_valid = edits.at != align.NO_EDIT
    invalid = tl.minimum(edits.count, layout.MAX_EDITS) - tl.sum(m_valid.to(tl.int32), axis=0)
    trusts_all = tl.sum(tl.where(m_valid, edits.seen_before, 0), axis=0) >= invalid
    m_trusted = (edits.seen_before > 0) | trusts_all
    while (replays < compose.MAX_REPLAYS) & (clear < num):
        o_look = clear + tl.arange(0, LANES)
        o_position = position + o_look - since
        # `age` 0 is that of the last lane written.
        b_age = (edits.count - 1 - o_way) & (layout.MAX_EDITS - 1)
        key = _next_edit(prediction, edits, b_age, m_trusted, o_position, o_look, num)
        clear += LANES
        if key != layout.NOWHERE:
            replays += 1
            k = key // layout.MAX_EDITS
            m_way = b_age == key % layout.MAX_EDITS
            position += k - since + tl.sum(tl.where(m_way, edits.old, 0), axis=0)
            since = k + tl.sum(tl.where(m_way, edits.new, 0), axis=0)
            clear = since + 1
            start = request.output_start + tl.sum(tl.where(m_way, edits.start, 0), axis=0)
            o_new = tl.where(o_k < since, start + o_k - k, position + o_k - since)
            o_source = tl.where(o_k >= k, o_new, o_source)
            b_is_edit = tl.where(o_k >= k, (o_k < since).to(tl.int32), b_is_edit)
    return o_source, b_is_edit, tl.minimum(num, since + prediction.length - position)


@triton.jit
def _tokens_of(request, table, source):
    """The text of this source; of recipes those of all, `MAX_TOKENS` each."""
    p_text = tl.where(source == layout.TEXT_CONTEXT, request.tokens, request.prediction.tokens)
    return tl.where(source == layout.TEXT_RECIPE, table.token_ids, p_text)


@triton.jit
def line_layout(table, token):
    return tl.load(table.indents + recipes.NUM_RUNS + tl.minimum(tl.maximum(token, 0), table.num_indents - 1))


@triton.jit
def indentation_shift(request, table, choice):
    matched = choice.matched
    i = choice.position - matched - 1
    j = request.total - matched - 1
    shift = 0
    is_copied = (table.num_indents > 0) & (choice.source != layout.TEXT_RECIPE) & (matched < match.MAX_MATCH)
    if is_copied & (i >= 1) & (j > request.output_start):
        p_text = _tokens_of(request, table, choice.source) + i
        p_output = request.tokens + j
        run = line_layout(table, tl.load(p_text))
        run_output = line_layout(table, tl.load(p_output))
        is_line = line_layout(table, tl.load(p_text - 1)) == recipes.LINE_END
        is_line = is_line & (line_layout(table, tl.load(p_output - 1)) == recipes.LINE_END)
        wider = run_output - run
        shift = tl.where(is_line & (run > 0) & (run_output > 0) & (wider % 2 == 0), wider, 0)
    return shift


@triton.jit
def _shift_lanes(table, p_source, o_source, b_tokens, shift, m_copied):
    """[BLOCK_K] int32. m_copied: which drafts this is about."""
    m_inside = m_copied & (o_source > 0)
    b_before = tl.load(p_source - 1, mask=m_inside, other=0)
    b_run = line_layout(table, b_tokens)
    m_run = m_inside & (b_run > 0) & (line_layout(table, b_before) == recipes.LINE_END)
    b_wider = b_run + shift
    m_there = m_run & (b_wider >= 2) & (b_wider < recipes.NUM_RUNS)
    return tl.where(m_run, tl.load(table.indents + b_wider, mask=m_there, other=-1), b_tokens)


@triton.jit
def write_draft(request, edits, table, choice, max_context_len, o_k, BLOCK_K: tl.constexpr):
    """``(tokens [BLOCK_K] int32, length)``."""
    position = choice.position
    is_context = choice.source == layout.TEXT_CONTEXT
    is_recipe = choice.source == layout.TEXT_RECIPE
    indent_shift = indentation_shift(request, table, choice)
    num_prediction = tl.where(is_context | is_recipe, 0, choice.num)
    o_source, b_is_edit, length = _replay_edits(request, edits, position, num_prediction, BLOCK_K)
    period = request.total - position
    in_period = tl.where(
        compose.wraps_around(choice.matched, period), choice.num, tl.minimum(choice.num, period)
    )
    length = tl.where(is_context, in_period, tl.where(is_recipe, choice.num, length))
    if is_context & (length > period):
        # ``position + o_k % period``, for ``o_k < BLOCK_K <= 256``: a division takes longer.
        o_wrapped = o_k
        for i in tl.static_range(9):
            multiple = tl.minimum(period, BLOCK_K) << (8 - i)
            o_wrapped = tl.where(o_wrapped >= multiple, o_wrapped - multiple, o_wrapped)
        o_source = position + o_wrapped
    o_source = tl.where(is_recipe, position * recipes.MAX_TOKENS + o_k, o_source)
    # A draft ends where the engine's row ends.
    length = tl.maximum(tl.minimum(length, max_context_len - request.total), 0)
    p_text = _tokens_of(request, table, choice.source)
    p_source = tl.where(b_is_edit > 0, request.tokens, p_text) + o_source
    b_tokens = tl.load(p_source, mask=o_k < length, other=0)
    if indent_shift != 0:
        m_copied = (o_k < length) & (b_is_edit == 0)
        b_tokens = _shift_lanes(table, p_source, o_source, b_tokens, indent_shift, m_copied)
    return b_tokens, length
