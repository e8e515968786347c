"""`suffix_match` in plain NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np
import torch


def longest_suffixes(
    text: np.ndarray, context: np.ndarray, anchor: int | None, max_match: int, from_start: bool
) -> list[tuple[int, int]]:
    """``[(end, length), …]``: the best two matches of one request, or as many as there are."""
    num_context, num_text = len(context), len(text)
    if from_start and num_context == 0 and num_text > 0:
        return [(0, max_match)]
    limit = min(max_match, num_context)
    if limit == 0:
        return []
    ends = np.flatnonzero(text[: max(num_text - 1, 0)] == context[-1]) + 1
    if ends.size == 0:
        return []
    back = np.arange(limit)
    same = text[np.maximum(ends[:, None] - 1 - back, 0)] == context[num_context - 1 - back]
    same &= ends[:, None] > back
    lengths = np.where(same.all(axis=1), limit, same.argmin(axis=1))
    if from_start:
        lengths[(ends == num_context) & (lengths == num_context)] = max_match
    # Ties: nearest to the anchor, ahead of it before behind; without an anchor the latest.
    away = -ends if anchor is None else np.where(ends >= anchor, 2 * (ends - anchor), 2 * (anchor - ends) + 1)
    return [(int(ends[i]), int(lengths[i])) for i in np.lexsort((away, -lengths))[:2]]


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
    second_end: torch.Tensor | None,
    second_length: torch.Tensor | None,
    min_match: int,
    max_match: int,
    from_start: bool,
) -> None:
    """Same arguments, same results and same order of axes as the kernel's launcher; all on the CPU."""
    starts, context_lens, text_lens = (t.numpy() for t in (context_start, context_len, text_len))
    contexts, texts = context.numpy(), text.numpy()
    anchors = None if anchor is None else anchor.tolist()
    outputs = [(end.numpy(), length.numpy())]
    if second_end is not None and second_length is not None:
        outputs.append((second_end.numpy(), second_length.numpy()))
    for b, (slot, is_active) in enumerate(zip(slots.tolist(), active.tolist(), strict=True)):
        found: list[tuple[int, int]] = []
        if is_active > 0:
            found = longest_suffixes(
                texts[slot, : text_lens[slot]],
                contexts[slot, starts[slot] : context_lens[slot]],
                None if anchors is None else anchors[b],
                max_match,
                from_start,
            )
        found = [match for match in found if match[1] >= min_match]
        for (ends, lengths), match in zip(outputs, [*found, (-1, 0), (-1, 0)], strict=False):
            ends[b], lengths[b] = match
