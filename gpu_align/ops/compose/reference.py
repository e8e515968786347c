"""Writing a draft as loops: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from ..align import Edits
from ..align.reference import has_key
from ..choose import Choice
from ..host import align, compose, layout, match, njit, recipes
from ..layout import IntArray, Request, SourceText
from ..recipes.table import RecipeTable


@njit
def _latest_edit(prediction: SourceText, edits: Edits, position: int) -> int:
    """The latest edit that has the key of a position and whose old tokens are all there, or -1.

    One that was not seen before counts only where at least as many were seen before as have become invalid.
    """
    balance, remembered = 0, min(edits.count, layout.MAX_EDITS)
    for i in range(remembered):
        balance += -1 if edits.at[i] == align.NO_EDIT else int(edits.seen_before[i])
    for number in range(edits.count - 1, edits.count - remembered - 1, -1):
        i = number % layout.MAX_EDITS
        is_there = has_key(prediction, edits, i, position) and position + edits.old[i] <= prediction.length
        if is_there and (balance >= 0 or edits.seen_before[i] > 0):
            return int(i)
    return -1


@njit
def _compose(
    request: Request,
    edits: Edits,
    position: int,
    num: int,
    shift: int,
    table: RecipeTable,
    draft: IntArray,
) -> tuple[int, int]:
    """Write `num` tokens of the prediction, those indented by `shift` more, and earlier edits as they were made.

    Returns ``(length, edits replayed)``. draft: [K].
    """
    prediction, output = request.prediction, request.tokens[request.output_start :]
    length, replays = 0, 0
    while length < num and position < prediction.length:
        i = _latest_edit(prediction, edits, position) if replays < compose.MAX_REPLAYS else -1
        if i >= 0:
            replays += 1
            for k in range(edits.new[i]):
                if length < num:
                    draft[length] = output[edits.start[i] + k]
                    length += 1
            position += int(edits.old[i])
        # The token behind an edit is copied as it is.
        if length < num and position < prediction.length:
            draft[length] = _shifted(prediction.tokens, position, shift, table)
            length += 1
        position += 1
    return length, replays


@njit
def line_layout(table: RecipeTable, token: int) -> int:
    """A token's effect on a line: `LINE_END`, the number of a run, or 0. The table must not be empty."""
    known = min(max(token, 0), len(table.indents) - recipes.NUM_RUNS - 1)
    return int(table.indents[recipes.NUM_RUNS + known])


@njit
def indentation_shift(request: Request, table: RecipeTable, choice: Choice) -> int:
    """How much further than the text the output is indented, in numbers of runs; 0 where nothing says so.

    The match before the position stopped at two runs of one character, each after a line end.
    """
    tokens, matched = request.tokens, choice.matched
    i, j = choice.position - matched - 1, request.total - matched - 1
    if choice.source == layout.TEXT_RECIPE or not len(table.indents) or matched >= match.MAX_MATCH:
        return 0
    if i < 1 or j <= request.output_start:
        return 0
    text = tokens if choice.source == layout.TEXT_CONTEXT else request.prediction.tokens
    for here, before in ((text[i], text[i - 1]), (tokens[j], tokens[j - 1])):
        if line_layout(table, here) <= 0 or line_layout(table, before) != recipes.LINE_END:
            return 0
    shift = line_layout(table, tokens[j]) - line_layout(table, text[i])
    return shift if shift % 2 == 0 else 0


@njit
def _shifted(text: IntArray, position: int, shift: int, table: RecipeTable) -> int:
    """The token at a position; if it is leading whitespace, the token widened by the shift, or -1 without one."""
    token = int(text[position])
    if shift == 0 or position == 0 or line_layout(table, text[position - 1]) != recipes.LINE_END:
        return token
    run = line_layout(table, token)
    if run <= 0:
        return token
    return int(table.indents[run + shift]) if 2 <= run + shift < recipes.NUM_RUNS else -1


@njit
def write_draft(
    request: Request,
    edits: Edits,
    table: RecipeTable,
    choice: Choice,
    max_context_len: int,
    draft: IntArray,
) -> tuple[int, int]:
    """Write the chosen drafts; ``(length, edits replayed)``. draft: [K].

    A draft from the context wraps around if the match spans all after its position. A draft ends before a run
    of spaces that there is no token for, and where the engine's row ends.
    """
    position, length, replays = choice.position, choice.num, 0
    shift = indentation_shift(request, table, choice)
    if choice.source == layout.TEXT_RECIPE:
        for k in range(length):
            draft[k] = table.token_ids[position * recipes.MAX_TOKENS + k]
    elif choice.source == layout.TEXT_CONTEXT:
        period = request.total - position
        if not compose.wraps_around(choice.matched, period):
            length = min(length, period)
        for k in range(length):
            draft[k] = _shifted(request.tokens, position + k % period, shift, table)
    else:
        length, replays = _compose(request, edits, position, length, shift, table, draft)
    length = max(min(length, max_context_len - request.total), 0)
    for k in range(length):
        if draft[k] < 0:
            return k, replays
    return length, replays
