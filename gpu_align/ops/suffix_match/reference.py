"""`suffix_match` in plain NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np
import torch


def longest_suffix(
    text: np.ndarray, context: np.ndarray, anchor: int | None, max_match: int, from_start: bool
) -> tuple[int, int]:
    """``(end, length)`` of the best match of one request, ``(-1, 0)`` if there is none."""
    num_context, num_text = len(context), len(text)
    if from_start and num_context == 0 and num_text > 0:
        return 0, max_match
    limit = min(max_match, num_context)
    if limit == 0:
        return -1, 0
    ends = np.flatnonzero(text[: max(num_text - 1, 0)] == context[-1]) + 1
    if ends.size == 0:
        return -1, 0
    back = np.arange(limit)
    same = text[np.maximum(ends[:, None] - 1 - back, 0)] == context[num_context - 1 - back]
    same &= ends[:, None] > back
    lengths = np.where(same.all(axis=1), limit, same.argmin(axis=1))
    if from_start:
        lengths[(ends == num_context) & (lengths == num_context)] = max_match
    # Ties: nearest to the anchor, ahead of it before behind; without an anchor the latest.
    away = -ends if anchor is None else np.where(ends >= anchor, 2 * (ends - anchor), 2 * (anchor - ends) + 1)
    best = np.lexsort((away, -lengths))[0]
    return int(ends[best]), int(lengths[best])


def suffix_match_reference(
    context: torch.Tensor,
    context_start: torch.Tensor,
    context_len: torch.Tensor,
    text: torch.Tensor,
    text_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    anchor: torch.Tensor | None,
    end: torch.Tensor,
    length: torch.Tensor,
    min_match: int,
    max_match: int,
    from_start: bool,
) -> None:
    """Same arguments, same results and same order of axes as the kernel's launcher; all on the CPU."""
    context_np, text_np = context.numpy(), text.numpy()
    for b, slot in enumerate(slots.tolist()):
        best_end, best_length = -1, 0
        if active[b] > 0:
            best_end, best_length = longest_suffix(
                text_np[slot, : int(text_len[slot])],
                context_np[slot, int(context_start[slot]) : int(context_len[slot])],
                None if anchor is None else int(anchor[b]),
                max_match,
                from_start,
            )
        found = best_length >= min_match
        end[b], length[b] = (best_end, best_length) if found else (-1, 0)
