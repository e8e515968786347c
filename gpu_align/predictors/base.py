"""`TokenPredictor`: the interface of a drafter for one sequence, after node-llama-cpp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ops.layout import TextKind

if TYPE_CHECKING:
    from typing import Self


class DisposedError(RuntimeError):
    """A predictor was used after `TokenPredictor.dispose`."""


class VocabularyError(ValueError):
    """A predictor's tokens are not those of the model that it is to predict for."""


def count_accepted(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft, from the first, are what was written: the length of the common prefix."""
    most = min(len(draft), len(tokens))
    if list(draft[:most]) == list(tokens[:most]):
        return most
    return next(i for i in range(most) if draft[i] != tokens[i])


@dataclass(frozen=True)
class PredictorOptions:
    """Facts that a loop tells a predictor about the sequence.

    sampling: how the model's tokens are chosen, where the loop knows it: of `gpu_align.hf.generate` the
    ``GenerationConfig``. Read only.
    """

    num_draft_tokens: int = 16  # K, the most that a step verifies; >= 1
    vocab_size: int | None = None  # token ids are below it, where the loop knows it
    prediction: tuple[int, ...] = ()  # token ids of the predicted output, where the request has one
    max_len: int | None = None  # the most tokens that prompt and output have together, if there is a limit
    tokenizer: Any = None  # of the model, where the loop has one: an object with ``get_vocab()``
    sampling: Any = None
    kind: TextKind = TextKind.PREDICTION  # of `prediction`


class TokenPredictor(ABC):
    """Predicts the next tokens of one sequence. Subclass it and write `predict_tokens`; the rest has defaults.

    A loop uses one predictor for one sequence at a time::

        predictor.update_input_tokens(what the output may be copied from)
        predictor.reset(prompt, options)
        while generating:
            draft = predictor.predict_tokens()[:K]     # may be empty
            tokens = verify(draft)                     # accepted prefix of the draft, then a token of the model
            predictor.push_tokens(tokens)
        predictor.stop()                               # another `reset` may follow
        predictor.dispose()                            # nothing may follow

    `PredictorLoop` is the loop's side of it: it checks drafts, counts validated and refuted tokens and goes on
    without drafts where a predictor fails. A predictor counts nothing. It may have two more attributes about its
    last draft: ``source``, a `gpu_align.Source`, and ``confidence``, for each token the estimated probability that
    it is accepted if those before it are.

    Attributes:
        name: in reports; where it is empty, the class is named.
        state_tokens: prompt and output so far, kept by `reset` and `push_tokens`. Read only.
        input_tokens: of the last `update_input_tokens`.
        options: of the last `reset`.
        disposed: whether `dispose` was called.

    Source: ``src/evaluator/LlamaContext/TokenPredictor.ts`` of https://github.com/withcatai/node-llama-cpp.
    """

    name: str = ""
    state_tokens: list[int]
    input_tokens: list[int]
    options: PredictorOptions = PredictorOptions()
    disposed: bool = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Give each predictor its own lists, so that a subclass need not call ``__init__``."""
        predictor = super().__new__(cls)
        predictor.state_tokens, predictor.input_tokens = [], []
        return predictor

    def update_input_tokens(self, tokens: Sequence[int]) -> None:
        """Before `reset`: take what the output may be copied from, the prompt, then the prediction."""
        self._check_disposed()
        self.input_tokens = list(tokens)

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        """Forget the sequence and begin another; state_tokens: token ids of the prompt, which may be empty.

        VocabularyError: the predictor's tokens are not those of ``options``.
        """
        self._check_disposed()
        self.state_tokens = list(state_tokens)
        self.options = options

    def push_tokens(self, tokens: Sequence[int]) -> None:
        """Take the tokens of one step: those of the draft that were accepted, then those of the model."""
        self._check_disposed()
        self.state_tokens += list(tokens)

    @abstractmethod
    def predict_tokens(self) -> list[int]:
        """The tokens that are expected next, likeliest continuation only; may be empty, or longer than K."""

    def stop(self) -> None:  # noqa: B027 (optional)
        """The sequence has ended: stop what runs for it. A `reset` may follow."""

    def dispose(self) -> None:
        """Free everything. Every other method but `stop` then raises `DisposedError`; a second call is fine."""
        self.disposed = True
        self.state_tokens, self.input_tokens = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def _check_disposed(self) -> None:
        if self.disposed:
            raise DisposedError(f"{type(self).__name__}: disposed; make a new one")
