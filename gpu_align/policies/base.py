"""What a single-sequence drafter looks like to the simulator."""

from __future__ import annotations

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
