"""The interpreter that tests run on still refuses what Triton's own does, and computes the same."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def _operations_kernel(out_ptr, right, OPERATION: tl.constexpr):
    o_x = tl.arange(0, 4)
    left = tl.load(out_ptr + o_x)
    if OPERATION == "scaled":
        result = tl.sum(3 * (right - left)[:, None] // (o_x[None, :] + 1), 1)
    elif OPERATION == "other shape":
        result = left + tl.arange(0, 8)
    elif OPERATION == "unsigned":
        result = left.to(tl.uint32) + -1
    else:
        result = out_ptr + out_ptr
    tl.store(out_ptr + o_x, result)


def run(operation: str) -> list[int]:
    out = torch.full((4,), 5, dtype=torch.int32)
    _operations_kernel[(1,)](out, 1, OPERATION=operation)
    return out.tolist()


def test_it_computes() -> None:
    assert run("scaled") == [-12 - 6 - 4 - 3] * 4


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("other shape", "incompatible dimensions"),
        ("unsigned", "unsigned tensor and a negative scalar"),
        ("pointers", "cannot add pointers"),
    ],
)
def test_it_refuses(operation: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        run(operation)
