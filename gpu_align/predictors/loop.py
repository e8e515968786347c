"""`PredictorLoop`: what a generation loop does with a predictor, whatever the predictor does."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ops.errors import check_int, check_type
from ..ops.layout import FIRST_GAP
from .base import DisposedError, PredictorOptions, TokenPredictor, count_accepted

logger = logging.getLogger("gpu_align.predictors")


@dataclass
class Predictions:
    """Draft tokens of one sequence that the model wrote, and did not; those after its end are neither."""

    validated: int = 0
    refuted: int = 0


class PredictorLoop:
    """Drives one predictor through one sequence at a time::

        loop = PredictorLoop(predictor, num_draft_tokens=16, vocab_size=model.config.vocab_size)
        loop.start(prompt, prediction)
        while generating:
            draft = loop.draft(limit)            # checked; at most K and at most limit tokens
            tokens = verify(draft)               # accepted prefix of the draft, then a token of the model
            loop.push(tokens)                    # counts, and tells the predictor
        loop.stop()
        loop.predictions.validated, loop.predictions.refuted

    A predictor that was disposed, refuses the vocabulary, raises, or returns something else than token ids below
    `vocab_size` is not asked again for this sequence: drafts are empty from then on, one warning is logged (logger
    ``gpu_align.predictors``) and the output is what it would have been.

    Args:
        predictor: what drafts; the loop stops it, and never disposes of it.
        num_draft_tokens: K; longer drafts are cut.
        vocab_size: token ids are below it; None checks that they are not negative.
        strict: raise instead of going on without drafts.

    `predictions` counts the sequence; `failure` says why there are no more drafts, or is None.
    """

    def __init__(
        self,
        predictor: TokenPredictor,
        *,
        num_draft_tokens: int = 16,
        vocab_size: int | None = None,
        strict: bool = False,
    ) -> None:
        check_type("predictor", predictor, TokenPredictor, "a TokenPredictor")
        self.predictor = predictor
        self.num_draft_tokens = check_int("num_draft_tokens", num_draft_tokens, 1)
        self.vocab_size = vocab_size
        self.strict = strict
        self.predictions = Predictions()
        self.failure: str | None = None
        self._draft: list[int] = []

    def start(self, prompt: Sequence[int], prediction: Sequence[int] = (), **options: Any) -> None:
        """Begin a sequence: counts are zero, and a predictor that failed is asked again. options: further fields
        of the `PredictorOptions` that the predictor gets."""
        self.predictions, self.failure, self._draft = Predictions(), None, []
        told = PredictorOptions(self.num_draft_tokens, self.vocab_size, tuple(prediction), **options)

        def begin() -> None:
            if self.predictor.disposed:
                raise DisposedError(f"{type(self.predictor).__name__}: disposed; make a new one")
            self.predictor.update_input_tokens([*prompt, *prediction])
            self.predictor.reset(list(prompt), told)

        self._try("reset", begin)

    def draft(self, limit: int | None = None) -> list[int]:
        """Draft the next tokens: at most K, and at most `limit`. Empty where nothing is expected."""
        most = self.num_draft_tokens if limit is None else min(limit, self.num_draft_tokens)
        self._draft = []
        if most > 0:
            found = self._try("predict_tokens", lambda: self._checked(self.predictor.predict_tokens(), most))
            self._draft = found or []
        return list(self._draft)

    def push(self, tokens: Sequence[int]) -> None:
        """Take the tokens of one step, in order: what was accepted of the last draft, then the model's own."""
        matched = count_accepted(self._draft, tokens)
        self.predictions.validated += matched
        if matched < len(tokens):  # else the output ended there: the rest was not put to the test
            self.predictions.refuted += len(self._draft) - matched
        self._draft = []
        new = [int(token) for token in tokens]
        if new:
            self._try("push_tokens", lambda: self.predictor.push_tokens(new))

    def stop(self) -> None:
        """End the sequence. The predictor may be started again, by this loop or another."""
        self._try("stop", self.predictor.stop)

    def fail(self, why: str) -> None:
        """Go on without drafts for a reason outside of the predictor, said once; ValueError where `strict`."""
        if self.failure is None:
            self.failure = why
            if self.strict:
                raise ValueError(why)
            logger.warning("%s; the generation goes on without drafts", why)

    def _try(self, what: str, function: Callable[[], Any]) -> Any:
        """Return as ``function()`` does, or None once something has failed."""
        if self.failure is not None:
            return None
        try:
            return function()
        except Exception as error:
            self.failure = f"{what}: {type(error).__name__}: {error}"
            if self.strict:
                raise
            name = type(self.predictor).__name__
            logger.warning("predictor %s: %s; the generation goes on without drafts", name, self.failure)
            return None

    def _checked(self, tokens: Iterable[int], most: int) -> list[int]:
        """The first `most` of them as plain ints, before a gap."""
        below = float("inf") if self.vocab_size is None else self.vocab_size
        checked: list[int] = []
        for position, token in enumerate(itertools.islice(tokens, most)):
            try:
                if isinstance(token, bool):
                    raise TypeError
                checked.append(operator.index(token))
            except TypeError:
                raise TypeError(f"draft: expected token ids, found {type(token).__name__}") from None
            if FIRST_GAP <= checked[-1] < 2**31:  # a gap of a skeleton, from a drafter that copies it
                return checked[:-1]
            if not 0 <= checked[-1] < below:
                upper = "" if self.vocab_size is None else f" < {self.vocab_size}"
                raise ValueError(f"draft[{position}]: expected 0 <= id{upper}, found {checked[-1]}")
        return checked
