"""One continuation a request, chosen among the candidates and written as draft tokens; see README.md here."""

from .launch import Draft, Source, allocate_draft, draft, launch_draft, length_quarters
from .reference import draft_reference
from .tables import MAX_MATCH, NUM_CLASSES, SURVIVAL_ONE, SurvivalTables, survival_units

__all__ = [
    "MAX_MATCH",
    "NUM_CLASSES",
    "SURVIVAL_ONE",
    "Draft",
    "Source",
    "SurvivalTables",
    "allocate_draft",
    "draft",
    "draft_reference",
    "launch_draft",
    "length_quarters",
    "survival_units",
]
