"""Where in its prediction each request stands, read from its LCS row; the maths is in README.md here."""

from .launch import launch_realign, realign
from .reference import realign_reference

__all__ = ["launch_realign", "realign", "realign_reference"]
