"""What a step sees of its requests and what it would draft, in full: for replays and explanations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...config import DrafterConfig
from .._jit import Entry
from ..draft import length_quarters
from ..draft.reference import (
    NUM_CANDIDATES,
    Candidates,
    allocate_candidates,
    candidates,
    choose,
    compose,
    is_whole,
    value_of,
)
from ..recipe.reference import copy_recipe, likelier
from ..recipe.table import RecipeArrays
from ..state import StepArrays
from .reference import TableArrays, take_in

IntArray = npt.NDArray[np.signedinteger[Any]]


class View(NamedTuple):
    """R requests, C candidates each, up to K drafts; int64."""

    #: [R]: where the output stands in the prediction.
    cursor: IntArray
    #: [R, C] each.
    candidates: Candidates
    #: [R, C] each: drafts of a candidate, its room aside, and what they are worth; 0 where there is none.
    num: IntArray
    value: IntArray
    #: [R] each: the candidate that is drafted, and how many drafts it is good for; 0 where there is none.
    lane: IntArray
    num_chosen: IntArray
    #: [R]: the recipe that is drafted instead, or -1.
    recipe: IntArray
    #: [R, K], and [R]: how many of them are meant. Neither the capacity nor the vocabulary ends them.
    draft: IntArray
    length: IntArray
    #: [R]: edits that were made again in them.
    edits: IntArray


def look(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    context: IntArray,
    slots: IntArray,
    totals: IntArray,
    config: DrafterConfig,
) -> View:
    """Bring requests up to date and say what there is to draft from.

    Args:
        state: of the step; what is known of the slots is brought up to date.
        tables: for K.
        recipes: for K.
        context: [S, T] int32: prompt and output.
        slots: [R] int64.
        totals: [R] int64: tokens of each request so far.
        config: what a candidate is, and how long a draft may be.
    """
    K = tables.gain.shape[1] - 1

    def zeros(*shape: int) -> IntArray:
        return np.zeros((len(slots), *shape), dtype=np.int64)

    view = View(
        cursor=zeros(),
        candidates=allocate_candidates(len(slots)),
        num=zeros(NUM_CANDIDATES),
        value=zeros(NUM_CANDIDATES),
        lane=zeros(),
        num_chosen=zeros(),
        recipe=zeros(),
        draft=zeros(K),
        length=zeros(),
        edits=zeros(),
    )
    quarters = length_quarters(config.length_factor)
    _look(
        state, tables, recipes, view, context, slots, totals,
        quarters, config.min_match, config.min_context_match,
    )  # fmt: skip
    return view


@Entry
def _look(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    view: View,
    context: IntArray,
    slots: IntArray,
    totals: IntArray,
    length_quarters: int,
    min_match: int,
    min_context_match: int,
) -> None:
    for r in range(len(slots)):
        slot, row, total = slots[r], context[slots[r]], totals[r]
        every = view.candidates
        found = Candidates(
            every.position[r], every.room[r], every.matched[r], every.key[r], every.token[r], every.klass[r]
        )
        take_in(state, row, slot, total)
        cursor = candidates(state, row, slot, total, min_match, min_context_match, found)
        whole = is_whole(state, slot, cursor, total)
        lane, num, value = choose(found, whole, tables.keep, tables.gain, length_quarters)
        recipe = likelier(recipes, row, total, value)
        view.cursor[r], view.lane[r], view.num_chosen[r], view.recipe[r] = cursor, lane, num, recipe
        for c in range(NUM_CANDIDATES):
            if found.room[c] > 0:
                view.num[r, c], view.value[r, c] = value_of(
                    found.matched[c], found.klass[c], tables.keep, tables.gain, length_quarters
                )
        if recipe >= 0:
            view.length[r] = copy_recipe(recipes, recipe, view.draft[r])
        elif num > 0:
            position = found.position[lane]
            length, edits = compose(state, row, slot, lane, position, num, total, view.draft[r])
            view.length[r], view.edits[r] = length, edits
