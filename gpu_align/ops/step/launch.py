"""One launch a step: realign every request of a batch with its prediction and draft from it."""

from __future__ import annotations

from typing import Any

import torch

from ..draft import Draft, SurvivalTables
from ..recipe import RecipeTable
from ..state import StepState


class StepLaunch:
    """The step of one `Drafter` on a GPU.

    At each launch Triton asks every argument for its type and alignment, which takes the host several times as
    long as the launch. Here it is asked once: what a drafter keeps stays where it is, and of what a call brings
    the kernel takes any alignment and any strides.

    Args:
        state: `StepState`, as in every call.
        tables: `SurvivalTables` for K, as in every call.
        recipes: `RecipeTable` for K; the kernel of an empty one does not look.
        out: `Draft`, as in every call. With other tensors than these a call starts over.
    """

    def __init__(self, state: StepState, tables: SurvivalTables, recipes: RecipeTable, out: Draft) -> None:
        self._recipes = *recipes, recipes.shift
        self._has_recipes = recipes.num_recipes > 0
        self._bind(state, tables, out)

    def _bind(self, state: StepState, tables: SurvivalTables, out: Draft) -> None:
        self._bound = state, tables, out
        buckets, K = state.recent.shape[1], out.token_ids.shape[1]
        self._state = *state, state.recent.stride(0)
        self._tables = (
            tables.length_bucket, tables.margin_bucket, tables.keep, tables.gain, tables.confidence, *out,
            33 - buckets.bit_length(),
        )  # fmt: skip
        # Lanes of a warp at least: of fewer the compiler makes worse code.
        block = max(32, 1 << (K - 1).bit_length())
        self._sizes = {"K": K, "BLOCK_K": block, "HAS_RECIPES": self._has_recipes}
        #: What Triton compiled; under its interpreter always None.
        self._compiled: Any = None

    def __call__(
        self,
        state: StepState,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
        tables: SurvivalTables,
        out: Draft,
        *,
        length_quarters: int,
        min_match: int,
        min_context_match: int,
        vocab_size: int,
    ) -> None:
        """Launch the kernel; nothing is checked and nothing allocated. `state` and `out` are written in place.

        Args:
            state: `StepState`; a slot's columns of ``about`` are the host's, the rest the kernel's.
            token_ids: [S, T] int32, rows contiguous: prompt and output so far.
            total_len: [S] int32, ``<= T``: tokens valid in each row.
            slots: [B] int64, distinct: batch position -> slot.
            num_sampled: [B] int32: 0 leaves the slot's state alone and drafts nothing.
            tables: `SurvivalTables` for K.
            out: `Draft` for B requests or more and K drafts, ``1 <= K <= 256``; the first B rows are written.
            length_quarters: drafts for each four tokens of matched suffix.
            min_match: shortest match in the prediction, 1 to 64.
            min_context_match: the same in the context.
            vocab_size: a draft ends before the first token that is not below it.

        Predictions have fewer than 2**24 tokens, contexts fewer than 2**25.
        """
        if slots.shape[0] == 0:
            return
        bound = self._bound
        if not (state is bound[0] and tables is bound[1] and out is bound[2]):
            self._bind(state, tables, out)
        grid = slots.shape[0], 1, 1
        args = (
            *self._state, token_ids, token_ids.stride(0), total_len, slots, num_sampled,
            *self._tables, *self._recipes,
            length_quarters, min_match, min_context_match, token_ids.shape[1], vocab_size,
        )  # fmt: skip
        if self._compiled is not None:
            self._compiled[grid](*args, *self._sizes.values())
            return
        # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
        from .kernels import _step_kernel

        num_warps = 1 if self._sizes["K"] <= 128 else 4
        self._compiled = _step_kernel[grid](*args, **self._sizes, num_warps=num_warps)
