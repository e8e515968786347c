"""One drafting step of a whole batch: realign, look up, choose, write; see README.md here."""

from .launch import StepLaunch

__all__ = ["StepLaunch"]
