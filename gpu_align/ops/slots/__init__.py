"""How a prediction and a slot get to the device: upload, index, and what the host says about a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .. import layout as c
from ..backend import Backend, launch, resolve_backend
from ..index import build_index
from ..layout import SlotMeta, StepState
from ..recipes import ALL_PACKS
from .reference import set_slot_reference


def store_prediction(
    state: StepState, base: int, tokens: npt.NDArray[np.int32], backend: Backend = "auto"
) -> None:
    """Upload a prediction to its pages and index it there. tokens: [n] int32, n >= 1."""
    _upload(tokens, state.prediction_tokens[base : base + len(tokens)])
    build_index(*state[:3], base, len(tokens), c.index_bits(c.whole_pages(len(tokens))), backend)


def occupy_slot(
    state: StepState,
    slot: int,
    base: int,
    num_tokens: int,
    prompt_len: int,
    use_context: bool,
    backend: Backend = "auto",
    *,
    recipe_packs: int = ALL_PACKS,
    text_kind: int = c.TEXT_PREDICTION,
    is_hot: bool = False,
    end_tokens: tuple[int, ...] = (),
) -> None:
    """Give a slot to a request; the next step starts over.

    Args:
        state: changed in place.
        slot: which one.
        base, num_tokens: where its prediction lies, see `store_prediction`, and its tokens; 0 is none.
        prompt_len: tokens of its prompt.
        use_context: whether the request's own context may be drafted from.
        backend: "auto" runs a kernel on CUDA tensors and the reference on CPU tensors.
        recipe_packs, text_kind, is_hot, end_tokens: columns of ``slot_meta``, see `layout`.
    """
    shift = 32 - c.index_bits(c.whole_pages(num_tokens))
    context_start = 0 if use_context else c.VACANT
    known = base, num_tokens, shift, prompt_len, context_start, recipe_packs, text_kind
    _set_slot(state, slot, SlotMeta(*known, int(is_hot), end_tokens), backend)


def vacate_slot(state: StepState, slot: int, backend: Backend = "auto") -> None:
    """Nothing is drafted for the slot any more."""
    _set_slot(state, slot, SlotMeta(), backend)


def load_slot_kernel(state: StepState, backend: Backend = "auto") -> None:
    """Compile or load what `occupy_slot` and `vacate_slot` run; no slot changes."""
    if resolve_backend(backend, state.slot_meta) == "triton":
        _launch_set_slot(state, 0, SlotMeta(), num_programs=0)


def _set_slot(state: StepState, slot: int, meta: SlotMeta, backend: Backend) -> None:
    if resolve_backend(backend, state.slot_meta) == "triton":
        _launch_set_slot(state, slot, meta)
    else:
        set_slot_reference(state, slot, meta)


def _launch_set_slot(state: StepState, slot: int, meta: SlotMeta, num_programs: int = 1) -> None:
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernel import set_slot_kernel

    launch(
        set_slot_kernel,
        (num_programs,),
        (state.slot_meta, state.align_state, slot, *meta.row()),
        {},
        num_warps=1,
    )


def _upload(tokens: npt.NDArray[np.int32], out: torch.Tensor) -> None:
    """Copy to the device, without the host waiting for it. The tokens may change afterwards."""
    if out.device.type == "cpu":
        out.numpy()[:] = tokens
        return
    # PyTorch's pinned allocator keeps the block until the copy on this stream is done.
    source = torch.empty(len(tokens), dtype=torch.int32, pin_memory=True)
    source.numpy()[:] = tokens
    out.copy_(source, non_blocking=True)
