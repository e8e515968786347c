"""What a `Drafter` asks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .arena import MAX_TOKENS
from .ops._check import check_int
from .ops.constants import MOST_CONTEXT, MOST_DRAFTS, MOST_PREDICTION, PAGE

#: What the kernel can count: lanes of a draft, positions as parts of 32-bit keys, and the rest in 32 bits.
_MOST = {
    "max_slots": 2**31 - 1,
    "max_context_len": MOST_CONTEXT,
    "max_prediction_len": MOST_PREDICTION,
    "num_draft_tokens": MOST_DRAFTS,
    "vocab_size": 2**31 - 1,
    "max_prediction_tokens": MAX_TOKENS // PAGE * PAGE,
}

#: Of the tensors that `Drafter.add` takes.
_INTEGERS = {
    getattr(torch, name)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    if hasattr(torch, name)
}


def check_size(name: str, size: int) -> int:
    return check_int(name, size, 1, _MOST[name])


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raise if it is neither of this kind nor None."""
    if value is not None and not isinstance(value, kind):
        # A pack is text, and becomes recipes for one model.
        advice = "; call its tokenize(encode)" if hasattr(value, "tokenize") else ""
        raise TypeError(f"{name}: expected {expected}, found {type(value).__name__}{advice}")


def check_device(device: object) -> torch.device:
    """The device, if it is the CPU or a GPU that is there."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device: expected a str or torch.device, found {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError:  # of several lines
        found = torch.device("meta")
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ValueError(f"device: expected 'cpu' or 'cuda', found {str(device)!r}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= num_gpus:
        there = f"'cpu' or one of {num_gpus} GPUs" if num_gpus else "'cpu', for PyTorch sees no GPU"
        raise ValueError(f"device: expected {there}, found {str(device)!r}")
    return found


def as_integers(prediction: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor) -> npt.NDArray[Any]:
    """[n] of some integer dtype, from anything that `Drafter.add` takes; it may share memory."""
    if isinstance(prediction, torch.Tensor):
        return _array_of(prediction)
    if not isinstance(prediction, (Sequence, np.ndarray)):
        raise TypeError(f"prediction: expected a sequence of integers, found {type(prediction).__name__}")
    try:
        ids = np.asarray(prediction)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"prediction: expected a flat sequence of integers ({error})") from error
    if ids.ndim == 1 and ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"prediction: expected a flat sequence of integers, found {ids.ndim} dimensions of {ids.dtype}"
        )
    return ids


def _array_of(prediction: torch.Tensor) -> npt.NDArray[Any]:
    if prediction.device.type != "cpu":
        raise ValueError(f"prediction: expected a tensor on the CPU, found device {prediction.device}")
    if prediction.shape == (0,):
        return np.zeros(0, dtype=np.int32)
    if prediction.ndim != 1 or prediction.dtype not in _INTEGERS or prediction.layout != torch.strided:
        raise TypeError(
            "prediction: expected a flat, dense tensor of integers, "
            f"found {prediction.ndim} dimensions of {prediction.dtype}, {prediction.layout}"
        )
    ids: npt.NDArray[Any] = prediction.numpy()
    return ids
