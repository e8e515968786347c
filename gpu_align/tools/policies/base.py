"""What a single-sequence drafter looks like to the simulator."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence


class Policy(ABC):
    """One drafter for one sequence: the loop that the simulator, or any engine, runs.

    ::

        policy.start(prompt, prediction, num_draft_tokens)
        while not finished:
            draft = policy.propose()          # at most num_draft_tokens token ids, may be empty
            tokens = verify(draft)            # accepted prefix of the draft, then one token of the model
            policy.extend(tokens)             # 1 <= len(tokens) <= len(draft) + 1

    A policy sees a token only after ``extend`` gave it; `propose` may be called before the first
    ``extend`` (drafting in the prefill step).

    A policy may have two more attributes about its last draft: ``source``, a `gpu_align.Source`, and
    ``confidence``, for each token the estimated probability that it is accepted if those before it are.
    """

    #: The name used on the command line and in reports.
    name: str

    @abstractmethod
    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        """Forget everything and begin a new sequence.

        Args:
            prompt: token ids before the output; may be empty.
            prediction: token ids of the predicted output; may be empty.
            num_draft_tokens: K, the most tokens `propose` may return; ``K >= 1``.
        """

    @abstractmethod
    def propose(self) -> list[int]:
        """Draft tokens for the next verification step: 0 to K token ids. Changes no state."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that one verification step produced, in order."""


class SequencePolicy(Policy):
    """A policy over plain lists: subclasses write `_begin`, `_draft` and `_advance`.

    Attributes:
        name: the name on the command line and in reports.

    Errors: `start` and `extend` raise ``TypeError`` for anything that is not a sequence of integers and
    ``ValueError`` for a negative token id, ``num_draft_tokens < 1`` or an empty ``extend``. `propose` and
    `extend` raise ``RuntimeError`` before the first `start`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._prompt: list[int] = []
        self._prediction: list[int] = []
        self._output: list[int] = []
        self._num_draft_tokens = 0

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        self._prompt = check_tokens("prompt", prompt)
        self._prediction = check_tokens("prediction", prediction)
        self._num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens)
        self._output = []
        self._begin()

    def propose(self) -> list[int]:
        self._check_started()
        return self._draft()[: self._num_draft_tokens]

    def extend(self, tokens: Sequence[int]) -> None:
        self._check_started()
        checked = check_tokens("tokens", tokens)
        if not checked:
            raise ValueError("tokens: expected at least one token id, got an empty sequence")
        self._output.extend(checked)
        self._advance(checked)

    def _check_started(self) -> None:
        if self._num_draft_tokens == 0:
            raise RuntimeError(f"policy {self.name!r}: start() must be called before propose() and extend()")

    @abstractmethod
    def _begin(self) -> None:
        """Reset the subclass's state; prompt, prediction and K are set, the output is empty."""

    @abstractmethod
    def _draft(self) -> list[int]:
        """Draft tokens in order; `propose` cuts them to K."""

    @abstractmethod
    def _advance(self, tokens: list[int]) -> None:
        """Take one step's tokens; `self._output` ends in them already."""


class CursorPolicy(SequencePolicy):
    """A policy that drafts from one position in the prediction: a subclass moves `_cursor` in `_advance`.

    ::

        draft = prediction[cursor : cursor + K], or nothing while cursor is None
    """

    _cursor: int | None

    def _begin(self) -> None:
        self._cursor = 0

    def _draft(self) -> list[int]:
        if self._cursor is None:
            return []
        return self._prediction[self._cursor : self._cursor + self._num_draft_tokens]


def follow(text: list[int], cursor: int | None, tokens: list[int]) -> int | None:
    """The cursor behind `tokens` where they are what stands in `text` at `cursor`, else None."""
    if cursor is None or text[cursor : cursor + len(tokens)] != tokens:
        return None
    return cursor + len(tokens)


def check_tokens(name: str, tokens: Sequence[int]) -> list[int]:
    """A list of plain ints, or an error that names the argument and the first bad element."""
    if isinstance(tokens, str | bytes):
        raise TypeError(f"{name}: expected a sequence of token ids, got {type(tokens).__name__}")
    try:
        checked = list(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of token ids, got {_describe(tokens)}") from None
    if checked and min(checked) < 0:
        at = next(i for i, token in enumerate(checked) if token < 0)
        raise ValueError(f"{name}: expected token ids >= 0, got {checked[at]} at index {at}")
    return checked


def check_count(name: str, value: int, minimum: int = 1) -> int:
    """An int of at least `minimum`, or an error that names the argument."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None
    if count < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {count}")
    return count


def _describe(tokens: object) -> str:
    if not isinstance(tokens, Sequence):
        return type(tokens).__name__
    bad = next((token for token in tokens if not hasattr(token, "__index__")), None)
    return f"an element of type {type(bad).__name__}"
