"""Longest common subsequence, batched: its length, its prefix row, an edit script; and the row of a step."""

from gpu_align.ops.lcs.launch import (
    EditScript,
    lcs_edit_script,
    lcs_length,
    lcs_prefix_row,
    lcs_row_words,
)
from gpu_align.ops.lcs.reference import (
    DELETE,
    INSERT,
    KEEP,
    apply_edit_script,
    lcs_edit_script_reference,
    lcs_length_reference,
    lcs_prefix_row_reference,
)

__all__ = [
    "DELETE",
    "INSERT",
    "KEEP",
    "EditScript",
    "apply_edit_script",
    "lcs_edit_script",
    "lcs_edit_script_reference",
    "lcs_length",
    "lcs_length_reference",
    "lcs_prefix_row",
    "lcs_prefix_row_reference",
    "lcs_row_words",
]
