"""Public `realign`: checks, allocation and dispatch."""

from __future__ import annotations

import torch

from .._check import Backend, check_tensor, resolve_backend
from .reference import realign_reference

#: Prediction positions that one program looks at together.
BLOCK_N = 1024


def realign(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Read off a carried LCS row where in its prediction each request stands.

    For every batch position ``b`` with ``s = slots[b]``, ``n = prediction_len[s]`` and ``H[j]`` the LCS of the
    output so far and the first j tokens of the prediction (`gpu_align.ops.lcs.lcs_extend_inplace`)::

        cursor[b] = min(j for j in range(n + 1) if 2 * H[j] - j == max(2 * H[k] - k for k in range(n + 1)))

    ``len(output) + j - 2 * H[j]`` is the number of insertions and deletions that turn the first j tokens into
    the output. So the cursor is the end of the prefix that is nearest to everything generated so far, and of
    equally near ones the shortest: skipped text is not claimed before something in it has matched.

    Args:
        row: [S, W] int32, rows contiguous, ``32 * W >= n``: bit ``j % 32`` of word ``j // 32`` is 0 where
            ``H[j + 1] == H[j] + 1`` and 1 where ``H[j + 1] == H[j]``.
        prediction_len: [S] int32, ``0 <= prediction_len <= 32 * W``.
        slots: [B] int64, ``0 <= slot < S``.
        active: [B] int32 or None: requests where it is 0 are not looked at and get 0.
        out: [B] int32; allocated if None.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors.

    Returns:
        [B] int32 cursor, ``0 <= cursor <= n``: the prediction token that comes next, if the output goes on
        where the alignment stands.

    No sync and, with `out`, no allocation. O(n) a request, n/8 bytes read.

    Example: prediction ``[5, 6, 7, 8, 9]`` and output ``[5, 6, 1, 8]`` give 2: with ``H = [0, 1, 2, 2, 3, 3]`` a
    lone 8 only just makes up for the 7 that was skipped. After ``[5, 6, 1, 8, 9]`` the cursor is 5.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: a shape, device or layout differs from the above.

    Source: indel distance of a text to the prefixes of another (Needleman and Wunsch 1970, without
    substitutions), read from the bit row of Hyyrö (2004).
    """
    check_tensor("row", row, dtype=torch.int32, shape=(None, None), contiguous="inner")
    device = row.device
    check_tensor("prediction_len", prediction_len, dtype=torch.int32, shape=(row.shape[0],), device=device)
    check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=device)
    batch_size = slots.shape[0]
    if active is None:
        active = torch.ones(batch_size, dtype=torch.int32, device=device)
    if out is None:
        out = torch.empty(batch_size, dtype=torch.int32, device=device)
    for name, tensor in (("active", active), ("out", out)):
        check_tensor(name, tensor, dtype=torch.int32, shape=(batch_size,), device=device)
    if resolve_backend(backend, row) == "triton":
        launch_realign(row, prediction_len, slots, active, out)
    else:
        realign_reference(row, prediction_len, slots, active, out)
    return out


def launch_realign(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
) -> None:
    """Launch the kernel; nothing is checked and nothing allocated. Arguments as in `realign`."""
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernels import _realign_kernel

    if slots.shape[0] == 0:
        return
    _realign_kernel[(slots.shape[0],)](
        row, row.stride(0), prediction_len, slots, active, cursor, BLOCK_N=BLOCK_N, num_warps=4
    )
