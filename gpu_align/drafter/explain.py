"""Why a drafter drafted what it did: its candidates and its choice, recomputed on the CPU. For debugging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..ops.choose import SurvivalTables, unpack_class
from ..ops.choose.reference import worth
from ..ops.compose.reference import write_draft
from ..ops.host import Entry, choose, compose, layout
from ..ops.index.reference import load_bucket
from ..ops.layout import IntArray, StepSettings, StepState, TextKind, allocate_state, as_arrays, whole_pages
from ..ops.match import NUM_CANDIDATES, Candidates, Workspace
from ..ops.match.reference import allocate_workspace
from ..ops.recipes import ALL_PACKS
from ..ops.recipes.reference import find_recipe
from ..ops.recipes.table import Recipes, RecipeTable
from ..ops.step.reference import choose_draft, load_request, load_state, update_state
from .admission import Admission, rules_of
from .arena import PredictionArena
from .config import DrafterConfig


class View(NamedTuple):
    """R requests, C candidates each, up to K drafts; int64."""

    cursor: IntArray  # [R]: where the output stands in the prediction
    candidates: Candidates  # [R, C] each
    class_id: IntArray  # [R, C]; -1 without a candidate
    remaining: IntArray  # [R, C]: tokens of a candidate's text from its position on; 0 without one
    num: IntArray  # [R, C]: drafts of a candidate, however many tokens of its text remain; 0 without one
    expected: IntArray  # [R, C]: how many of them are expected to be accepted
    lane: IntArray  # [R]: the candidate that is drafted, -1 of a recipe
    num_chosen: IntArray  # [R]: how many drafts it is good for; 0 without one
    expected_chosen: IntArray  # [R]: how many of them are expected to be accepted
    recipe: IntArray  # [R]: the recipe that is drafted instead, or -1
    draft: IntArray  # [R, K]; neither the capacity nor the vocabulary ends them
    length: IntArray  # [R]: how many of them are meant
    edits: IntArray  # [R]: edits that were replayed in them


class StepView:
    """A slot a request on the CPU, and what a step sees of each.

    tables: those of `config` if None. token_ids: [R, T] int32, for the caller to write prompts and outputs in.
    """

    def __init__(
        self,
        predictions: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        max_context_len: int,
        num_draft_tokens: int,
        config: DrafterConfig,
        recipes: Recipes,
        tables: SurvivalTables | None = None,
        recipe_packs: int = ALL_PACKS,
        kind: TextKind = TextKind.PREDICTION,
        temperature: float = 0.0,
    ) -> None:
        self.tables = as_arrays(tables if tables is not None else config.tables_for(num_draft_tokens, "cpu"))
        # A draft is shown as it is found: no vocabulary ends it, but a gap.
        self._settings = config.step_settings(layout.FIRST_GAP, max_context_len)
        arena = PredictionArena(sum(whole_pages(len(prediction)) for prediction in predictions))
        state = allocate_state(len(predictions), max_context_len, arena.num_tokens, "cpu")
        rows = torch.zeros((len(predictions), max_context_len), dtype=torch.int32)
        admission = Admission(
            state, rows, rows[:, 0], self._settings.context_shift, arena.num_tokens, "reference",
            config.use_context,
        )  # fmt: skip
        for slot, (prediction, prompt_len) in enumerate(zip(predictions, prompt_lens, strict=True)):
            text = arena.find(ids := np.array(prediction, dtype=np.int32))
            is_fresh = not text.is_held
            arena.take(text)
            admission.occupy(
                slot, text, prompt_len, is_fresh=is_fresh, recipe_packs=recipe_packs,
                rules=rules_of(kind, ids, temperature),
            )  # fmt: skip
        admission.flush()
        self.state = as_arrays(state)
        self.token_ids = rows.numpy()
        table = recipes.table(num_draft_tokens, torch.device("cpu"), config.min_survival_recipe)
        self._recipes: RecipeTable = as_arrays(table)

    def look(self, slots: IntArray, totals: IntArray) -> View:
        """Bring requests up to date, and say what there is to draft from. totals: [R], tokens of each so far."""
        widths = {name: [NUM_CANDIDATES] for name in ("class_id", "remaining", "num", "expected")}
        widths["draft"] = [self.tables.confidence.shape[1]]
        shapes = {name: [len(slots), *widths.get(name, [])] for name in View._fields if name != "candidates"}
        arrays = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        space = allocate_workspace(len(slots))
        view = View(candidates=space.found, **arrays)
        bound = self.state, self.tables, self._recipes, view, space, self._settings
        _look(*bound, self.token_ids, slots, totals)
        return view


@Entry
def _look(
    state: StepState,
    tables: SurvivalTables,
    recipes: RecipeTable,
    view: View,
    space: Workspace,
    settings: StepSettings,
    token_ids: IntArray,
    slots: IntArray,
    totals: IntArray,
) -> None:
    every = view.candidates
    for r in range(len(slots)):
        found = Candidates(
            every.source[r], every.position[r], every.matched[r], every.strength[r], every.deficit[r],
            every.token[r],
        )  # fmt: skip
        own = Workspace(found, space.key[r], space.margin[r], view.class_id[r])
        request = load_request(state, settings, slots[r], token_ids[slots[r]], totals[r])
        alignment, edits = update_state(request, load_state(request))
        bucket, recipe = load_bucket(request.prediction, request.last), find_recipe(recipes, request)
        choice = choose_draft(request, bucket, recipe, alignment, tables, settings, own)
        view.cursor[r], view.lane[r] = alignment.cursor, choice.lane
        view.num_chosen[r], view.expected_chosen[r] = choice.num, choice.expected
        view.recipe[r] = choice.table_row if choice.lane < 0 else -1
        for i_c in range(NUM_CANDIDATES):
            if found.position[i_c] >= 0:
                is_context = found.source[i_c] == layout.TEXT_CONTEXT
                length = totals[r] if is_context else request.prediction.length
                view.remaining[r, i_c] = length - found.position[i_c]
                limits = request.prediction.rules.limits
                view.num[r, i_c], view.expected[r, i_c] = worth(
                    found.matched[i_c], own.class_id[i_c] + limits * choose.NUM_CLASSES, tables,
                    settings.length_quarters,
                )  # fmt: skip
        of_draft = write_draft(request, edits, recipes, choice, layout.NOWHERE, view.draft[r])
        view.length[r], view.edits[r] = of_draft


#: What an alignment bucket says of a candidate in the prediction.
_WORSE = {
    choose.ALIGNMENT_CLOSE: f"at most {choose.CLOSE_DEFICIT} worse by the alignment",
    choose.ALIGNMENT_FAR: f"more than {choose.CLOSE_DEFICIT} worse by the alignment",
}
#: What an agreement counts.
_ALIKE = "0", "1", "2 or more"
#: Candidates that were not chosen: this many of the best are told.
_NUM_OTHERS = 3


@dataclass(frozen=True)
class Explained:
    """One position that drafts could be read from."""

    source: str  #: "prediction", "context" (the request's own prompt and output), "recipe", "memory"
    position: int  #: the first draft's in it; which recipe it is
    matched: int  #: how many of the last tokens are the same there
    expected: float  #: how many drafts were expected to be accepted, by the survival table
    why: str  #: the evidence for it, in words


@dataclass(frozen=True)
class Explanation:
    """A drafter's candidates at one position."""

    cursor: int  #: where in the prediction the output stands, ``0 <= cursor <= N``
    chosen: Explained | None  #: what was drafted from
    others: tuple[Explained, ...]  #: the best of the candidates that were not chosen


class Explainer:
    """Recomputes one request's drafts with the references of a `Drafter`'s operations: ``explainer.at(tokens)``.

    prompt_len: tokens of ``tokens`` that are prompt. recipe_packs: bit i: the request uses recipe pack i.
    kind: of the prediction. temperature: of the sampling, as in `Drafter.add`.
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
        recipe_packs: int = ALL_PACKS,
        kind: TextKind = TextKind.PREDICTION,
        temperature: float = 0.0,
    ) -> None:
        config = config if config is not None else DrafterConfig()
        self._prompt_len = prompt_len
        self._text = "prediction" if kind == TextKind.PREDICTION else "memory"
        self._recipes = recipes if recipes is not None else Recipes.from_lists([])
        self._view = StepView(
            [prediction], [prompt_len], max_context_len, num_draft_tokens, config, self._recipes,
            recipe_packs=recipe_packs, kind=kind, temperature=temperature,
        )  # fmt: skip
        limits = layout.unpack_rules(int(self._view.state.slot_meta[0, layout.TEXT_RULES])).limits
        #: Rows of confidences; of samples, whose classes have other parts, those after both of the others.
        self._block = limits - 1 if limits >= choose.SAMPLES else 0

    def at(self, tokens: Sequence[int]) -> Explanation:
        """The drafter's view after `tokens`, prompt and output; only what is new in them is processed."""
        row = self._view.token_ids[0]
        if len(tokens) > len(row):
            raise ValueError(f"tokens: expected at most {len(row)}, as at construction, found {len(tokens)}")
        row[: len(tokens)] = tokens
        view = self._view.look(np.zeros(1, dtype=np.int64), np.array([len(tokens)]))
        recipe = int(view.recipe[0])
        lane = int(view.lane[0]) if view.length[0] and recipe < 0 else None
        position, expected = view.candidates.position[0], view.expected[0]
        # A position that is both a match and near the cursor is one: the chosen lane, else the first of the two.
        order = sorted(range(len(expected)), key=lambda i: (i == lane, -i))
        source = view.candidates.source[0]
        lanes = {(int(source[i]), int(position[i])): i for i in order}
        ranked = sorted(lanes.values(), key=lambda i: (-expected[i], i))
        others = [i for i in ranked if view.num[0, i] > 0 and i != lane][:_NUM_OTHERS]
        num_output = max(len(tokens) - self._prompt_len, 0)
        chosen = None
        if recipe >= 0:
            chosen = self._describe_recipe(recipe, int(view.expected_chosen[0]))
        elif lane is not None:
            chosen = self._describe(view, lane, int(view.num_chosen[0]), num_output, int(view.edits[0]))
        other = (self._describe(view, i, int(view.num[0, i]), num_output) for i in others)
        return Explanation(int(view.cursor[0]), chosen, tuple(other))

    def _describe_recipe(self, recipe: int, expected: int) -> Explained:
        matched = int((self._recipes.context[recipe] != -1).sum())
        shape = f"texts of which the last {matched} items have this shape"
        words = shape if self._recipes.is_shape[recipe] else _last(matched)
        accepted = round(expected / choose.SURVIVAL_ONE, 2)
        return Explained("recipe", recipe, matched, accepted, f"{words} often go on like this in any text")

    def _describe(self, view: View, lane: int, num: int, num_output: int, edits: int = 0) -> Explained:
        found = view.candidates
        class_id = int(view.class_id[0, lane])
        if not _wraps_around(view, lane):
            num = min(num, int(view.remaining[0, lane]))
        source = "context" if found.source[0, lane] == layout.TEXT_CONTEXT else self._text
        why = "; ".join([*self._why(view, lane, num_output, edits), *self._votes(class_id)])
        # The limits of a class do not apply to an exact prefix: how many, by the confidences.
        confidence = self._view.tables.confidence[class_id + self._block * choose.NUM_CLASSES, :num]
        expected = round(float(np.cumprod(confidence).sum()), 2)
        position, matched = int(found.position[0, lane]), int(found.matched[0, lane])
        return Explained(source, position, matched, expected, why)

    def _why(self, view: View, lane: int, num_output: int, edits: int) -> Iterator[str]:
        found = view.candidates
        position, cursor = int(found.position[0, lane]), int(view.cursor[0])
        matched, class_id = int(found.matched[0, lane]), int(view.class_id[0, lane])
        if found.source[0, lane] == layout.TEXT_CONTEXT:
            yield f"{_last(matched)} occurred before, in the prompt or the output"
            if _wraps_around(view, lane):
                yield f"they repeat themselves with period {int(view.remaining[0, lane])}"
            return
        in_sync, num_in_sync = self._view.state.align_state[0, [layout.IN_SYNC, layout.NUM_IN_SYNC]]
        is_prefix = in_sync and position == cursor == num_in_sync == num_output
        if is_prefix and self._text == "prediction" and not self._block:
            yield "the output so far is the beginning of the prediction"
            return
        ahead = position - cursor
        how = f"{abs(ahead)} {'ahead of' if ahead > 0 else 'behind'}" if ahead else "at"
        where = f"{how} the cursor"
        occurs = f"{_last(matched)} occur{'s' if matched == 1 else ''} in the {self._text}, {where}"
        yield occurs if matched else f"{where}, where the last token does not occur"
        _, _, bucket, adherence = unpack_class(class_id)
        # While the output is in sync with the prediction, the alignment knows no more than the distance.
        if bucket in _WORSE and not in_sync:
            yield _WORSE[bucket]
        if adherence == choose.ADHERENCE_LOST and not self._block:
            yield f"the output follows little of the {self._text}"
        if edits:
            yield f"{edits} edit{'s' if edits > 1 else ''} as before"

    def _votes(self, class_id: int) -> Iterator[str]:
        if self._block:
            _, dissent, _, agreement = unpack_class(class_id)
            yield f"candidates at least as strong that expect another token: {dissent}"
            yield f"others that expect the same {choose.AHEAD} tokens: {_ALIKE[agreement]}"


def _last(matched: int) -> str:
    return f"the last {matched} tokens" if matched > 1 else "the last token"


def _wraps_around(view: View, lane: int) -> bool:
    """Whether drafts of a candidate go on with what the output repeats."""
    found = view.candidates
    return bool(found.source[0, lane] == layout.TEXT_CONTEXT) and compose.wraps_around(
        int(found.matched[0, lane]), int(view.remaining[0, lane])
    )
