"""What a step gives back."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from ..constants import SOURCE_CONTEXT, SOURCE_MEMORY, SOURCE_NONE, SOURCE_PREDICTION, SOURCE_RECIPE


class Source(IntEnum):
    """Where a draft was read from."""

    NONE = SOURCE_NONE
    PREDICTION = SOURCE_PREDICTION
    #: The request's own prompt or output.
    CONTEXT = SOURCE_CONTEXT
    RECIPE = SOURCE_RECIPE
    #: Earlier answers, given in place of a prediction.
    MEMORY = SOURCE_MEMORY


class Draft(NamedTuple):
    """Draft tokens of a batch. The caller may write to the tensors; the next call rewrites them."""

    #: [B, K] int64: from `length` on, the last token of the context. ``0 <= token < vocab_size``.
    token_ids: torch.Tensor
    #: [B] int32, ``0 <= length <= K``: how many of them are meant.
    length: torch.Tensor
    #: [B, K] float32, ``0 < p <= 1``: estimated probability that a draft is accepted given that those before
    #: it were; 0 from `length` on.
    confidence: torch.Tensor
    #: [B] int8: a `Source`; NONE where `length` is 0.
    source: torch.Tensor


def allocate_draft(batch_size: int, num_draft_tokens: int, device: torch.device | str) -> Draft:
    """Output tensors of a step with this batch size and K."""
    return Draft(
        token_ids=torch.zeros((batch_size, num_draft_tokens), dtype=torch.int64, device=device),
        length=torch.zeros(batch_size, dtype=torch.int32, device=device),
        confidence=torch.zeros((batch_size, num_draft_tokens), dtype=torch.float32, device=device),
        source=torch.zeros(batch_size, dtype=torch.int8, device=device),
    )


def length_quarters(length_factor: float) -> int:
    """A length factor as the kernel takes it.

    Raises:
        ValueError: it is no multiple of 0.25 from 0 to 2^20.
    """
    quarters = 4 * length_factor
    # The upper end keeps its product with a matched length within the kernel's 32 bits.
    if not (0 <= quarters <= 1 << 22 and quarters == int(quarters)):
        raise ValueError(f"length_factor: expected a multiple of 0.25 from 0 to 2^20, found {length_factor}")
    return int(quarters)
