"""Where a request stands in its prediction, read off the carried LCS row; see README.md here."""

from .launch import Alignment, allocate_alignment, launch_realign, realign
from .reference import MATCH_WEIGHT, realign_reference

__all__ = [
    "MATCH_WEIGHT",
    "Alignment",
    "allocate_alignment",
    "launch_realign",
    "realign",
    "realign_reference",
]
