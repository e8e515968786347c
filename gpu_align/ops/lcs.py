"""Edit scripts as `lcs_edit_script` writes them, and how to apply one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from .backend import Backend, check_tensor, resolve_backend
from .constants import DELETE, INSERT, KEEP


def apply_edit_script(ops: Sequence[int], prediction: Sequence[int], context: Sequence[int]) -> list[int]:
    """Turn `prediction` into the target by `ops`, taking the inserted tokens from `context`.

    >>> apply_edit_script([1, 2, 3, 1, 0, 0], [7, 8, 9], [7, 5, 9])
    [7, 5, 9]

    Args:
        ops: KEEP=1, DELETE=2, INSERT=3 in reading order; ends at the first 0.
        prediction: Tokens that KEEP copies and DELETE skips.
        context: Tokens that INSERT takes; KEEP passes over one, too.

    Raises:
        ValueError: an operation outside the domain, one that runs past the end of its tokens, or tokens of
            the prediction that are left over.
    """
    target: list[int] = []
    i = j = 0
    for position, op in enumerate(ops):
        if op == 0:
            break
        if op not in (KEEP, DELETE, INSERT):
            raise ValueError(f"ops[{position}]: expected 0, 1, 2 or 3, found {op}")
        if op != INSERT and j >= len(prediction):
            raise ValueError(
                f"ops[{position}]: expected at most {len(prediction)} KEEP and DELETE, found more"
            )
        if op != DELETE and i >= len(context):
            raise ValueError(f"ops[{position}]: expected at most {len(context)} KEEP and INSERT, found more")
        if op != DELETE:
            target.append(int(prediction[j]) if op == KEEP else int(context[i]))
            i += 1
        if op != INSERT:
            j += 1
    if j != len(prediction):
        raise ValueError(f"ops: expected KEEP and DELETE for all {len(prediction)} tokens, found {j}")
    return target


# Words of a panel, two a lane: what a program holds at once. Wider predictions go through in several panels. With
# more words a code would need more than the 15 bits that it has beside its sign.
_MAX_BLOCK_WORDS = 512
_MIN_BLOCK_WORDS = 4


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
    words = choose_block_words(32 * lcs_row_words(max_prediction_len), block_words)
    shapes = workspace_shapes(batch, max_context_len, max_prediction_len, words)
    return LcsWorkspace(*(torch.empty(s, dtype=dtype, device=device) for dtype, s in shapes.values()))


def lcs_row_words(max_prediction_len: int) -> int:
    """Return how many int32 words a carried row of `max_prediction_len` tokens takes: ceil(len / 32).

    Raises:
        ValueError: a negative length.
    """
    if max_prediction_len < 0:
        raise ValueError(f"max_prediction_len: expected 0 or more, found {max_prediction_len}")
    return (max_prediction_len + 31) // 32


def workspace_shapes(B: int, M: int, N: int, block_words: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of every tensor of an `LcsWorkspace`."""
    panels = max(triton.cdiv(lcs_row_words(N), block_words), 1)
    return {
        "table": (torch.int32, [B, panels, 2 * 32 * block_words]),
        "codes": (torch.int64, [B, panels, triton.cdiv(M, 4)]),
        "planes": (torch.int32, [B, panels, (32 * block_words - 1).bit_length(), block_words]),
    }


def choose_block_words(prediction_len: int, block_words: int | None) -> int:
    """Return the words of a panel, two a lane: enough for the widest prediction, within what registers hold."""
    if block_words is None:
        words = max((prediction_len + 31) // 32, _MIN_BLOCK_WORDS)
        return min(1 << (words - 1).bit_length(), _MAX_BLOCK_WORDS)
    if not 1 <= block_words <= _MAX_BLOCK_WORDS or block_words & (block_words - 1):
        raise ValueError(
            f"block_words: expected a power of two up to {_MAX_BLOCK_WORDS}, found {block_words}"
        )
    return max(block_words, 2)


# Tokens that a program of lcs_code_kernel looks up at once.
_MAX_BLOCK_TOKENS = 4096
# The interpreter pays by the operation, not by its width.
_INTERPRETER_REQUESTS = 64


class EditScript(NamedTuple):
    """Edit scripts of a batch: how each prediction becomes its context.

    `op` [B, M + N] int8 in reading order: KEEP=1 (next token of both), DELETE=2 (skip the next prediction
    token), INSERT=3 (take the next context token), 0 from `length` on. `length` [B] int32.
    """

    op: torch.Tensor
    length: torch.Tensor


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
        carry: [B, M] int8, scratch of predictions wider than one panel; None allocates it where needed. The
            contents before and after mean nothing.
        workspace: scratch from `lcs_workspace` for these shapes; None allocates it. The reference uses neither.
        backend: "auto" is Triton on CUDA tensors and the NumPy reference on CPU tensors; same bits.
        block_words: Words (of 32 prediction tokens) a program holds at once, a power of two; for tuning. 1 is
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
    call = _begin(context, context_len, prediction, prediction_len, carry, workspace, block_words, backend)
    if out is None:
        out = torch.empty(call.B, dtype=torch.int32, device=context.device)
    check_tensor("out", out, dtype=torch.int32, shape=[call.B], device=context.device)
    if call.workspace is None:
        from .reference.lcs import lcs_length_reference  # late: it brings Numba, where that is installed

        return lcs_length_reference(*call.inputs, out=out)
    _launch_wavefront(call, length=out)
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
        context, context_len, prediction, prediction_len: as in `lcs_length`.
        carry, workspace, backend, block_words: as in `lcs_length`.

    Returns:
        `out` [B, N + 1] int32; beyond `prediction_len` a row repeats its last value.

    Raises:
        TypeError, ValueError: as `lcs_length`.
    """
    call = _begin(context, context_len, prediction, prediction_len, carry, workspace, block_words, backend)
    B, N = call.B, call.N
    if out is None:
        out = torch.empty(B, N + 1, dtype=torch.int32, device=context.device)
    if length is None:
        length = torch.empty(B, dtype=torch.int32, device=context.device)
    check_tensor("out", out, dtype=torch.int32, shape=[B, N + 1], device=context.device, contiguous="inner")
    check_tensor("length", length, dtype=torch.int32, shape=[B], device=context.device)
    if call.workspace is None:
        from .reference.lcs import lcs_prefix_row_reference  # late: it brings Numba, where that is installed

        lcs_prefix_row_reference(*call.inputs, out=out)
        length.copy_(out[:, -1])
        return out
    _launch_wavefront(call, length=length, row=out)
    return out


def lcs_edit_script(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: EditScript | None = None,
    history: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    workspace: LcsWorkspace | None = None,
    backend: Backend = "auto",
    block_words: int | None = None,
) -> EditScript:
    """Shortest edit script (no substitutions) that turns every prediction into its context.

    i, j = m, n                                       # H as in lcs_length
    while i or j:
        if j and H[i][j - 1] == H[i][j]:    step = DELETE
        elif i and H[i - 1][j] == H[i][j]:  step = INSERT
        else:                               step = KEEP
        script.prepend(step); i -= step != DELETE; j -= step != INSERT

    Example: context [7, 5, 9], prediction [7, 8, 9] give [KEEP, INSERT, DELETE, KEEP]: read from the end
    DELETE goes before INSERT, so in reading order insertions stand before the deletions of the same gap.

    Args:
        out: an `EditScript` to overwrite; rows of `op` may be strided; None allocates it.
        history: [B, M, lcs_row_words(N)] int32, scratch: the row after every token; None allocates it.
            This is the memory of the operation: B · M · N / 8 bytes. The reference does not use it.
        context, context_len, prediction, prediction_len: as in `lcs_length`.
        carry, workspace, backend, block_words: as in `lcs_length`.

    Returns:
        `EditScript`; `length` is m + n − lcs: lcs KEEP, n − lcs DELETE, m − lcs INSERT. `apply_edit_script`
        applies one.

    Raises:
        TypeError, ValueError: as `lcs_length`.

    Cost: that of `lcs_length`, then m + n − lcs dependent steps in one thread a request.
    """
    call = _begin(context, context_len, prediction, prediction_len, carry, workspace, block_words, backend)
    (B, M, N), device, int32 = (call.B, call.M, call.N), context.device, torch.int32
    if out is None:
        out = EditScript(
            torch.empty(B, M + N, dtype=torch.int8, device=device), torch.empty(B, dtype=int32, device=device)
        )
    check_tensor("out.op", out.op, dtype=torch.int8, shape=[B, M + N], device=device, contiguous="inner")
    check_tensor("out.length", out.length, dtype=int32, shape=[B], device=device)
    shape = [B, M, lcs_row_words(N)]
    if history is not None:
        check_tensor("history", history, dtype=int32, shape=shape, device=device)
    if call.workspace is None:
        from .reference.lcs import lcs_edit_script_reference  # late: it brings Numba, where that is installed

        lcs_edit_script_reference(*call.inputs, op=out.op, length=out.length)
        return out
    if history is None:
        history = torch.empty(shape, dtype=int32, device=device)
    _launch_wavefront(call, length=out.length, history=history)
    _launch_walk(history, context_len, prediction_len, op=out.op, length=out.length)
    return out


class _Call(NamedTuple):
    """What all operations begin with, checked. workspace: None for the reference. carry: None for one panel."""

    B: int
    M: int
    N: int
    #: context, context_len, prediction, prediction_len.
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    carry: torch.Tensor | None
    workspace: LcsWorkspace | None


def _begin(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    carry: torch.Tensor | None,
    workspace: LcsWorkspace | None,
    block_words: int | None,
    backend: Backend,
) -> _Call:
    """Check what every operation reads, and check or allocate its scratch.

    The reference needs no scratch; what it is given is checked all the same.
    """
    check_tensor("context", context, dtype=torch.int32, shape=[None, None], contiguous="inner")
    (B, M), device, int32 = context.shape, context.device, torch.int32
    check_tensor("context_len", context_len, dtype=int32, shape=[B], device=device)
    check_tensor("prediction", prediction, dtype=int32, shape=[B, None], device=device, contiguous="inner")
    check_tensor("prediction_len", prediction_len, dtype=int32, shape=[B], device=device)
    N = prediction.shape[1]
    words = choose_block_words(N, block_words)
    is_reference = resolve_backend(backend, context) == "reference"
    if carry is not None:
        check_tensor("carry", carry, dtype=torch.int8, shape=[B, M], device=device)
    for name, (dtype, shape) in workspace_shapes(B, M, N, words).items() if workspace else ():
        check_tensor(f"workspace.{name}", getattr(workspace, name), dtype=dtype, shape=shape, device=device)
    inputs = context, context_len, prediction, prediction_len
    if is_reference:
        return _Call(B, M, N, inputs, None, None)
    if lcs_row_words(N) <= words:
        carry = None
    elif carry is None:
        carry = torch.empty(B, M, dtype=torch.int8, device=device)
    workspace = workspace or lcs_workspace(B, M, N, device=device, block_words=words)
    return _Call(B, M, N, inputs, carry, workspace)


def _launch_wavefront(
    call: _Call, *, length: torch.Tensor, row: torch.Tensor | None = None, history: torch.Tensor | None = None
) -> None:
    """Launch `lcs_code_kernel` and `lcs_wavefront_kernel`."""
    # Imported here: a kernel module reads TRITON_INTERPRET when it is loaded, and the CPU path needs none.
    from .kernels.lcs import lcs_code_kernel, lcs_wavefront_kernel

    B, M, N, (context, context_len, prediction, prediction_len), carry, workspace = call
    if B == 0 or workspace is None:
        return
    block_requests = _block_requests(B, context)
    table, codes, planes = workspace
    num_panels, num_planes, num_words = planes.shape[1:]
    block_tokens = min(1 << num_planes, _MAX_BLOCK_TOKENS)
    lcs_code_kernel[(triton.cdiv(B, block_requests), num_panels)](
        context, context.stride(0), context_len, prediction, prediction.stride(0), prediction_len,
        table, table.stride(0), codes.view(torch.int16), 4 * codes.stride(0), planes, planes.stride(0), B, M, N,
        BLOCK_B=block_requests, BLOCK_T=block_tokens, PLANES=num_planes, num_warps=_code_warps(block_tokens),
    )  # fmt: skip
    lanes = num_words // 2
    lcs_wavefront_kernel[(triton.cdiv(B, block_requests),)](
        codes, codes.stride(0), planes, planes.stride(0), context_len, prediction_len, length,
        row, 0 if row is None else row.stride(0),
        history, *((0, 0) if history is None else history.stride()[:2]),
        carry, 0 if carry is None else carry.stride(0), B, M, N, 2,
        BLOCK_B=block_requests, BLOCK_W=lanes, PLANES=num_planes, num_warps=max(lanes // 32, 1),
    )  # fmt: skip


def _launch_walk(
    history: torch.Tensor,
    context_len: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    op: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Launch `lcs_walk_kernel` on what the wavefront left in `history` and `length`."""
    from .kernels.lcs import lcs_walk_kernel

    B, M = history.shape[:2]
    block_requests = _block_requests(B, history)
    if B:
        lcs_walk_kernel[(triton.cdiv(B, block_requests),)](
            history, history.stride(0), history.stride(1), context_len, prediction_len, length,
            op, op.stride(0), B, M, op.shape[1] - M,
            BLOCK_B=block_requests, BLOCK_O=256, num_warps=1,  # one thread walks
        )  # fmt: skip


def _block_requests(B: int, t: torch.Tensor) -> int:
    """Return how many requests share a program: one on a GPU, a whole batch under the interpreter."""
    return 1 if t.device.type == "cuda" else min(triton.next_power_of_2(max(B, 1)), _INTERPRETER_REQUESTS)


def _code_warps(block_tokens: int) -> int:
    """Return the warps of `lcs_code_kernel`: a thread has four tokens, so that their searches overlap.

    1024 threads are the most: on AMD a warp has 64.
    """
    return min(max(block_tokens // 128, 1), 16 if torch.version.hip else 32)
