"""Edit scripts as `lcs_edit_script` writes them, and how to apply one."""

from __future__ import annotations

from collections.abc import Sequence

KEEP, DELETE, INSERT = 1, 2, 3


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
