"""Checks of what an engine brings: token ids, before anything looks at them, and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..ops.errors import check_type

Integers = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
#: Types of 4 and 8 bytes, by `dtype.str` → the unsigned one.
_UNSIGNED = {np.dtype(t).str: np.dtype(f"u{t().itemsize}") for t in (np.int32, np.int64)}


def check_integers(name: str, values: Integers) -> npt.NDArray[Any]:
    """[n] of some integer dtype, from a sequence of integers, an array or a CPU tensor; it may share memory.

    TypeError for anything else, or another number of dimensions than one; ValueError for a tensor on another
    device.
    """
    if type(values) is np.ndarray and values.ndim == 1 and values.dtype.kind in "iu":
        return values  # the usual case
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor on the CPU, found device {values.device}")
    check_type(name, values, (Sequence, np.ndarray, torch.Tensor), "a sequence of integers")
    bools = {bool, np.bool_}
    if not isinstance(values, (np.ndarray, torch.Tensor)) and not bools.isdisjoint(map(type, values)):
        at = next(i for i, value in enumerate(values) if type(value) in bools)
        raise TypeError(f"{name}[{at}]: expected an integer, found bool")
    try:
        ids = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
    except (ValueError, OverflowError, TypeError) as error:  # ragged, beyond 64 bits, a sparse tensor
        raise TypeError(f"{name}: expected a flat sequence of integers ({error})") from error
    if ids.ndim == 1 and ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.ndim} dimensions of {ids.dtype}"
        raise TypeError(f"{name}: expected a flat sequence of integers, found {found}")
    return ids


def check_token_ids(
    name: str, values: Integers, vocab_size: int, first_gap: int = 2**31, most: int | None = None
) -> npt.NDArray[Any]:
    """`check_integers`, at most `most`; ValueError for the first that is no token id, ``0 <= id < vocab_size``,
    and no gap, ``first_gap <= id < 2**31``."""
    ids = check_integers(name, values)
    if most is not None and len(ids) > most:
        raise ValueError(f"{name}: expected at most {most} tokens, found {len(ids)}")
    if not ids.size:
        return ids
    # Most ids come in these types, and are looked at once: below 0 is above all others in the unsigned type.
    unsigned = _UNSIGNED.get(ids.dtype.str)
    if np.maximum.reduce(ids if unsigned is None else ids.view(unsigned)) >= vocab_size or (
        unsigned is None and ids.min() < 0
    ):
        is_wrong = (ids < 0) | (ids >= vocab_size) & ~((ids >= first_gap) & (ids < 2**31))
        if is_wrong.any():
            wrong = np.flatnonzero(is_wrong)[0]
            raise ValueError(f"{name}[{wrong}]: expected 0 <= id < {vocab_size}, found {ids[wrong]}")
    return ids


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
