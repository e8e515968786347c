"""Where a text ends like the output: the index of a text, the lookup of a step, and the scan `suffix_match`."""

from .index import build_index
from .launch import SuffixMatch, allocate_suffix_match, launch_suffix_match, suffix_match

__all__ = [
    "SuffixMatch",
    "allocate_suffix_match",
    "build_index",
    "launch_suffix_match",
    "suffix_match",
]
