"""How a prediction and a slot get to the device: upload, index, and what the host says about a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from . import layout as c
from .backend import Backend
from .index import build_index
from .layout import TEXT_KINDS, StepState, TextRules
from .recipes import ALL_PACKS


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
    *,
    recipe_packs: int = ALL_PACKS,
    text_kind: TextRules = TEXT_KINDS["prediction"],
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
        text_kind: one of `TEXT_KINDS`.
        recipe_packs, is_hot, end_tokens: columns of ``slot_meta``, see `layout`.
    """
    shift = 32 - c.index_bits(c.whole_pages(num_tokens))
    known = base, num_tokens, shift, prompt_len, use_context, recipe_packs, c.pack_rules(text_kind), is_hot
    row = np.full(c.SLOT_META, -1, np.int32)
    row[: c.END_TOKENS] = known
    row[c.END_TOKENS :][: len(end_tokens)] = end_tokens[: c.MAX_END_TOKENS]
    _write_row(state, slot, row)


def vacate_slot(state: StepState, slot: int) -> None:
    """Nothing is drafted for the slot any more."""
    row = np.zeros(c.SLOT_META, np.int32)
    row[c.OUTPUT_START] = c.NOWHERE
    _write_row(state, slot, row)


def _write_row(state: StepState, slot: int, row: npt.NDArray[np.int32]) -> None:
    _upload(row, state.slot_meta[slot])
    _upload(np.full(1, -1, np.int32), state.align_state[slot, c.SEEN : c.SEEN + 1])


def _upload(values: npt.NDArray[np.int32], out: torch.Tensor) -> None:
    """Copy to the device, without the host waiting for it. The values may change afterwards."""
    if out.device.type == "cpu":
        out.numpy()[:] = values
        return
    # PyTorch's pinned allocator keeps the block until the copy on this stream is done.
    source = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
    source.numpy()[:] = values
    out.copy_(source, non_blocking=True)
