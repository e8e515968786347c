"""Checks that every operation's boundary shares: metadata only, so that none of them ever waits for a device.

`check_batch` alone reads values, of tensors on the CPU. A message names the argument, what was expected and what
was found; both backends of an operation are checked by the same code and so refuse bad input with the same words.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any, Literal, cast, get_args

import torch

from .errors import check_int

Backend = Literal["auto", "triton", "reference"]
_BACKENDS = get_args(Backend)


def check_batch(
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
    num_sampled: torch.Tensor,
    new_tokens: torch.Tensor | None = None,
) -> None:
    """Raise ValueError where a step over these CPU tensors would read outside of them or change a slot twice.

    ::

        for b, slot in enumerate(slots):
            0 <= slot < max_slots and 0 <= total_len[slot] <= max_context_len
            slot not in the slots before, both with num_sampled > 0
            num_sampled[b] <= min(N, max_context_len - total_len[slot])     # of new_tokens, [B, N]
    """
    first: dict[int, int] = {}
    max_slots, max_context_len = token_ids.shape
    for b, (slot, sampled) in enumerate(zip(slots.tolist(), num_sampled.tolist(), strict=True)):
        check_int(f"slots[{b}]", slot, 0, max_slots - 1, f"0 <= slot < {max_slots}")
        check_int(f"total_len[{slot}]", int(total_len[slot]), 0, max_context_len)
        if sampled > 0 and first.setdefault(slot, b) != b:
            raise ValueError(f"slots[{b}]: expected each slot once, found {slot}, as in slots[{first[slot]}]")
        if new_tokens is not None:
            most = min(new_tokens.shape[1], max_context_len - int(total_len[slot]))
            check_int(f"num_sampled[{b}]", max(sampled, 0), 0, most)


def check_tensor(
    name: str,
    t: object,
    *,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return `t` if it is a tensor of this dtype and shape, where None stands for any size or device.

    TypeError for no tensor or another dtype: nothing is ever converted silently; ValueError for all else. Only the
    elements of the last dimension must be adjacent: it may be a slice of rows or columns of a larger tensor.
    """
    if (
        type(t) is torch.Tensor and t.dtype is dtype and t.device == device and t.layout is torch.strided
        and t.is_contiguous() and (t.ndim == 1 if shape == (None,) else t.shape == shape)
    ):  # fmt: skip
        return t  # the usual case of a step
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
    if t.numel() and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, found strides {t.stride()}")
    return t


def resolve_backend(backend: str, t: torch.Tensor) -> Literal["triton", "reference"]:
    """Say which implementation runs: "auto" is Triton on CUDA tensors and the reference on CPU tensors.

    "triton" on CPU tensors is for tests: it needs Triton's interpreter (TRITON_INTERPRET=1, set before the kernels
    are imported). ValueError for an unknown backend, or one that cannot read tensors on this device;
    ImportError for "triton" where Triton is not installed: the reference runs without it.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend: expected one of {_BACKENDS}, found {backend!r}")
    if backend == "auto":
        backend = "triton" if t.device.type == "cuda" else "reference"
    if backend == "reference" and t.device.type != "cpu":
        raise ValueError(f"backend: 'reference' expects CPU tensors, found device {t.device}")
    if backend == "triton" and t.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise ValueError("backend: 'triton' expects CUDA tensors (or TRITON_INTERPRET=1), found device cpu")
    if backend == "triton":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            found = "expected Triton, which has wheels for Linux on x86_64 and aarch64, found none"
            raise ImportError(f"backend: {found}; device='cpu' drafts without it") from error
    return cast(Literal["triton", "reference"], backend)


#: What Triton compiled, by kernel, device and `sizes`; empty under its interpreter.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    sizes: dict[str, Any],
    variant: Hashable = None,
    **options: int,
) -> Any:
    """``kernel[grid](*args, **sizes, **options)``. Returns what Triton compiled; None under its interpreter.

    At each launch Triton asks every argument for its type and alignment, which takes the host several times as
    long as the launch. Here it is asked once for each device, `sizes` and `variant`: the kernel takes any integer
    and any alignment of what differs from call to call, as it names these in `do_not_specialize`.

    Args:
        kernel: a ``@triton.jit`` function.
        grid: programs, of one or two dimensions; (0,) compiles or loads the kernel, and runs nothing.
        args: a tensor or a named tuple of tensors first; tensors are on the current device.
        sizes: its constexprs, which are its last arguments, in order.
        variant: differs where a type of `args` does, or the alignment of one that is asked for it.
        options: of Triton's compiler.
    """
    tensor = args[0][0] if isinstance(args[0], tuple) else args[0]
    key = kernel.fn, tensor.get_device(), variant, *sizes.values()
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*args, *sizes.values())
    elif (compiled := kernel[grid](*args, **sizes, **options)) is not None:
        _compiled[key] = compiled
    return compiled


def pointers(args: Any) -> Any:
    """Arguments of what Triton compiled, with an int in place of each tensor: its launcher asks a tensor for its
    address, and CUDA about that, at each launch."""
    if isinstance(args, tuple):
        return tuple(map(pointers, args))
    return args.data_ptr() if isinstance(args, torch.Tensor) else args
