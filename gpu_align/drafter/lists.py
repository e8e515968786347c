"""`ListDrafter`: the drafter of an engine that keeps lists of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .drafter import Drafter


class ListDrafter:
    """A `Drafter` for an engine that keeps lists of tokens: requests have ids, tokens come and go as lists.

    ::

        drafter = ListDrafter(max_slots=64, max_context_len=8192, ...)     # as of `Drafter`
        drafter.add(request_id, prediction, prompt)                        # when a request arrives
        while generating:
            drafts = drafter.propose({request_id: new_tokens, ...})        # a step's
            ...                                                            # verify
        drafter.remove(request_id)                                         # when it is finished

    A request's first `new_tokens` is what its prefill sampled. `drafter` is the `Drafter`. On a GPU
    `propose` sends three tensors, and waits for the drafts.
    """

    def __init__(self, **options: Any) -> None:
        self.drafter = Drafter(**options)
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(self.drafter.max_slots))

    def add(
        self, request_id: Hashable, prediction: Sequence[int] = (), prompt: Sequence[int] = (), **options: Any
    ) -> bool:
        """`Drafter.add` of a request, new or with other tokens than it had; prompt: its `context`. ValueError
        where `max_slots` others are there."""
        if request_id not in self._slots and not self._free:
            raise ValueError(f"request_id: expected at most {len(self._slots)} requests, found one more")
        slot = self._slots[request_id] if request_id in self._slots else self._free[-1]
        is_held = self.drafter.add(slot, prediction, context=prompt, **options)
        if request_id not in self._slots:
            self._slots[request_id] = self._free.pop()
        return is_held

    def propose(self, new_tokens: Mapping[Hashable, Sequence[int]]) -> dict[Hashable, list[int]]:
        """The drafts of these requests, after the tokens that each of them sampled in this step; without one it
        gets no draft. KeyError: a request that was not added."""
        num_sampled = [len(tokens) for tokens in new_tokens.values()]
        rows = np.zeros((len(num_sampled), max(num_sampled, default=0)), np.int64)
        for row, tokens in zip(rows, new_tokens.values(), strict=True):
            row[: len(tokens)] = tokens
        slots = torch.tensor([self._slots[request_id] for request_id in new_tokens], dtype=torch.int64)
        inputs = slots, torch.tensor(num_sampled, dtype=torch.int32), torch.from_numpy(rows)
        draft = self.drafter.propose(*(tensor.to(self.drafter.device) for tensor in inputs))
        drafted = zip(new_tokens, draft.token_ids.tolist(), draft.length.tolist(), strict=True)
        return {request_id: tokens[:length] for request_id, tokens, length in drafted}

    def remove(self, request_id: Hashable) -> None:
        """Forget a request; one that is not there is no error."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._free.append(slot)
            self.drafter.remove(slot)
