"""`realign` in plain NumPy: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

import numpy as np
import torch


def realign_reference(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
) -> None:
    """Same arguments, same results as the kernel's launcher; all on the CPU."""
    rows, lengths, cursors = row.numpy(), prediction_len.numpy(), cursor.numpy()
    for b, (slot, is_active) in enumerate(zip(slots.tolist(), active.tolist(), strict=True)):
        cursors[b] = 0
        n = int(lengths[slot])
        if is_active <= 0 or n == 0:
            continue
        words = rows[slot, : (n + 31) // 32].astype("<i4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:n]
        # Where H rises the score 2 H[j] - j goes up by one, elsewhere down by one; the first maximum counts.
        score = np.cumsum(1 - 2 * bits.astype(np.int32))
        best = int(score.argmax())
        cursors[b] = best + 1 if score[best] > 0 else 0
