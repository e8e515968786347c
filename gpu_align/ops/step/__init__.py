"""One launch a step: realign every request of a batch with its prediction and draft for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..backend import launch, pointers
from ..choose import SurvivalTables
from ..layout import Draft, StepSettings, StepState
from ..recipes.table import RecipeTable

#: A step of one `Drafter`, bound to its rows and to what it keeps: slots, num_sampled.
StepCall = Callable[[torch.Tensor, torch.Tensor], None]


class StepLaunch:
    """The step of one `Drafter` on a GPU.

    Args:
        state: `StepState`, written in place: the host writes ``slot_meta`` and predictions, the kernel the rest.
        tables: `SurvivalTables` for K.
        recipes: `RecipeTable` for K; without shapes the kernel is compiled without their look-up.
        out: `Draft` for the largest batch and K drafts, ``1 <= K <= 256``; a step of B requests writes the first B
            rows.
        settings: `StepSettings`.
        token_ids, total_len: as of `Drafter`, but `total_len` is 0 below 0 and T above T.

    Predictions have fewer than 2**21 tokens, contexts fewer than 2**22.
    """

    def __init__(
        self,
        state: StepState,
        tables: SurvivalTables,
        recipes: RecipeTable,
        out: Draft,
        settings: StepSettings,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
    ) -> None:
        K, has_shapes = out.token_ids.shape[1], recipes.num_shapes > 0
        # Triton asks what is in a tuple for its alignment, and for 1, whatever the kernel says: tensors of our own
        # alone are passed in one.
        tensors = tuple(value for value in recipes if isinstance(value, torch.Tensor))
        rows = token_ids, token_ids.stride(0), token_ids.shape[1], total_len
        self._bound = state, tables, tensors, out, *recipes[len(tensors) :], *settings, *rows
        # Lanes of a warp at least: of fewer the compiler makes worse code.
        self._sizes = {"K": K, "BLOCK_K": max(32, 1 << (K - 1).bit_length()), "HAS_SHAPES": has_shapes}
        self._options = compile_options(K)
        #: Since the first launch: what Triton compiled, and the addresses of what it is bound to.
        self._compiled: Any = None
        self._pointers: Any = None

    def __call__(self, slots: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Launch the kernel; nothing is checked and nothing allocated. Arguments as in `Drafter.propose`."""
        if not (batch_size := slots.shape[0]):
            return
        if self._compiled is not None:
            batch = slots.data_ptr(), num_sampled.data_ptr()
            self._compiled[batch_size, 1, 1](*self._pointers, *batch, *self._sizes.values())
            return
        # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
        from .kernel import step_kernel

        args = *self._bound, slots, num_sampled
        self._compiled = launch(step_kernel, (batch_size,), args, self._sizes, **self._options)
        self._pointers = pointers(self._bound)


def compile_options(K: int) -> dict[str, int]:
    """How the kernel is compiled. Left alone, ptxas stops at 96 or 168 registers and spills; with 120 it does not.
    Before 3.9 Triton's code for one warp wants more."""
    options = {"num_warps": 1 if K <= 128 else 4}
    if torch.version.hip:
        return options
    import triton  # here: it is missing where there is no GPU backend, see `backend.resolve_backend`

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return {**options, "maxnreg": 120 if K > 128 or version >= (3, 9) else 248}


def make_step(backend: str, *bound: Any) -> StepCall:
    """The step of a backend, "triton" or "reference"; the other arguments as in `StepLaunch`."""
    if backend == "triton":
        return StepLaunch(*bound)
    # Imported here: where Numba is installed it takes a while to import, and to compile what it runs.
    from .reference import StepReference

    return StepReference(*bound)
