"""What the samples of one prompt have in common: their columns, by the library's own edit scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..ops.constants import DELETE, INSERT, KEEP
from ..ops.lcs import lcs_edit_script, lcs_length

IntArray = npt.NDArray[np.signedinteger[Any]]
#: Tokens of a sample that are aligned: the table of two samples takes 4 bytes for each pair of their tokens.
MAX_ALIGNED = 8192


def columns(samples: Sequence[IntArray], agree: float = 1.0) -> IntArray:
    """[columns, k]: where each determined token stands in each sample, -1 in samples that do not have it.

    ::

        pivot = the first sample; with agree < 1 the one with the largest sum of LCS lengths with the others
        for each token of pivot:
            position[s] = where the edit script from pivot to sample s keeps it
            it is determined if at least agree · k samples, the pivot among them, have it

    Args:
        samples: k token sequences; of each the first `MAX_ALIGNED` tokens are aligned.
        agree: the share of samples that must agree, above 0 and at most 1.

    Of one sample nothing is determined. Example: ``[5, 6, 7]`` and ``[5, 8, 7]`` have the columns
    ``[[0, 0], [2, 2]]``.
    """
    k = len(samples)
    if k < 2 or (agree == 1.0 and not all(map(len, samples))):
        return np.zeros((0, k), dtype=np.int64)
    cut = [sample[:MAX_ALIGNED] for sample in samples]
    pivot = 0 if agree == 1.0 else _most_common(cut)
    place = np.full((len(cut[pivot]), k), -1, dtype=np.int64)
    rest = [s for s in range(k) if s != pivot]
    place[:, pivot] = np.arange(len(cut[pivot]))
    for s, (mine, its) in zip(rest, _kept(cut[pivot], [cut[s] for s in rest]), strict=True):
        place[mine, s] = its
    found: IntArray = place[(place >= 0).sum(axis=1) >= max(_least(agree, k), 2)]
    return found


def _least(agree: float, k: int) -> int:
    """The least number of samples that is a share of `agree`."""
    return math.ceil(agree * k - 1e-9)


def _padded(samples: Sequence[IntArray]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [len(sample) for sample in samples]
    tokens = np.zeros((len(samples), max(lengths, default=0)), dtype=np.int32)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = sample
    return torch.from_numpy(tokens), torch.tensor(lengths, dtype=torch.int32)


def _most_common(samples: Sequence[IntArray]) -> int:
    """The sample with the largest sum of LCS lengths, the first of equal ones."""
    tokens, lengths = _padded(samples)
    k = len(samples)
    total = [
        int(lcs_length(tokens[s].repeat(k, 1), lengths[s].repeat(k), tokens, lengths).sum()) for s in range(k)
    ]
    return total.index(max(total))


def _kept(pivot: IntArray, others: Sequence[IntArray]) -> list[tuple[IntArray, IntArray]]:
    """For each other sample: positions in the pivot, and those in the sample, of the tokens that both have."""
    found: list[tuple[IntArray, IntArray]] = []
    for other in others:  # one at a time: the table of a pair is what takes memory
        context, context_len = _padded([other])
        prediction, prediction_len = _padded([pivot])
        script = lcs_edit_script(context, context_len, prediction, prediction_len)
        ops = script.op[0, : int(script.length[0])].numpy()
        keep = ops == KEEP
        mine, its = np.cumsum(ops != INSERT) - 1, np.cumsum(ops != DELETE) - 1
        found.append((mine[keep], its[keep]))
    return found
