"""Why a drafter drafted what it did: its candidates and its choice, recomputed on the CPU. For debugging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .config import DrafterConfig
from .ops.draft.reference import IS_CONTEXT
from .ops.draft.tables import NUM_PLACES, NUM_TRUSTS, SURVIVAL_ONE, SurvivalTables
from .ops.index import build_index
from .ops.layout import FOLLOWED, FOLLOWS, PAGE, index_bits
from .ops.recipe import Recipes, RecipeTable
from .ops.recipe.table import RecipeArrays
from .ops.state import about_request, allocate_state
from .ops.step.reference import TableArrays
from .ops.step.view import View, look

#: What a place says of a candidate in the prediction, by how much worse than the cursor the alignment finds it.
_WORSE = {
    2: "at most 2 worse by the alignment",
    3: "3 to 5 worse by the alignment",
    4: "more than 5 worse by the alignment",
    5: "at most 16 worse by the alignment",
    6: "more than 16 worse by the alignment",
}
#: Candidates that were not chosen: this many of the best are told.
_NUM_OTHERS = 3


@dataclass(frozen=True)
class Choice:
    """One place that drafts could be read from.

    Attributes:
        source: ``"prediction"``, ``"context"``: the request's own prompt and output, or ``"recipe"``.
        position: the first draft's place in it; which recipe it is.
        matched: how many of the last tokens are the same there.
        expected: how many drafts were expected to be accepted, by the survival table.
        why: the evidence for it, in words.
    """

    source: str
    position: int
    matched: int
    expected: float
    why: str


@dataclass(frozen=True)
class Explanation:
    """What a drafter saw.

    Attributes:
        cursor: where in the prediction the output stands, ``0 <= cursor <= N``.
        chosen: what was drafted from, or None.
        others: the best of the candidates that were not chosen.
    """

    cursor: int
    chosen: Choice | None
    others: tuple[Choice, ...]


@lru_cache(maxsize=4)
def _table_of(recipes: Recipes | None, num_draft_tokens: int, min_survival: float) -> RecipeArrays:
    """Every request's explainer has the same one, and it takes a while to make."""
    return RecipeTable.build(recipes, num_draft_tokens, "cpu", min_survival).numpy()


class Explainer:
    """Recomputes one request's drafts with the references of a `Drafter`'s operations.

    ::

        explainer = Explainer(prediction, prompt_len=812, num_draft_tokens=64, max_context_len=8192)
        explanation = explainer.at(tokens)      # prompt and output so far; more of them each time

    Args:
        prediction: token ids; may be empty.
        prompt_len: tokens of ``tokens`` that are prompt.
        num_draft_tokens: K of the drafter.
        config: of the drafter.
        recipes: of the drafter.
        max_context_len: of the drafter: which places of the context it remembers hangs on it.

    What is new in ``tokens`` is taken in once.
    """

    def __init__(
        self,
        prediction: Sequence[int],
        prompt_len: int,
        num_draft_tokens: int,
        config: DrafterConfig | None = None,
        *,
        recipes: Recipes | None = None,
        max_context_len: int,
    ) -> None:
        self._config = config if config is not None else DrafterConfig()
        self._prompt_len = prompt_len
        tables = SurvivalTables.load(
            num_draft_tokens, "cpu", self._config.survival_table,
            self._config.min_survival, self._config.min_survival_lost,
        )  # fmt: skip
        self._tables = TableArrays.of(tables)
        self._recipes = recipes
        self._recipe_table = _table_of(recipes, num_draft_tokens, self._config.min_survival_recipe)
        num_text = len(prediction)
        capacity = max(-(-num_text // PAGE), 1) * PAGE
        state = allocate_state(1, max_context_len, capacity, "cpu")
        self._state = state.numpy()
        self._state.about[0] = about_request(0, num_text, capacity, prompt_len, self._config.use_context)
        if num_text:
            self._state.text[:num_text] = prediction
            build_index(state.text, state.order, state.first, 0, num_text, index_bits(capacity))
        self._context = np.zeros((1, max_context_len), dtype=np.int32)

    def at(self, tokens: Sequence[int]) -> Explanation:
        """The drafter's view after `tokens`: prompt and output.

        Raises:
            ValueError: more tokens than `max_context_len`.
        """
        if len(tokens) > self._context.shape[1]:
            raise ValueError(
                f"tokens: expected at most {self._context.shape[1]}, as at construction, found {len(tokens)}"
            )
        self._context[0, : len(tokens)] = tokens
        slot, total = np.zeros(1, dtype=np.int64), np.array([len(tokens)])
        view = look(self._state, self._tables, self._recipe_table, self._context, slot, total, self._config)
        recipe = int(view.recipe[0])
        lane = int(view.lane[0]) if view.length[0] and recipe < 0 else None
        position, value = view.candidates.position[0], view.value[0]
        # A place that is both a match and near the cursor is one place: what is chosen, else the first of the two.
        order = sorted(range(len(value)), key=lambda i: (i == lane, -i))
        places = {(bool(IS_CONTEXT[i]), int(position[i])): i for i in order}
        ranked = sorted(places.values(), key=lambda i: (-value[i], i))
        others = [i for i in ranked if value[i] > 0 and i != lane][:_NUM_OTHERS]
        num_output = max(len(tokens) - self._prompt_len, 0)

        def told(lane: int, num: int, edits: int = 0) -> Choice:
            return self._describe(view, lane, num, num_output, edits)

        chosen = None
        if recipe >= 0:
            chosen = self._describe_recipe(recipe)
        elif lane is not None:
            chosen = told(lane, int(view.num_chosen[0]), int(view.edits[0]))
        return Explanation(
            int(view.cursor[0]),
            chosen,
            tuple(told(i, int(view.num[0, i])) for i in others),
        )

    def _describe_recipe(self, recipe: int) -> Choice:
        assert self._recipes is not None
        matched = int((self._recipes.context[recipe] >= 0).sum())
        words = f"the last {matched} tokens" if matched > 1 else "the last token"
        expected = round(float(self._recipe_table.gain[recipe]) / SURVIVAL_ONE, 2)
        return Choice("recipe", recipe, matched, expected, f"{words} often go on like this in any text")

    def _describe(self, view: View, lane: int, num: int, num_output: int, edits: int) -> Choice:
        found = view.candidates
        klass, room = int(found.klass[0, lane]), int(found.room[0, lane])
        return Choice(
            "context" if IS_CONTEXT[lane] else "prediction",
            int(found.position[0, lane]),
            int(found.matched[0, lane]),
            round(float(self._tables.gain[klass, min(num, room)]) / SURVIVAL_ONE, 2),
            "; ".join(self._why(view, lane, num_output, edits)),
        )

    def _why(self, view: View, lane: int, num_output: int, edits: int) -> Iterator[str]:
        found = view.candidates
        position, cursor = int(found.position[0, lane]), int(view.cursor[0])
        matched, klass = int(found.matched[0, lane]), int(found.klass[0, lane])
        words = f"the last {matched} tokens" if matched > 1 else "the last token"
        if IS_CONTEXT[lane]:
            yield f"{words} occurred before, in the prompt or the output"
            return
        follows, followed = self._state.aligned[0, [FOLLOWS, FOLLOWED]]
        if follows and position == cursor == followed == num_output:
            yield "the output so far is the beginning of the prediction"
            return
        away = position - cursor
        where = (
            "at the cursor" if not away else f"{abs(away)} {'ahead of' if away > 0 else 'behind'} the cursor"
        )
        if matched:
            yield f"{words} occur{'s' if matched == 1 else ''} in the prediction, {where}"
        else:
            yield f"{where}, where the last token does not occur"
        place, trust = klass // NUM_TRUSTS % NUM_PLACES, klass % NUM_TRUSTS
        # While the output follows the prediction, the alignment knows no more than the distance.
        if place in _WORSE and not follows:
            yield _WORSE[place]
        if trust == 0:
            yield "the output follows little of the prediction"
        if edits:
            yield f"{edits} edit{'s' if edits > 1 else ''} as before"
