"""`realign` in plain NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np
import torch

#: What a matching token weighs in the cursor's score; a skipped token of the prediction costs 1.
MATCH_WEIGHT = 4


def realign_reference(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
    followed: torch.Tensor,
) -> None:
    """Same arguments, same results as the kernel's launcher; all on the CPU."""
    rows, lengths, cursors, follows = (t.numpy() for t in (row, prediction_len, cursor, followed))
    for b, (slot, is_active) in enumerate(zip(slots.tolist(), active.tolist(), strict=True)):
        cursors[b] = follows[b] = 0
        n = int(lengths[slot])
        if is_active <= 0 or n == 0:
            continue
        words = rows[slot, : (n + 31) // 32].astype("<i4")
        stays = np.unpackbits(words.view(np.uint8), bitorder="little")[:n]
        # H[j + 1] for every j; scores of j = 0 are 0, and the first maximum counts.
        common = np.cumsum(1 - stays.astype(np.int32))
        skipped = np.arange(1, n + 1)
        score = MATCH_WEIGHT * common - skipped
        best = int(score.argmax())
        cursors[b] = best + 1 if score[best] > 0 else 0
        follows[b] = max(0, int((2 * common - skipped).max()))
