"""NumPy references of the LCS operations: same arguments as the launchers, CPU tensors, no copies.

Two ways to compute a row:

- The edit script needs the whole table and fills it row by row: H[i] = cummax(max(H[i-1], H[i-1] shifted by
  one + match)).
- Everything else holds a row as one Python integer of n bits, bit j telling whether H[j + 1] == H[j], and
  folds a token in by Hyyrö's formula. Where the kernels have words and carries here is one addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]

KEEP, DELETE, INSERT = 1, 2, 3


def lcs_length_reference(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the LCS length of every request to `out`; see `lcs_length`."""
    lengths = out.numpy()
    for b, (tokens, text) in enumerate(_requests(context, context_len, prediction, prediction_len)):
        lengths[b] = len(text) - _fold(_ones(len(text)), tokens, text).bit_count()
    return out


def lcs_prefix_row_reference(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the prefix row of every request to `out`; see `lcs_prefix_row`."""
    rows = out.numpy()
    for b, (tokens, text) in enumerate(_requests(context, context_len, prediction, prediction_len)):
        n = len(text)
        row = _fold(_ones(n), tokens, text).to_bytes((n + 7) // 8, "little")
        bits = np.unpackbits(np.frombuffer(row, np.uint8), count=n, bitorder="little")
        rows[b] = 0
        rows[b, 1 : n + 1] = bits ^ 1
        np.cumsum(rows[b], out=rows[b])
    return out


def lcs_edit_script_reference(
    context: torch.Tensor,
    context_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    *,
    op: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Write the edit script of every request to `op` and `length`; see `lcs_edit_script`."""
    ops, lengths = op.numpy(), length.numpy()
    for b, (tokens, text) in enumerate(_requests(context, context_len, prediction, prediction_len)):
        script = _walk(_table(tokens, text))
        ops[b] = 0
        ops[b, : len(script)] = script
        lengths[b] = len(script)


def lcs_extend_inplace_reference(
    row: torch.Tensor,
    row_len: torch.Tensor,
    token_ids: torch.Tensor,
    start: torch.Tensor,
    total_len: torch.Tensor,
    prediction: torch.Tensor,
    prediction_len: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Fold the new tokens of every active slot into its carried row; see `lcs_extend_inplace`.

    A folded token costs one comparison with the prediction and five passes over n / 8 bytes.
    """
    rows, done_lens = row.numpy(), row_len.numpy()
    ids, starts, totals = token_ids.numpy(), start.numpy(), total_len.numpy()
    texts, text_lens = prediction.numpy(), prediction_len.numpy()
    for slot, is_active in zip(slots.tolist(), active.tolist(), strict=True):
        if not is_active:
            continue
        first = min(max(int(starts[slot]), 0), ids.shape[1])
        total = min(max(int(totals[slot]), 0), ids.shape[1])
        n = min(max(int(text_lens[slot]), 0), texts.shape[1], rows.shape[1] * 32)
        done = int(done_lens[slot])
        if done > total or done < first:
            rows[slot] = -1
            done = first
        if n and done < total:
            # Little-endian words: bit j % 32 of word j // 32 is bit j of the integer on every machine.
            words = rows[slot, : (n + 31) // 32]
            folded = _fold(
                int.from_bytes(words.astype("<i4").tobytes(), "little") & _ones(n),
                ids[slot, done:total],
                texts[slot, :n],
            )
            past = _ones(len(words) * 32) ^ _ones(n)
            words[:] = np.frombuffer((folded | past).to_bytes(len(words) * 4, "little"), "<i4")
        done_lens[slot] = total


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


def _requests(
    context: torch.Tensor, context_len: torch.Tensor, prediction: torch.Tensor, prediction_len: torch.Tensor
) -> list[tuple[IntArray, IntArray]]:
    """Return (context, prediction) of every request, cut to their lengths (and those to their tensors)."""
    tokens, texts = context.numpy(), prediction.numpy()
    m = context_len.clamp(0, tokens.shape[1]).tolist()
    n = prediction_len.clamp(0, texts.shape[1]).tolist()
    return [(tokens[b, : m[b]], texts[b, : n[b]]) for b in range(len(m))]


def _ones(n: int) -> int:
    """Return the row of n bits before any token."""
    return (1 << n) - 1


def _fold(row: int, tokens: IntArray, text: IntArray) -> int:
    """Return the row of len(text) bits after `tokens` more."""
    found = np.empty(len(text), np.bool_)
    for token in tokens:
        np.equal(text, token, out=found)
        matched = row & int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")
        # row - matched is row & ~matched. What carries past the end stays there: carries only run upwards.
        row = (row + matched) | (row - matched)
    return row & _ones(len(text))


def _table(tokens: IntArray, text: IntArray) -> IntArray:
    """Return H [m + 1, n + 1]: H[i][j] = LCS of the first i tokens and the first j of the text."""
    table = np.zeros((len(tokens) + 1, len(text) + 1), np.int32)
    for i, token in enumerate(tokens):
        best = np.maximum(table[i, 1:], table[i, :-1] + (text == token))
        np.maximum.accumulate(best, out=table[i + 1, 1:])
    return table


def _walk(table: IntArray) -> list[int]:
    """Return the operations in reading order: from the end, DELETE before INSERT before KEEP."""
    i, j = table.shape[0] - 1, table.shape[1] - 1
    script = []
    while i or j:
        if j and table[i, j - 1] == table[i, j]:
            step = DELETE
        elif i and table[i - 1, j] == table[i, j]:
            step = INSERT
        else:
            step = KEEP
        script.append(step)
        i -= step != DELETE
        j -= step != INSERT
    return script[::-1]
