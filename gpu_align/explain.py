"""Why a drafter drafted what it did: its candidates and its choice, recomputed on the CPU. For debugging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .config import DrafterConfig
from .ops.draft import survival_units
from .ops.draft.reference import Candidate, candidates, choose
from .ops.draft.tables import (
    CLASS_CURSOR_ALONE,
    CLASS_CURSOR_BESIDE_MATCH,
    CLASS_WHOLE,
    MAX_MATCH,
    SURVIVAL_ONE,
    SurvivalTables,
)
from .ops.lcs import lcs_extend_inplace_reference, lcs_row_words
from .ops.realign.reference import realign_reference
from .ops.suffix_match.reference import longest_suffix

_SOURCES = {1: "prediction", 2: "context"}


@dataclass(frozen=True)
class Choice:
    """One place that drafts could be read from.

    Attributes:
        source: ``"prediction"``, or ``"context"``: the request's own prompt and output.
        position: the first draft's place in it.
        matched: how many of the last tokens are the same there; 0 for the cursor itself.
        expected: how many drafts were expected to be accepted, by the survival table.
        why: its class, in words.
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
        others: the candidates that were not chosen.
    """

    cursor: int
    chosen: Choice | None
    others: tuple[Choice, ...]


class Explainer:
    """Recomputes one request's drafts with the references of a `Drafter`'s operations.

    ::

        explainer = Explainer(prediction, prompt_len=812, num_draft_tokens=64)
        explanation = explainer.at(tokens)      # prompt and output so far; more of them each time

    Args:
        prediction: token ids; may be empty.
        prompt_len: tokens of ``tokens`` that are prompt.
        num_draft_tokens: K of the drafter.
        config: of the drafter.

    A call costs about a millisecond for a few thousand tokens.
    """

    def __init__(
        self,
        prediction: Sequence[int],
        prompt_len: int,
        num_draft_tokens: int,
        config: DrafterConfig | None = None,
    ) -> None:
        self._config = config if config is not None else DrafterConfig()
        self._prediction = np.asarray(prediction, dtype=np.int32)
        self._prompt_len = prompt_len
        tables = SurvivalTables.load(num_draft_tokens, "cpu", self._config.survival_table)
        self._survival, self._bucket = tables.survival.numpy(), tables.bucket.numpy()
        self._min_survival = survival_units(self._config.min_survival)
        self._text = torch.from_numpy(self._prediction)[None] if len(self._prediction) else _one([0])
        self._text_len = torch.tensor([len(self._prediction)], dtype=torch.int32)
        self._row = torch.full((1, lcs_row_words(max(1, len(self._prediction)))), -1, dtype=torch.int32)
        self._row_len = torch.tensor([-1], dtype=torch.int32)

    def at(self, tokens: Sequence[int]) -> Explanation:
        """The drafter's view after `tokens`: prompt and output."""
        ids = np.asarray(tokens, dtype=np.int32)
        output, config = ids[self._prompt_len :], self._config
        cursor = self._cursor(ids)
        in_prediction = longest_suffix(self._prediction, output, cursor, MAX_MATCH, True)
        in_context = longest_suffix(ids, ids, None, MAX_MATCH, False) if config.use_context else (-1, 0)
        found = candidates(
            len(output),
            len(ids),
            len(self._prediction),
            cursor,
            in_prediction if in_prediction[1] >= config.min_match else (-1, 0),
            in_context if in_context[1] >= config.min_context_match else (-1, 0),
            self._bucket,
        )
        chosen = choose(found, self._survival, config.length_factor, self._min_survival)
        best = None if chosen is None else chosen[0]
        return Explanation(
            cursor,
            None if best is None else self._describe(best, cursor),
            tuple(self._describe(c, cursor) for c in found if c is not best),
        )

    def _cursor(self, ids: np.ndarray) -> int:
        slot, active = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
        start, total = _one([self._prompt_len])[0], _one([len(ids)])[0]
        lcs_extend_inplace_reference(
            self._row, self._row_len, torch.from_numpy(ids)[None], start, total, self._text, self._text_len,
            slot, active,
        )  # fmt: skip
        cursor = torch.zeros(1, dtype=torch.int32)
        realign_reference(self._row, self._text_len, slot, active, cursor)
        return int(cursor)

    def _describe(self, c: Candidate, cursor: int) -> Choice:
        limit = (
            len(self._survival[0]) if c.matched >= MAX_MATCH else self._config.length_factor * c.matched + 1
        )
        row = self._survival[c.klass, :limit]
        keep = min(int((row >= self._min_survival).sum()), c.room)
        expected = float(row[:keep].sum()) / SURVIVAL_ONE
        return Choice(_SOURCES[c.source], c.position, c.matched, round(expected, 2), _why(c, cursor))


def _one(values: Sequence[int]) -> torch.Tensor:
    """[1, n] int32."""
    return torch.tensor([values], dtype=torch.int32)


def _why(c: Candidate, cursor: int) -> str:
    if c.klass == CLASS_WHOLE:
        return "the output so far is the beginning of the prediction"
    if c.klass == CLASS_CURSOR_ALONE:
        return "at the cursor; the last tokens occur nowhere in the prediction"
    if c.klass == CLASS_CURSOR_BESIDE_MATCH:
        return "at the cursor, though the last tokens occur elsewhere in the prediction"
    matched = f"the last {c.matched} tokens" if c.matched > 1 else "the last token"
    if c.source == 2:
        return f"{matched} occurred before, in the prompt or the output"
    away = c.position - cursor
    where = "at the cursor" if away == 0 else f"{abs(away)} {'ahead of' if away > 0 else 'behind'} the cursor"
    return f"{matched} occur{'s' if c.matched == 1 else ''} in the prediction, {where}"
