"""A whole drafting step as one launch; see README.md here."""

from .launch import Step, StepLaunch, StepSettings, make_step

__all__ = ["Step", "StepLaunch", "StepSettings", "make_step"]
