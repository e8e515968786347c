"""One launch a step: realign every request of a batch with its prediction and draft for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton

from .draft import Draft, SurvivalTables
from .recipe_lookup import RecipeTable
from .state import StepSettings, StepState


class Step(Protocol):
    """A step of one `Drafter`, bound to what the drafter keeps."""

    def __call__(
        self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Run it; see `StepLaunch`."""


class StepLaunch:
    """The step of one `Drafter` on a GPU.

    At each launch Triton asks every argument for its type and alignment, which takes the host several times as
    long as the launch. Here it is asked once: what a drafter keeps stays where it is, and of what a call brings
    the kernel takes any alignment and any strides.

    Args:
        state: `StepState`, written in place: the host writes ``slot_meta`` and predictions, the kernel the rest.
        tables: `SurvivalTables` for K.
        recipes: `RecipeTable` for K; without shapes the kernel is compiled without their look-up.
        out: `Draft` for the largest batch and K drafts, ``1 <= K <= 256``; a step of B requests writes the first B
            rows.
        settings: `StepSettings`.

    Predictions have fewer than 2**24 tokens, contexts fewer than 2**25.
    """

    def __init__(
        self,
        state: StepState,
        tables: SurvivalTables,
        recipes: RecipeTable,
        out: Draft,
        settings: StepSettings,
    ) -> None:
        buckets, K = state.context_index.shape[1], out.token_ids.shape[1]
        self._state = *state, state.context_index.stride(0), 33 - buckets.bit_length()
        self._rest = (
            *tables[:3],
            *recipes[:2],
            *recipes[4:],
            recipes.shift,
            len(recipes.shape_of),
            recipes.num_indents,
            *out,
            *settings,
        )
        # Lanes of a warp at least: of fewer the compiler makes worse code.
        block = max(32, 1 << (K - 1).bit_length())
        self._sizes = {"K": K, "BLOCK_K": block, "HAS_SHAPES": recipes.has_shapes}
        #: What Triton compiled; under its interpreter always None.
        self._compiled: Any = None

    def __call__(
        self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Launch the kernel; nothing is checked and nothing allocated.

        Args:
            token_ids: [S, T] int32, rows contiguous: prompt and output so far.
            total_len: [S] int32: tokens valid in each row; below 0 is 0, above T is T.
            slots: [B] int64, ``0 <= slot < S``, distinct where num_sampled > 0: batch position -> slot.
            num_sampled: [B] int32: 0 leaves the slot's state alone and drafts nothing.
        """
        if slots.shape[0] == 0:
            return
        grid = slots.shape[0], 1, 1
        args = (
            *self._state, token_ids, token_ids.stride(0), total_len, slots, num_sampled, *self._rest,
            token_ids.shape[1],
        )  # fmt: skip
        if self._compiled is not None:
            self._compiled[grid](*args, *self._sizes.values())
            return
        # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
        from .kernels.step import _step_kernel

        self._compiled = _step_kernel[grid](*args, **self._sizes, **compile_options(self._sizes["K"]))


def compile_options(K: int) -> dict[str, int]:
    """How the kernel is compiled. Left alone, ptxas stops at 96 or 168 registers and spills; before 3.9 Triton's
    code for one warp wants more than 128."""
    options = {"num_warps": 1 if K <= 128 else 4}
    if torch.version.hip:
        return options
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return {**options, "maxnreg": 128 if K > 128 or version >= (3, 9) else 248}


def make_step(
    backend: str,
    state: StepState,
    tables: SurvivalTables,
    recipes: RecipeTable,
    out: Draft,
    settings: StepSettings,
) -> Step:
    """The step of a backend, "triton" or "reference"; arguments as in `StepLaunch`."""
    if backend == "triton":
        return StepLaunch(state, tables, recipes, out, settings)
    # Imported here: where Numba is installed it takes a while to import, and to compile what it runs.
    from .reference.step import StepReference

    return StepReference(state, tables, recipes, out, settings)
