"""Launches of small kernels, from Python in a few microseconds each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

#: What Triton compiled, by kernel, device and variant; empty under its interpreter.
_compiled: dict[tuple[Any, int, Hashable], Any] = {}


def launch(
    kernel: Any,
    num_programs: int,
    *args: Any,
    variant: Hashable = None,
    num_warps: int,
    **sizes: int,
) -> None:
    """``kernel[(num_programs,)](*args, **sizes)``.

    At each launch Triton asks every argument for its type and alignment, which takes the host several times as
    long as the launch. Here it is asked once for each device and variant: the kernel names all of its arguments
    in `do_not_specialize`, so that it takes any integer and any alignment.

    Args:
        kernel: a ``@triton.jit`` function with one dimension of programs.
        num_programs: 0 compiles or loads the kernel, and runs nothing.
        args: its arguments, tensors and integers, a tensor first; tensors are on the current device.
        variant: differs where a type of `args` or one of `sizes` does.
        num_warps: of a program.
        sizes: its constexprs, which are its last arguments, in order.
    """
    key = kernel.fn, args[0].get_device(), variant
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[num_programs, 1, 1](*args, *sizes.values())
        return
    compiled = kernel[(num_programs,)](*args, **sizes, num_warps=num_warps)
    if compiled is not None:
        _compiled[key] = compiled
