"""A request's credit: how much its drafts may still promise in vain. Imports no vLLM.

A confidence is right on average over all requests. In a single request it can be wrong at every step: the model
refuses what the drafter is sure of. So what was promised is held against what was accepted, request by request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.integer[Any]]

#: Of a new request: so many drafts may be rejected before it gets no more than single ones.
START = 4.0
#: What an accepted draft earns: a quarter of what is promised has to come true.
EARNED = 4.0
#: A slot promises at least this, however little its draft does: drafts that are never accepted run out as well.
LEAST = 0.2
#: What every step gives back: in any batch, and of its share of the slots that are free.
REFILL, REFILL_OF_FREE = 0.001, 0.0125


def most(num_draft_tokens: int) -> float:
    """The largest credit: two whole drafts."""
    return 2.0 * num_draft_tokens


def refilled(credit: Floats, free_slots: int, batch_size: int) -> Floats:
    """[B] the credit at the beginning of a step, in which so many slots are free.

    ::

        credit += REFILL + REFILL_OF_FREE * free_slots / batch_size, at most 1
    """
    share = REFILL_OF_FREE * max(free_slots, 0) / max(batch_size, 1)
    return np.asarray(credit + np.float32(min(REFILL + share, 1.0)), dtype=np.float32)


def covered(survival: Levels, credit: Floats) -> Ints:
    """[B] how many of the first drafts of each request its credit covers.

    ::

        covered = the largest k with promised(survival, k) <= credit

    survival: [K, B] in units of 1/255, 0 behind the last draft.
    """
    # No sum passes 255 * K, and K is at most 256.
    sums = survival.astype(np.uint16)
    # Row by row: NumPy's own sum along the first axis takes ten times as long.
    for k in range(1, len(sums)):
        sums[k] += sums[k - 1]
    count: Ints = (sums <= credit * 255).sum(axis=0)
    return np.minimum(count, (credit / np.float32(LEAST)).astype(np.int64))


def promised(survival: Levels, slots: Ints) -> Floats:
    """[B] what the first ``slots[b]`` drafts of each request promise.

    ::

        promised = max(sum(survival[i] for i in range(slots)), LEAST * slots)
    """
    few = slots.astype(np.uint16)
    depth = np.arange(few.max(initial=0), dtype=np.uint16)[:, None]
    sums = (survival[: len(depth)] * (depth < few)).sum(axis=0, dtype=np.uint16)
    return np.asarray(np.maximum(sums / np.float32(255), few * np.float32(LEAST)), dtype=np.float32)
