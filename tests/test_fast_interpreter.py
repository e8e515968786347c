"""The interpreter that tests run on still refuses what Triton's own does, and computes the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@triton.jit
def _every_operation_kernel(out_ptr, in_ptr, small_ptr, scalar):
    o_x = tl.arange(0, 8)
    x, small = tl.load(in_ptr + o_x), tl.load(small_ptr + o_x, o_x < 5, -1)
    wide, low = x.to(tl.int64) << 31, small.to(tl.int64)
    odd, real = (x & 1) == 1, x.to(tl.float32) * 0.5
    one = tl.load(in_ptr + scalar)
    o_out = o_x
    for value in (
        x + 3, 3 - x, x * small, one - x, x + one, scalar - small, x & -4, x | small, x ^ scalar, x << 2, x >> 1,
        x >> scalar, one >> 2, one * 2 + scalar, tl.minimum(x, 2), tl.maximum(2, x), tl.minimum(one, scalar),
        tl.where(odd, x, -7), tl.where(odd, one, x), tl.where(x < small, x, small), tl.where(one > 2, 5, x),
        tl.where(odd & (x <= 6) | (x >= one), 1, 0), tl.where(odd ^ (x != small), wide, low), wide + 1, wide - low,
        wide * 3 >> 2, low < wide, low == wide, x.to(tl.uint32) >> 3, x.to(tl.uint32) * 3, real + real,
        real - 0.25, real < one, real * real, tl.load(in_ptr + 2, one > 100, 9) + o_x,
        tl.load(small_ptr + (7 - o_x)), tl.reduce_or(x, 0) + o_x, tl.xor_sum(x, 0) + o_x,
        (x[:, None] + small[None, :]).sum(1), x // 3, x % 3, -x, ~x,
    ):  # fmt: skip
        tl.store(out_ptr + o_out, value.to(tl.float64))
        o_out += 8


def every_operation() -> list[float]:
    out = torch.zeros(8 * 43, dtype=torch.float64)
    given = torch.tensor([5, -3, 2**31 - 1, 0, 7, -(2**31), 6, 1], dtype=torch.int32)
    _every_operation_kernel[(1,)](out, given, (given % 100).to(torch.int16), 4)
    return out.tolist()


def test_every_operation_is_tritons_own() -> None:
    code = "from tests import test_fast_interpreter as module; print(module.every_operation())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == every_operation()
