"""Why a drafter drafted what it did: its candidates and its choice, recomputed on the CPU. For debugging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .config import DrafterConfig
from .ops.draft import length_quarters
from .ops.draft.reference import Candidates, candidates, choose
from .ops.draft.tables import MAX_MATCH, SURVIVAL_ONE, SurvivalTables
from .ops.lcs import lcs_extend_inplace_reference, lcs_row_words
from .ops.realign.reference import realign_reference
from .ops.suffix_match.reference import longest_suffixes

_NONE = (-1, 0)
#: Candidates that were not chosen: this many of the best are told.
_NUM_OTHERS = 3


@dataclass(frozen=True)
class Choice:
    """One place that drafts could be read from.

    Attributes:
        source: ``"prediction"``, or ``"context"``: the request's own prompt and output.
        position: the first draft's place in it.
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
        tables = SurvivalTables.load(
            num_draft_tokens, "cpu", self._config.survival_table,
            self._config.min_survival, self._config.min_survival_lost,
        )  # fmt: skip
        self._keep, self._gain = tables.keep.numpy(), tables.gain.numpy()
        self._text = torch.from_numpy(self._prediction)[None] if len(self._prediction) else _one([0])
        self._text_len = torch.tensor([len(self._prediction)], dtype=torch.int32)
        self._row = torch.full((1, lcs_row_words(max(1, len(self._prediction)))), -1, dtype=torch.int32)
        self._row_len = torch.tensor([-1], dtype=torch.int32)

    def at(self, tokens: Sequence[int]) -> Explanation:
        """The drafter's view after `tokens`: prompt and output."""
        ids = np.asarray(tokens, dtype=np.int32)
        output, config = ids[self._prompt_len :], self._config
        cursor, followed = self._alignment(ids)
        in_prediction = longest_suffixes(self._prediction, output, cursor, MAX_MATCH, True)
        in_context = longest_suffixes(ids, ids, None, MAX_MATCH, False) if config.use_context else []
        matches = (
            *([m for m in in_prediction if m[1] >= config.min_match] + [_NONE] * 2)[:2],
            *([m for m in in_context if m[1] >= config.min_context_match] + [_NONE] * 2)[:2],
        )
        found = candidates(self._prediction, ids, len(output), cursor, followed, matches)
        quarters = length_quarters(config.length_factor)
        chosen = choose(found, self._keep, self._gain, quarters)
        value = found.values(self._keep, self._gain, quarters)[1]
        # A place that is both a match and near the cursor is one place; the first of the two counts.
        places = {(bool(found.is_context[i]), int(found.position[i])): i for i in reversed(range(len(value)))}
        ranked = sorted(places.values(), key=lambda i: (-value[i], i))
        others = [i for i in ranked if value[i] > 0 and (chosen is None or i != chosen[0])]
        return Explanation(
            cursor,
            None if chosen is None else self._describe(found, chosen[0], cursor),
            tuple(self._describe(found, i, cursor) for i in others[:_NUM_OTHERS]),
        )

    def _alignment(self, ids: np.ndarray) -> tuple[int, int]:
        slot, active = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
        start, total = _one([self._prompt_len])[0], _one([len(ids)])[0]
        lcs_extend_inplace_reference(
            self._row, self._row_len, torch.from_numpy(ids)[None], start, total, self._text, self._text_len,
            slot, active,
        )  # fmt: skip
        cursor, followed = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        realign_reference(self._row, self._text_len, slot, active, cursor, followed)
        return int(cursor), int(followed)

    def _describe(self, found: Candidates, i: int, cursor: int) -> Choice:
        num = found.values(self._keep, self._gain, length_quarters(self._config.length_factor))[0]
        expected = float(self._gain[found.klass[i], min(num[i], found.room[i])]) / SURVIVAL_ONE
        return Choice(
            "context" if found.is_context[i] else "prediction",
            int(found.position[i]),
            int(found.matched[i]),
            round(expected, 2),
            _why(found, i, cursor),
        )


def _one(values: Sequence[int]) -> torch.Tensor:
    """[1, n] int32."""
    return torch.tensor([values], dtype=torch.int32)


def _why(found: Candidates, i: int, cursor: int) -> str:
    if found.whole[i]:
        return "the output so far is the beginning of the prediction"
    matched = int(found.matched[i])
    words = f"the last {matched} tokens" if matched > 1 else "the last token"
    if found.is_context[i]:
        return f"{words} occurred before, in the prompt or the output"
    away = int(found.position[i]) - cursor
    where = "at the cursor" if away == 0 else f"{abs(away)} {'ahead of' if away > 0 else 'behind'} the cursor"
    if not matched:
        return f"{where}, where the last token does not occur"
    return f"{words} occur{'s' if matched == 1 else ''} in the prediction, {where}"
