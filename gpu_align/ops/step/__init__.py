"""One drafting step of a whole batch: realign, look up, choose, write; see README.md here."""

from .launch import launch_step
from .reference import step_reference

__all__ = ["launch_step", "step_reference"]
