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
    for b, slot in enumerate(slots.tolist()):
        n = int(prediction_len[slot])
        words = row.numpy()[slot, : (n + 31) // 32].astype("<i4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:n]
        # Where H rises the score 2 H[j] - j goes up by one, elsewhere down by one.
        score = np.concatenate([[0], np.cumsum(1 - 2 * bits.astype(np.int64))])
        cursor[b] = int(score.argmax()) if active[b] > 0 else 0
