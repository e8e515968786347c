"""Where a request stands in its prediction: followed, left and found again; see README.md here."""

from .reference import realign_reference, standing, start_over

__all__ = ["realign_reference", "standing", "start_over"]
