"""Checks that every operation's boundary shares: metadata only, so that none of them ever waits for a device.

A message names the argument, what was expected and what was found; both backends of an operation are
checked by the same code and so refuse bad input with the same words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch

Backend = Literal["auto", "triton", "reference"]


def check_tensor(
    name: str,
    t: object,
    *,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: Literal["all", "inner"] = "all",
) -> torch.Tensor:
    """Return `t` if it is a tensor of this dtype, shape and device; raise otherwise.

    Args:
        name: The argument's name, for the message.
        t: What the caller passed.
        dtype: The one dtype that is accepted; nothing is ever converted silently.
        shape: Expected sizes; None stands for any size.
        device: Expected device, or None for any.
        contiguous: "all": a contiguous tensor. "inner": elements of the last dimension adjacent, any stride
            before it (a slice of rows or columns of a larger tensor).

    Raises:
        TypeError: `t` is no tensor, or has another dtype.
        ValueError: another number of dimensions, shape, device or layout.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(t).__name__}")
    if t.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, found {t.dtype}")
    # A NumPy reference would otherwise read past what the tensor's own metadata says.
    if t.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, found layout {t.layout}")
    if t.ndim != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} dimensions, found {t.ndim} (shape {tuple(t.shape)})")
    for want, have in zip(shape, t.shape, strict=True):
        if want is not None and want != have:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name}: expected shape [{wanted}], found {list(t.shape)}")
    if device is not None and t.device != device:
        raise ValueError(f"{name}: expected device {device}, found {t.device}")
    if contiguous == "all" and not t.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, found strides {t.stride()}")
    if contiguous == "inner" and t.numel() and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, found strides {t.stride()}")
    return t


def resolve_backend(backend: str, t: torch.Tensor) -> Literal["triton", "reference"]:
    """Say which implementation runs: "auto" is Triton on CUDA tensors and the reference on CPU tensors.

    "triton" on CPU tensors is for tests: it needs Triton's interpreter (TRITON_INTERPRET=1, set before the
    kernels are imported).

    Raises:
        ValueError: an unknown backend, or one that cannot read tensors on this device.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {get_args(Backend)}, found {backend!r}")
    if backend == "auto":
        return "triton" if t.device.type == "cuda" else "reference"
    if backend == "reference" and t.device.type != "cpu":
        raise ValueError(f"backend: 'reference' expects CPU tensors, found device {t.device}")
    if backend == "triton" and t.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise ValueError("backend: 'triton' expects CUDA tensors (or TRITON_INTERPRET=1), found device cpu")
    return cast(Literal["triton", "reference"], backend)
