"""`CapturedStep`: a step of a `Drafter` as a CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from .ops.draft import Draft

if TYPE_CHECKING:
    from .drafter import Drafter


class CapturedStep:
    """A step of a `Drafter` that an engine replays: no arguments, no checks, one launch; see `Drafter.capture`.

    Attributes:
        draft: what a replay writes.
    """

    def __init__(
        self,
        drafter: Drafter,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
        budget: int | torch.Tensor | None = None,
    ) -> None:
        self._drafter = drafter
        self._propose = partial(drafter.propose, token_ids, total_len, slots, num_sampled, budget=budget)
        self._graph: torch.cuda.CUDAGraph | None = None
        # Nothing sampled: the kernel is compiled and runs once, and leaves every slot as it is.
        self.draft = drafter.propose(
            token_ids, total_len, slots, torch.zeros_like(num_sampled), budget=budget
        )
        if drafter.device.type == "cuda":
            torch.cuda.current_stream(drafter.device).synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._propose()

    def replay(self) -> Draft:
        """Run the step with what the captured tensors hold now."""
        if self._graph is None:
            return self._propose()
        self._drafter._join()
        self._graph.replay()
        return self.draft
