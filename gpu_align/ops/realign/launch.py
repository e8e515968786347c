"""Public `realign`: checks, allocation and dispatch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._check import Backend, check_tensor, resolve_backend
from .reference import realign_reference

#: Prediction positions that one program looks at together.
BLOCK_N = 1024


class Alignment(NamedTuple):
    """Where each request stands in its prediction, and how well it has followed it."""

    #: [B] int32, ``0 <= cursor <= prediction_len``: the prediction token that comes next, if the output goes on
    #: where the alignment stands.
    cursor: torch.Tensor
    #: [B] int32, ``0 <= followed <= len(output)``: tokens of the output that followed the prediction, less those
    #: of the prediction that were skipped for it.
    followed: torch.Tensor


def allocate_alignment(batch_size: int, device: torch.device | str) -> Alignment:
    """Output tensors for `realign` with this batch size."""
    return Alignment(*(torch.zeros(batch_size, dtype=torch.int32, device=device) for _ in range(2)))


def realign(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    out: Alignment | None = None,
    backend: Backend = "auto",
) -> Alignment:
    """Read off a carried LCS row where in its prediction each request stands.

    For every batch position ``b`` with ``s = slots[b]``, ``n = prediction_len[s]`` and ``H[j]`` the LCS of the
    output so far and the first j tokens of the prediction (`gpu_align.ops.lcs.lcs_extend_inplace`)::

        score       = [4 * H[j] - j for j in range(n + 1)]
        cursor[b]   = score.index(max(score))                  # the smallest j of the largest score
        followed[b] = max(2 * H[j] - j for j in range(n + 1))

    A matching token is worth skipping up to three tokens of the prediction (4 is `MATCH_WEIGHT`); skipped text
    is not claimed before something behind it has matched. ``len(output) - followed`` is the smallest number of
    insertions and deletions that turn some prefix of the prediction into the output.

    Args:
        row: [S, W] int32, rows contiguous, ``32 * W >= n``: bit ``j % 32`` of word ``j // 32`` is 0 where
            ``H[j + 1] == H[j] + 1`` and 1 where ``H[j + 1] == H[j]``.
        prediction_len: [S] int32, ``0 <= prediction_len <= 32 * W``.
        slots: [B] int64, ``0 <= slot < S``.
        active: [B] int32 or None: requests where it is 0 are not looked at and get 0.
        out: where to write, from `allocate_alignment`; allocated if None.
        backend: "auto" runs the kernel on CUDA tensors and the reference on CPU tensors.

    Returns:
        `Alignment` with ``cursor`` and ``followed``, both [B] int32.

    No sync and, with `out`, no allocation. O(n) a request, n/8 bytes read.

    Example: prediction ``[5, 6, 7, 8, 9]``, output ``[5, 6, 1]``: ``H = [0, 1, 2, 2, 2, 2]``, the cursor is 2 and
    2 tokens are followed. After ``[5, 6, 1, 9]`` the last token alone makes up for the skipped 7 and 8: the
    cursor is 5, still 2 followed.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: a shape, device or layout differs from the above.

    Source: alignment of a text to the prefixes of another (Needleman and Wunsch 1970, without substitutions and
    with free insertions), read from the bit row of Hyyrö (2004). The weight was chosen on the tuning corpus.
    """
    check_tensor("row", row, dtype=torch.int32, shape=(None, None), contiguous="inner")
    device = row.device
    check_tensor("prediction_len", prediction_len, dtype=torch.int32, shape=(row.shape[0],), device=device)
    check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=device)
    batch_size = slots.shape[0]
    if active is None:
        active = torch.ones(batch_size, dtype=torch.int32, device=device)
    if out is None:
        out = allocate_alignment(batch_size, device)
    for name, tensor in (("active", active), ("out.cursor", out.cursor), ("out.followed", out.followed)):
        check_tensor(name, tensor, dtype=torch.int32, shape=(batch_size,), device=device)
    if resolve_backend(backend, row) == "triton":
        launch_realign(row, prediction_len, slots, active, *out)
    else:
        realign_reference(row, prediction_len, slots, active, *out)
    return out


def launch_realign(
    row: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
    cursor: torch.Tensor,
    followed: torch.Tensor,
) -> None:
    """Launch the kernel; nothing is checked and nothing allocated. Arguments as in `realign`."""
    # Imported here: a kernel module reads TRITON_INTERPRET once, when it is loaded.
    from .kernels import _realign_kernel

    if slots.shape[0] == 0:
        return
    _realign_kernel[(slots.shape[0],)](
        row, row.stride(0), prediction_len, slots, active, cursor, followed, BLOCK_N=BLOCK_N, num_warps=4
    )
