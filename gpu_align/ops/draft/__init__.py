"""One continuation a request, chosen among the candidates and written as draft tokens; see README.md here."""

from ..constants import MAX_MATCH, NUM_CLASSES, SURVIVAL_ONE
from .result import Draft, Source, allocate_draft, length_quarters
from .tables import SurvivalTables, survival_units

__all__ = [
    "MAX_MATCH",
    "NUM_CLASSES",
    "SURVIVAL_ONE",
    "Draft",
    "Source",
    "SurvivalTables",
    "allocate_draft",
    "length_quarters",
    "survival_units",
]
