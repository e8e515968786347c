"""One launch a step: realign every request of a batch with its prediction and draft for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..choose.survival import SurvivalTables
from ..compose import NUM_RUNS
from ..layout import Draft, StepSettings, StepState
from ..recipes import KEY_BITS
from ..recipes.table import RecipeTable

#: Arguments of the kernel that each call brings, in its order.
_CALL = ("token_ids_ptr", "stride_token_ids_s", "total_len_ptr", "slots_ptr", "num_sampled_ptr")


#: A step of one `Drafter`, bound to what the drafter keeps: token_ids, total_len, slots, num_sampled.
StepCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class StepLaunch:
    """The step of one `Drafter` on a GPU.

    Triton asks every argument for its type and alignment once, not at each launch (see `backend.launch`): what a
    drafter keeps stays where it is, and of what a call brings the kernel takes any alignment and any strides.

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
        # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
        from .kernel import step_kernel

        K = out.token_ids.shape[1]
        bound = {
            **{f"{name}_ptr": tensor for name, tensor in state._asdict().items()},
            "stride_context_index_s": state.context_index.stride(0),
            "context_shift": 33 - state.context_index.shape[1].bit_length(),
            "max_draft_len_ptr": tables.max_draft_len,
            "expected_accepted_ptr": tables.expected_accepted,
            "confidence_ptr": tables.confidence,
            "recipe_keys_ptr": recipes.keys,
            "recipe_ways_ptr": recipes.ways,
            "recipe_tokens_ptr": recipes.token_ids,
            "recipe_confidence_ptr": recipes.confidence,
            "shape_of_ptr": recipes.shape_of,
            "indents_ptr": recipes.indents,
            # A key's upper bits are its bucket.
            "recipe_shift": KEY_BITS + 1 - len(recipes.keys).bit_length(),
            "num_shapes": len(recipes.shape_of),
            "num_indents": max(len(recipes.indents) - NUM_RUNS, 0),
            "draft_ptr": out.token_ids,
            "draft_length_ptr": out.length,
            "draft_confidence_ptr": out.confidence,
            "draft_source_ptr": out.source,
            **settings._asdict(),
            "K": K,
            # Lanes of a warp at least: of fewer the compiler makes worse code.
            "BLOCK_K": max(32, 1 << (K - 1).bit_length()),
            "HAS_SHAPES": len(recipes.shape_of) > 0,
        }
        self._kernel, names = step_kernel, step_kernel.arg_names
        # In the kernel's order, with places for what a call brings: `_CALL` after the first, T after the second.
        self._before = tuple(bound[name] for name in names[: names.index(_CALL[0])])
        rest = names[names.index(_CALL[-1]) + 1 :]
        end = rest.index("max_context_len")
        self._after = tuple(bound[name] for name in rest[:end])
        self._sizes = {name: bound[name] for name in rest[end + 1 :]}
        #: What Triton compiled; under its interpreter always None.
        self._compiled: Any = None

    def __call__(
        self, token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Launch the kernel; nothing is checked and nothing allocated. Arguments as in `Drafter.propose`, but
        `total_len` is 0 below 0 and T above T.
        """
        if slots.shape[0] == 0:
            return
        grid = slots.shape[0], 1, 1
        call = token_ids, token_ids.stride(0), total_len, slots, num_sampled
        args = *self._before, *call, *self._after, token_ids.shape[1]
        if self._compiled is not None:
            self._compiled[grid](*args, *self._sizes.values())
            return
        self._compiled = self._kernel[grid](*args, **self._sizes, **compile_options(self._sizes["K"]))


def compile_options(K: int) -> dict[str, int]:
    """How the kernel is compiled. Left alone, ptxas stops at 96 or 168 registers and spills; before 3.9 Triton's
    code for one warp wants more than 128."""
    options = {"num_warps": 1 if K <= 128 else 4}
    if torch.version.hip:
        return options
    import triton  # here: it is missing where there is no GPU backend, see `backend.resolve_backend`

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return {**options, "maxnreg": 128 if K > 128 or version >= (3, 9) else 248}


def make_step(
    backend: str,
    state: StepState,
    tables: SurvivalTables,
    recipes: RecipeTable,
    out: Draft,
    settings: StepSettings,
) -> StepCall:
    """The step of a backend, "triton" or "reference"; arguments as in `StepLaunch`."""
    if backend == "triton":
        return StepLaunch(state, tables, recipes, out, settings)
    # Imported here: where Numba is installed it takes a while to import, and to compile what it runs.
    from .reference import StepReference

    return StepReference(state, tables, recipes, out, settings)
