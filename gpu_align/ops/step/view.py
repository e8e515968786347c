"""What a step sees of its requests and what it would draft, in full: for replays and explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...config import DrafterConfig
from .._jit import Entry
from ..constants import ALL_PACKS, NUM_CANDIDATES
from ..draft import SurvivalTables
from ..draft.reference import Candidates, allocate_candidates, first_row_of, worth
from ..draft.tables import TableArrays
from ..recipe_lookup.table import RecipeArrays
from ..state import StepArrays, state_of
from .reference import choose_draft, load_request, update_state, write_draft
from .settings import StepSettings

IntArray = npt.NDArray[np.signedinteger[Any]]


class View(NamedTuple):
    """R requests, C candidates each, up to K drafts; int64."""

    #: [R]: where the output stands in the prediction.
    cursor: IntArray
    #: [R, C] each.
    candidates: Candidates
    #: [R, C] each: drafts of a candidate, however many tokens of its text remain, and how many of them are
    #: expected to be accepted; 0 where there is none.
    num: IntArray
    expected: IntArray
    #: [R] each: the candidate that is drafted, and how many drafts it is good for; 0 where there is none.
    lane: IntArray
    num_chosen: IntArray
    #: [R]: the recipe that is drafted instead, or -1.
    recipe: IntArray
    #: [R, K], and [R]: how many of them are meant. Neither the capacity nor the vocabulary ends them.
    draft: IntArray
    length: IntArray
    #: [R]: edits that were replayed in them.
    edits: IntArray


class StepView:
    """A slot a request on the CPU, and what a step sees of each.

    Args:
        predictions: token ids of each request's prediction.
        prompt_lens: tokens of each prompt.
        max_context_len: T of the drafter: which positions of the context it remembers depends on it.
        config: of the drafter; the defaults if None.
        recipes: of the drafter, for K.
        tables: what a choice is made by, for K; those of `config` if None.
        recipe_packs: bit i: the requests use recipe pack i.
        is_memory: whether the predictions are texts of earlier answers.
        is_related: of these: whether they are answers to requests like these.

    Attributes:
        token_ids: [R, T] int32, for the caller to write prompts and outputs in.
        state: the step's.
        tables: for K.
    """

    def __init__(
        self,
        predictions: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        max_context_len: int,
        num_draft_tokens: int,
        config: DrafterConfig | None,
        recipes: RecipeArrays,
        tables: SurvivalTables | None = None,
        recipe_packs: int = ALL_PACKS,
        is_memory: bool = False,
        is_related: bool = False,
    ) -> None:
        config = config if config is not None else DrafterConfig()
        if tables is None:
            tables = SurvivalTables.load(
                num_draft_tokens, "cpu", config.survival_table, config.min_survival, config.min_survival_lost
            )
        self.tables = tables.numpy()
        self.state = state_of(
            predictions, prompt_lens, max_context_len, config.use_context,
            recipe_packs=recipe_packs, is_memory=is_memory, is_related=is_related,
        ).numpy()  # fmt: skip
        self.token_ids = np.zeros((len(predictions), max_context_len), dtype=np.int32)
        self._recipes = recipes
        # A draft is shown as it is found: no vocabulary ends it.
        self._settings = StepSettings.of(config, 1 << 31)

    def look(self, slots: IntArray, totals: IntArray) -> View:
        """Bring requests up to date and say what there is to draft from.

        Args:
            slots: [R] int64.
            totals: [R] int64: tokens of each so far.
        """
        return look(self.state, self.tables, self._recipes, self.token_ids, slots, totals, self._settings)


def look(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    token_ids: IntArray,
    slots: IntArray,
    totals: IntArray,
    settings: StepSettings,
) -> View:
    """`StepView.look` for whoever has these: state, tables and recipes as a step reads them, token_ids [S, T]."""
    K = tables.confidence.shape[1]

    def zeros(*shape: int) -> IntArray:
        return np.zeros((len(slots), *shape), dtype=np.int64)

    view = View(
        cursor=zeros(),
        candidates=allocate_candidates(len(slots)),
        num=zeros(NUM_CANDIDATES),
        expected=zeros(NUM_CANDIDATES),
        lane=zeros(),
        num_chosen=zeros(),
        recipe=zeros(),
        draft=zeros(K),
        length=zeros(),
        edits=zeros(),
    )
    _look(state, tables, recipes, view, settings, token_ids, slots, totals)
    return view


@Entry
def _look(
    state: StepArrays,
    tables: TableArrays,
    recipes: RecipeArrays,
    view: View,
    settings: StepSettings,
    token_ids: IntArray,
    slots: IntArray,
    totals: IntArray,
) -> None:
    every = view.candidates
    for r in range(len(slots)):
        found = Candidates(
            every.position[r], every.remaining[r], every.matched[r], every.key[r], every.token[r],
            every.margin[r], every.class_id[r],
        )  # fmt: skip
        request = load_request(state, slots[r], token_ids[slots[r], : totals[r]])
        update_state(request)
        choice = choose_draft(request, tables, recipes, found, settings)
        view.cursor[r], view.lane[r], view.num_chosen[r], view.recipe[r] = (
            choice.cursor,
            choice.lane,
            choice.num,
            choice.recipe,
        )
        for c in range(NUM_CANDIDATES):
            if found.remaining[c] > 0:
                view.num[r, c], view.expected[r, c] = worth(
                    found.matched[c],
                    found.class_id[c],
                    tables,
                    settings.length_quarters,
                    first_row_of(request.prior),
                )
        position, matched = found.position[choice.lane], found.matched[choice.lane]
        view.length[r], view.edits[r] = write_draft(
            request, recipes, choice, position, matched, view.draft[r]
        )
