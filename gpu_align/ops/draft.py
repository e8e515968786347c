"""The old place of these names, for one release: they are in `ops.layout` and `ops.choose.survival`."""

from .choose.survival import SurvivalTables
from .layout import Draft, Source, allocate_draft

__all__ = ["Draft", "Source", "SurvivalTables", "allocate_draft"]
