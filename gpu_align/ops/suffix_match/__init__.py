"""The longest suffix of each context that occurs in a text; the maths is in this folder's README.md."""

from .launch import SuffixMatch, allocate_suffix_match, launch_suffix_match, suffix_match
from .reference import suffix_match_reference

__all__ = [
    "SuffixMatch",
    "allocate_suffix_match",
    "launch_suffix_match",
    "suffix_match",
    "suffix_match_reference",
]
