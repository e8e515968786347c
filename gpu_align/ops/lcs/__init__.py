"""Longest common subsequence, batched: its length, its prefix row, an edit script; and the row of a step."""

from .edit_script import DELETE, INSERT, KEEP, apply_edit_script
from .launch import (
    EditScript,
    lcs_edit_script,
    lcs_length,
    lcs_prefix_row,
)
from .workspace import LcsWorkspace, lcs_row_words, lcs_workspace

__all__ = [
    "DELETE",
    "INSERT",
    "KEEP",
    "EditScript",
    "LcsWorkspace",
    "apply_edit_script",
    "lcs_edit_script",
    "lcs_length",
    "lcs_prefix_row",
    "lcs_row_words",
    "lcs_workspace",
]
