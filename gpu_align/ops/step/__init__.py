"""A whole drafting step as one launch; see README.md here."""

from .launch import Step, StepLaunch, make_step
from .settings import StepSettings

__all__ = ["Step", "StepLaunch", "StepSettings", "make_step"]
