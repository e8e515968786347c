"""The budget by sorting: what the kernel is checked against, and what runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..constants import SOURCE_NONE, SURVIVAL_ONE
from ..draft import Draft

IntArray = npt.NDArray[np.signedinteger[Any]]


def survival_of(confidence: npt.NDArray[np.float32], length: IntArray) -> npt.NDArray[np.int64]:
    """[B, K] in units of 1/`SURVIVAL_ONE`: that all drafts up to each are accepted; -1 behind the last one."""
    units = np.full(confidence.shape, -1, dtype=np.int64)
    left = np.full(len(length), SURVIVAL_ONE, dtype=np.int64)
    for k in range(confidence.shape[1]):
        left = left * (confidence[:, k] * np.float32(SURVIVAL_ONE)).astype(np.int64) // SURVIVAL_ONE
        units[:, k] = np.where(k < length, left, -1)
    return units


def last_tokens(
    token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, vocab_size: int
) -> IntArray:
    """[B]: what drafts are padded with: the last token, 0 if it is not in the vocabulary."""
    ends = np.minimum(total_len.numpy()[slots.numpy()], token_ids.shape[1])
    last = np.where(ends > 0, token_ids.numpy()[slots.numpy(), ends - 1], 0)
    return np.where((last >= 0) & (last < vocab_size), last, 0)


def limit_drafts_reference(
    draft: Draft,
    budget: torch.Tensor,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
    vocab_size: int,
) -> None:
    """Cut the drafts of a batch, in place; arguments as in `limit_drafts_inplace`."""
    drafts, length, confidence, source = (tensor.numpy() for tensor in draft)
    units = survival_of(confidence, length)
    order = np.argsort(-units.ravel(), kind="stable")
    kept = np.zeros(units.size, dtype=np.bool_)
    kept[order[: max(int(budget[0]), 0)]] = True
    length[:] = (kept.reshape(units.shape) & (units >= 0)).sum(axis=1)
    behind = np.arange(units.shape[1]) >= length[:, None]
    drafts[:] = np.where(behind, last_tokens(token_ids, total_len, slots, vocab_size)[:, None], drafts)
    confidence[behind] = 0
    source[length == 0] = SOURCE_NONE
