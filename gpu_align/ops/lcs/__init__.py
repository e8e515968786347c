"""The exact LCS of contexts and predictions: lengths and rows. lcs.md says how it is computed."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..backend import Backend, check_tensor, launch, resolve_backend

#: Words of a panel, two a lane: the most that a program holds at once. Wider predictions go through in several.
#: With more words a code would need more than the 15 bits that it has beside its sign.
_MAX_BLOCK_WORDS = 512
_MIN_BLOCK_WORDS = 4
#: Tokens that a program of lcs_code_kernel looks up at once.
_MAX_BLOCK_TOKENS = 4096
#: The interpreter pays by the operation, not by its width: requests that share a program there.
_INTERPRETER_REQUESTS = 64


class LcsWorkspace(NamedTuple):
    """Scratch of a call, from `lcs_workspace`. The contents before and after mean nothing.

    The tokens of a prediction are numbered in P panels of W words of 32 tokens:

    - `table` [B, P, 64 · W] int32, a hash table of the tokens of a panel;
    - `codes` [B, P, ceil(M / 4)] int64, the numbers of the context's tokens, four in each;
    - `planes` [B, P, log2(32 · W), W] int32, the numbers of the panel's tokens, bit by bit.
    """

    table: torch.Tensor
    codes: torch.Tensor
    planes: torch.Tensor


def lcs_workspace(
    batch: int,
    max_context_len: int,
    max_prediction_len: int,
    *,
    device: torch.device | str,
    block_words: int | None = None,
) -> LcsWorkspace:
    """Allocate the scratch of the LCS operations for one shape of tensors, that a call may be given.

    Args:
        batch, max_context_len, max_prediction_len: B, M and N of the call.
        device: where its tensors are.
        block_words: as the call has it.

    Returns:
        About 10 · N + 2 · M bytes a request, N rounded up to a power of two. Where N is more than 16,384, it is
        rounded up to a multiple of that, and each 16,384 tokens take 2 · M bytes more.

    Raises:
        ValueError: a negative length, or a bad `block_words`.
    """
    if batch < 0 or max_context_len < 0:
        raise ValueError(f"batch, max_context_len: expected 0 or more, found {batch}, {max_context_len}")
    words = _choose_block_words(32 * _row_words(max_prediction_len), block_words)
    shapes = _workspace_shapes(batch, max_context_len, max_prediction_len, words)
    return LcsWorkspace(*(torch.empty(s, dtype=dtype, device=device) for dtype, s in shapes))


def _row_words(max_prediction_len: int) -> int:
    """Words of 32 tokens of a prediction."""
    if max_prediction_len < 0:
        raise ValueError(f"max_prediction_len: expected 0 or more, found {max_prediction_len}")
    return (max_prediction_len + 31) // 32


def _workspace_shapes(B: int, M: int, N: int, block_words: int) -> list[tuple[torch.dtype, list[int]]]:
    """Dtype and shape of every tensor of an `LcsWorkspace`."""
    panels = max(-(-_row_words(N) // block_words), 1)
    return [
        (torch.int32, [B, panels, 2 * 32 * block_words]),
        (torch.int64, [B, panels, -(-M // 4)]),
        (torch.int32, [B, panels, (32 * block_words - 1).bit_length(), block_words]),
    ]


def _choose_block_words(prediction_len: int, block_words: int | None) -> int:
    """The words of a panel, two a lane: enough for the widest prediction, within what registers hold."""
    if block_words is None:
        words = max((prediction_len + 31) // 32, _MIN_BLOCK_WORDS)
        return min(1 << (words - 1).bit_length(), _MAX_BLOCK_WORDS)
    if not 1 <= block_words <= _MAX_BLOCK_WORDS or block_words & (block_words - 1):
        raise ValueError(
            f"block_words: expected a power of two up to {_MAX_BLOCK_WORDS}, found {block_words}"
        )
    return max(block_words, 2)


def lcs_length(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    workspace: LcsWorkspace | None = None,
    backend: Backend = "auto",
    block_words: int | None = None,
) -> torch.Tensor:
    """Length of the longest common subsequence of every context and its prediction.

    H = zeros(m + 1, n + 1)
    for i in range(m):
        for j in range(n):
            H[i + 1][j + 1] = H[i][j] + 1 if context[i] == prediction[j] else max(H[i][j + 1], H[i + 1][j])
    out[b] = H[m][n]

    Example: context [7, 5, 9], prediction [7, 8, 9] give 2.

    Args:
        context: [B, M] int32, what the model wrote. Any int32 is a token; rows may be strided.
        context_len: [B] int32, tokens valid in each row, 0 ≤ length ≤ M; outside that it is clamped.
        prediction: [B, N] int32, rows may be strided.
        prediction_len: [B] int32, 0 ≤ length ≤ N; outside that it is clamped.
        out: [B] int32, overwritten; None allocates it.
        carry: [B, M] int8, scratch of predictions wider than one panel; None allocates it where needed.
        workspace: scratch from `lcs_workspace` for these shapes; None allocates it. The reference uses neither.
        backend: "auto" is Triton on CUDA tensors and the NumPy reference on CPU tensors; same bits.
        block_words: words (of 32 prediction tokens) a program holds at once, a power of two; for tuning. 1 is
            taken as 2.

    Returns:
        `out` [B] int32, 0 ≤ out ≤ min(m, n). Nothing waits for the device; with `out`, `carry` and `workspace`
        given nothing is allocated on it.

    Raises:
        TypeError: an argument is no tensor, or has another dtype.
        ValueError: another shape, device or layout, an unknown backend, or a bad `block_words`.

    Cost: m · ceil(n / 32) word steps, of which a program runs up to 512 side by side, after m + n look-ups in a
    hash table; they take longer where many different tokens fall into neighbouring slots.
    Source: Hyyrö, "Bit-parallel LCS-length computation revisited" (2004).
    """
    inputs = context, context_len, prediction, prediction_len
    scratch = _begin(*inputs, carry, workspace, block_words, backend)
    out = _output("out", out, [context.shape[0]], context)
    if scratch is None:
        from .reference import lcs_length_reference  # late: it brings Numba, where that is installed

        return lcs_length_reference(*inputs, out=out)
    _launch(*inputs, *scratch, length=out)
    return out


def lcs_prefix_row(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    workspace: LcsWorkspace | None = None,
    backend: Backend = "auto",
    block_words: int | None = None,
) -> torch.Tensor:
    """LCS of every context with every prefix of its prediction: the last row of the table in `lcs_length`.

    for j in range(N + 1):
        out[b][j] = lcs(context, prediction[:min(j, prediction_len)])

    It rises by 0 or 1 a position: where it rises, the prediction token is one that an alignment uses first.
    Example: context [7, 5, 9], prediction [7, 8, 9] give [0, 1, 1, 2].

    Args:
        out: [B, N + 1] int32, overwritten; rows may be strided; None allocates it.
        length: [B] int32, overwritten with the LCS lengths on either backend; None allocates it where needed.
        context, context_len, prediction, prediction_len, carry, workspace, backend, block_words: as in
            `lcs_length`.

    Returns:
        `out` [B, N + 1] int32; beyond `prediction_len` a row repeats its last value.

    Raises:
        TypeError, ValueError: as `lcs_length`.
    """
    inputs = context, context_len, prediction, prediction_len
    scratch = _begin(*inputs, carry, workspace, block_words, backend)
    out = _output("out", out, [context.shape[0], prediction.shape[1] + 1], context)
    length = _output("length", length, [context.shape[0]], context)
    if scratch is None:
        from .reference import lcs_prefix_row_reference  # late: it brings Numba, where that is installed

        lcs_prefix_row_reference(*inputs, out=out)
        length.copy_(out[:, -1])
        return out
    _launch(*inputs, *scratch, length=length, row=out)
    return out


def _output(
    name: str,
    given: torch.Tensor | None,
    shape: list[int],
    context: torch.Tensor,
) -> torch.Tensor:
    """The tensor that a caller brings, checked, or a new one, on the context's device."""
    if given is None:
        return torch.empty(shape, dtype=torch.int32, device=context.device)
    contiguous: Literal["all", "inner"] = "inner" if len(shape) > 1 else "all"
    return check_tensor(
        name, given, dtype=torch.int32, shape=shape, device=context.device, contiguous=contiguous
    )


def _begin(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    carry: torch.Tensor | None,
    workspace: LcsWorkspace | None,
    block_words: int | None,
    backend: Backend,
) -> tuple[torch.Tensor | None, LcsWorkspace] | None:
    """Check what every operation reads. ``(carry, workspace)``, no carry for one panel; None for the reference."""
    check_tensor("context", context, dtype=torch.int32, shape=[None, None], contiguous="inner")
    (B, M), device, int32 = context.shape, context.device, torch.int32
    check_tensor("context_len", context_len, dtype=int32, shape=[B], device=device)
    check_tensor("prediction", prediction, dtype=int32, shape=[B, None], device=device, contiguous="inner")
    check_tensor("prediction_len", prediction_len, dtype=int32, shape=[B], device=device)
    N = prediction.shape[1]
    words = _choose_block_words(N, block_words)
    is_reference = resolve_backend(backend, context) == "reference"
    if carry is not None:
        check_tensor("carry", carry, dtype=torch.int8, shape=[B, M], device=device)
    if workspace is not None:
        shapes = _workspace_shapes(B, M, N, words)
        for name, tensor, (dtype, shape) in zip(workspace._fields, workspace, shapes, strict=True):
            check_tensor(f"workspace.{name}", tensor, dtype=dtype, shape=shape, device=device)
    if is_reference:
        return None
    if _row_words(N) <= words:
        carry = None
    elif carry is None:
        carry = torch.empty(B, M, dtype=torch.int8, device=device)
    return carry, workspace or lcs_workspace(B, M, N, device=device, block_words=words)


def _launch(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    carry: torch.Tensor | None,
    workspace: LcsWorkspace,
    *,
    length: torch.Tensor,
    row: torch.Tensor | None = None,
) -> None:
    """Launch the kernels: number the tokens, compute the rows."""
    # Imported here: a kernel module reads TRITON_INTERPRET when it is loaded, and the CPU path needs none.
    from .kernel import lcs_code_kernel, lcs_wavefront_kernel

    (B, M), N = context.shape, prediction.shape[1]
    if B == 0:
        return
    # One request a program on a GPU, a whole batch under the interpreter.
    block = 1 if context.is_cuda else min(1 << (B - 1).bit_length(), _INTERPRETER_REQUESTS)
    programs = -(-B // block)
    table, codes, planes = workspace
    num_panels, num_planes, num_words = planes.shape[1:]
    block_tokens = min(1 << num_planes, _MAX_BLOCK_TOKENS)
    # What a caller brings may be at any address, or not be there.
    given = context, context_len, prediction, prediction_len, length, row, carry, *workspace
    variant = tuple(None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in given)
    # A thread has four tokens, so that their searches overlap. 1024 threads are the most: on AMD a warp has 64.
    code_warps = min(max(block_tokens // 128, 1), 16 if torch.version.hip else 32)
    code_args = (
        context, context.stride(0), context_len, prediction, prediction.stride(0), prediction_len,
        table, table.stride(0), codes.view(torch.int16), 4 * codes.stride(0), planes, planes.stride(0), B, M, N,
    )  # fmt: skip
    code_sizes = {"BLOCK_B": block, "BLOCK_T": block_tokens, "PLANES": num_planes}
    launch(lcs_code_kernel, (programs, num_panels), code_args, code_sizes, variant, num_warps=code_warps)
    lanes = num_words // 2
    row_args = (
        codes, codes.stride(0), planes, planes.stride(0), context_len, prediction_len, length,
        row, 0 if row is None else row.stride(0), carry, 0 if carry is None else carry.stride(0), B, M, N, 2,
    )  # fmt: skip
    row_sizes = {"BLOCK_B": block, "BLOCK_W": lanes, "PLANES": num_planes}
    launch(lcs_wavefront_kernel, (programs,), row_args, row_sizes, variant, num_warps=max(lanes // 32, 1))
