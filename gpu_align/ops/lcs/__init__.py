"""The exact LCS of contexts and predictions: lengths and rows. README.md says how it is computed."""

from __future__ import annotations

import torch

from ..backend import Backend, check_tensor, launch, resolve_backend
from ..errors import check_int
from .reference import Batch, lcs_reference

#: Words (of 32 tokens) of a panel, two a lane: what a program holds at once. Wider predictions go through in
#: several panels. With more words a code would need more than the 15 bits that it has beside its sign.
_MIN_BLOCK_WORDS, _MAX_BLOCK_WORDS = 4, 512
#: Tokens of a row: what offsets of 32 bits within one reach.
_MAX_TOKENS = 1 << 30
#: Tokens that a program of lcs_code_kernel looks up at once.
_MAX_BLOCK_TOKENS = 4096
#: The interpreter pays by the operation, not by its width: requests that share a program there.
_INTERPRETER_REQUESTS = 64


def lcs_length(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
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
        backend: "auto" is Triton on CUDA tensors and the NumPy reference on CPU tensors; same bits.

    Returns:
        `out` [B] int32, 0 ≤ out ≤ min(m, n). Nothing waits for the device.

    TypeError: an argument is no tensor, or has another dtype. ValueError: another shape, device or layout, rows of
    more than 2**30 tokens, or an unknown backend.

    Cost: m · ceil(n / 32) word steps, of which a program runs up to 512 side by side, after m + n look-ups in a
    hash table; they take longer where many different tokens fall into neighbouring slots. Scratch on the device:
    about 10 · N + 2 · M bytes a request, N rounded up to a power of two, and above 16,384 to a multiple of that,
    with 2 · M bytes more for each.
    Source: Hyyrö, "Bit-parallel LCS-length computation revisited" (2004).
    """
    return _lcs((context, context_len, prediction, prediction_len), out, backend, wants_row=False)


def lcs_prefix_row(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """LCS of every context with every prefix of its prediction: the last row of the table in `lcs_length`.

    for j in range(N + 1):
        out[b][j] = lcs(context, prediction[:min(j, prediction_len)])

    It rises by 0 or 1 a position: where it rises, the prediction token is one that an alignment uses first.
    Example: context [7, 5, 9], prediction [7, 8, 9] give [0, 1, 1, 2].

    Args:
        out: [B, N + 1] int32, overwritten; rows may be strided; None allocates it.
        context, context_len, prediction, prediction_len, backend: as in `lcs_length`.

    Returns:
        `out` [B, N + 1] int32; beyond `prediction_len` a row repeats its last value. It raises as `lcs_length`.
    """
    return _lcs((context, context_len, prediction, prediction_len), out, backend, wants_row=True)


def _lcs(batch: Batch, out: torch.Tensor | None, backend: Backend, wants_row: bool) -> torch.Tensor:
    """Check the arguments, and write lengths or rows to `out`."""
    context, context_len, prediction, prediction_len = batch
    check_tensor("context", context, dtype=torch.int32, shape=[None, None])
    B, device, int32 = context.shape[0], context.device, torch.int32
    check_tensor("context_len", context_len, dtype=int32, shape=[B], device=device)
    check_tensor("prediction", prediction, dtype=int32, shape=[B, None], device=device)
    check_tensor("prediction_len", prediction_len, dtype=int32, shape=[B], device=device)
    for name, tokens in (("context", context), ("prediction", prediction)):
        check_int(f"{name}.shape[1]", tokens.shape[1], 0, _MAX_TOKENS)
    run = lcs_reference if resolve_backend(backend, context) == "reference" else _launch
    shape = [B, prediction.shape[1] + 1] if wants_row else [B]
    out = torch.empty(shape, dtype=int32, device=device) if out is None else out
    check_tensor("out", out, dtype=int32, shape=shape, device=device)
    length, row = (torch.empty_like(context_len), out) if wants_row else (out, None)
    run(batch, length, row)
    return out


def _launch(batch: Batch, length: torch.Tensor, row: torch.Tensor | None) -> None:
    """Launch the kernels: number the tokens, compute the rows."""
    # Imported here: a kernel module reads TRITON_INTERPRET when it is loaded, and the CPU path needs none.
    from .kernel import lcs_code_kernel, lcs_wavefront_kernel

    context, context_len, prediction, prediction_len = batch
    (B, M), N = context.shape, prediction.shape[1]
    if B == 0:
        return
    # Words of a panel: enough for the widest prediction, within what registers hold.
    num_words = min(1 << (max(-(-N // 32), _MIN_BLOCK_WORDS) - 1).bit_length(), _MAX_BLOCK_WORDS)
    num_panels, num_planes = max(-(-N // (32 * num_words)), 1), (32 * num_words - 1).bit_length()

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=context.device)

    # A hash table of the tokens of a panel, the numbers of the context's tokens, four in each, and those of the
    # panel's tokens, bit by bit.
    table = scratch(torch.int32, B, num_panels, 2 * 32 * num_words)
    codes = scratch(torch.int64, B, num_panels, -(-M // 4))
    planes = scratch(torch.int32, B, num_panels, num_planes, num_words)
    carry = scratch(torch.int8, B, M) if num_panels > 1 else None
    # One request a program on a GPU, a whole batch under the interpreter.
    block = 1 if context.is_cuda else min(1 << (B - 1).bit_length(), _INTERPRETER_REQUESTS)
    programs = -(-B // block)
    block_tokens = min(1 << num_planes, _MAX_BLOCK_TOKENS)
    # What a caller brings may be at any address, or not be there.
    given = *batch, length, row, carry, table, codes, planes
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
