"""The old place of these names, for one release: they are in `ops.layout`."""

from .layout import StepSettings, StepState, allocate_state

__all__ = ["StepSettings", "StepState", "allocate_state"]
