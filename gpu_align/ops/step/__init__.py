"""One drafting step of a whole batch: realign, look up, choose, write; see README.md here."""

from .launch import launch_step

__all__ = ["launch_step"]
