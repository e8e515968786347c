"""Counts what kernels read and write, and how often one is launched, while Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@dataclass
class Traffic:
    """launches: of kernels. loaded, stored: bytes of the lanes whose mask is set; an atomic counts as both."""

    launches: int = 0
    loaded: int = 0
    stored: int = 0

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count all kernels that run in this block; under the interpreter only."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic, launch = InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__

    def size(ptr, mask) -> int:
        return int(mask.data.sum()) * ptr.get_element_ty().primitive_bitwidth // 8

    def create_masked_load(self, ptrs, mask, *args, **kwargs):
        traffic.loaded += size(ptrs, mask)
        return load(self, ptrs, mask, *args, **kwargs)

    def create_masked_store(self, ptrs, value, mask, *args, **kwargs):
        traffic.stored += size(ptrs, mask)
        return store(self, ptrs, value, mask, *args, **kwargs)

    def create_atomic_rmw(self, op, ptr, value, mask, *args, **kwargs):
        traffic.loaded += size(ptr, mask)
        traffic.stored += size(ptr, mask)
        return atomic(self, op, ptr, value, mask, *args, **kwargs)

    def call(self, *args, **kwargs):
        traffic.launches += 1
        return launch(self, *args, **kwargs)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", create_masked_load),
        patch.object(InterpreterBuilder, "create_masked_store", create_masked_store),
        patch.object(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw),
        patch.object(GridExecutor, "__call__", call),
    ):
        yield traffic
