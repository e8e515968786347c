"""`gpu_align.Drafter` as a single-sequence policy, with the tensors an engine would own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import gpu_align
from gpu_align.policies.base import Policy
from gpu_align.simulate.records import Record


class DrafterPolicy(Policy):
    """One slot of a `Drafter` on the CPU; one `Drafter` serves any number of sequences in turn.

    Args:
        max_context_len: the longest prompt plus output, tokens.
        max_prediction_len: the longest prediction, tokens.
        vocab_size: ids are below it.
        num_draft_tokens: K; `start` must be called with the same.
    """

    name = "gpu_align"

    def __init__(
        self, max_context_len: int, max_prediction_len: int, vocab_size: int, num_draft_tokens: int
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._drafter = gpu_align.Drafter(
            max_slots=1,
            max_context_len=max_context_len,
            max_prediction_len=max_prediction_len,
            num_draft_tokens=num_draft_tokens,
            vocab_size=vocab_size,
            device="cpu",
        )
        self._token_ids = torch.zeros((1, max_context_len), dtype=torch.int32)
        self._total_len = torch.zeros(1, dtype=torch.int32)
        self._slots = torch.zeros(1, dtype=torch.int64)
        self._num_sampled = torch.ones(1, dtype=torch.int32)
        # The same memory as NumPy sees it: writing a few tokens there costs less than through torch.
        self._row = self._token_ids.numpy()[0]
        self._length = 0
        self._source = 0

    @classmethod
    def for_records(cls, records: Sequence[Record], num_draft_tokens: int) -> DrafterPolicy:
        """A policy large enough for every one of `records`."""
        texts = [tokens for r in records for tokens in (r.prompt, r.prediction, r.output)]
        largest = max((max(tokens) for tokens in texts if tokens), default=0)
        return cls(
            max_context_len=max((len(r.prompt) + len(r.output) for r in records), default=1),
            max_prediction_len=max((len(r.prediction) for r in records), default=0) or 1,
            vocab_size=largest + 1,
            num_draft_tokens=num_draft_tokens,
        )

    @property
    def source(self) -> int:
        """The `gpu_align.Source` of the last draft."""
        return self._source

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        if num_draft_tokens != self._num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens: expected {self._num_draft_tokens}, as at construction, "
                f"found {num_draft_tokens}"
            )
        self._length = 0
        self._source = 0
        self._drafter.add(0, prediction=list(prediction), prompt_len=len(prompt))
        self._append(prompt)
        # Drafting in the prefill step: nothing is sampled yet, but drafts are wanted.
        self._num_sampled[0] = 1

    def propose(self) -> list[int]:
        draft = self._drafter.propose(self._token_ids, self._total_len, self._slots, self._num_sampled)
        length = int(draft.length[0])
        self._source = int(draft.source[0])
        tokens: list[int] = draft.token_ids[0, :length].tolist()
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        self._num_sampled[0] = len(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._row):
            raise ValueError(
                f"tokens: expected at most {len(self._row)} in all, as at construction, found {end}"
            )
        self._row[self._length : end] = np.asarray(tokens, dtype=np.int32)
        self._length = end
        self._total_len[0] = end
