"""What published drafters share: checks of what they are given, and a cursor in the prediction."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ...predictors.base import PredictorOptions, TokenPredictor, check_count


class Policy(TokenPredictor):
    """A published drafter: a `TokenPredictor` over plain lists, which may also be run by itself::

        policy.start(prompt, prediction, num_draft_tokens)
        while not finished:
            draft = policy.propose()          # at most num_draft_tokens token ids, may be empty
            tokens = verify(draft)            # accepted prefix of the draft, then one token of the model
            policy.extend(tokens)             # 1 <= len(tokens) <= len(draft) + 1

    `reset`, `predict_tokens` and `push_tokens` call these three. A subclass writes `_begin`, `_draft` and
    `_advance`, and finds what was given in `_prompt`, `_prediction` and `_output`; or it writes the three
    itself.

    Errors: ``TypeError`` for anything that is not a sequence of integers, ``ValueError`` for a negative token
    id, ``num_draft_tokens < 1``, an empty ``extend`` or a draft of more than K tokens, ``RuntimeError`` before
    the first `start`.
    """

    _num_draft_tokens = 0

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        """Forget everything and begin a new sequence. num_draft_tokens: K, at least 1."""
        self._prompt = check_tokens("prompt", prompt)
        self._prediction = check_tokens("prediction", prediction)
        self._num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens)
        self._output: list[int] = []
        self._begin()

    def propose(self) -> list[int]:
        """Draft 0 to K token ids for the next step, the prefill if nothing was taken yet. Changes no state."""
        self._check_started()
        return self._draft()[: self._num_draft_tokens]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that one verification step produced, in order."""
        self._check_started()
        checked = check_tokens("tokens", tokens)
        if not checked:
            raise ValueError("tokens: expected at least one token id, got an empty sequence")
        self._output.extend(checked)
        self._advance(checked)

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        self.start(list(state_tokens), list(options.prediction), options.num_draft_tokens)

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        draft, most = self.propose(), self.options.num_draft_tokens
        if len(draft) > most:
            raise ValueError(
                f"policy {self.name!r}: expected at most {most} draft tokens, found {len(draft)}"
            )
        return draft

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        self.extend(list(tokens))

    def _check_started(self) -> None:
        if self._num_draft_tokens == 0:
            raise RuntimeError(f"policy {self.name!r}: start() must be called before propose() and extend()")

    def _begin(self) -> None:
        """Reset the state; prompt, prediction and K are set, the output is empty."""

    def _draft(self) -> list[int]:
        """Draft tokens in order; `propose` cuts them to K."""
        raise NotImplementedError

    def _advance(self, tokens: list[int]) -> None:
        """Take one step's tokens; `self._output` ends in them already."""


class CursorPolicy(Policy):
    """Drafts ``prediction[cursor : cursor + K]``, or nothing while `_cursor`, which `_advance` moves, is None."""

    _cursor: int | None

    def _begin(self) -> None:
        self._cursor = 0

    def _draft(self) -> list[int]:
        if self._cursor is None:
            return []
        return self._prediction[self._cursor : self._cursor + self._num_draft_tokens]

    def _follow(self, tokens: list[int]) -> None:
        """Move the cursor behind `tokens` where they are what the prediction has there, else lose it."""
        if self._cursor is not None:
            end = self._cursor + len(tokens)
            self._cursor = end if self._prediction[self._cursor : end] == tokens else None


def check_tokens(name: str, tokens: Sequence[int]) -> list[int]:
    """A list of plain ints, or an error that names the argument and the first bad element."""
    if isinstance(tokens, str | bytes):
        raise TypeError(f"{name}: expected a sequence of token ids, got {type(tokens).__name__}")
    try:
        checked = list(map(operator.index, tokens))
    except TypeError:
        found = type(tokens).__name__
        if isinstance(tokens, Sequence):
            bad = next((token for token in tokens if not hasattr(token, "__index__")), None)
            found = f"an element of type {type(bad).__name__}"
        raise TypeError(f"{name}: expected a sequence of token ids, got {found}") from None
    if checked and min(checked) < 0:
        at = next(i for i, token in enumerate(checked) if token < 0)
        raise ValueError(f"{name}: expected token ids >= 0, got {checked[at]} at index {at}")
    return checked
