"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here."""

from .chains import Observed
from .misses import Misses, count_misses
from .pack import PackError, RecipePack
from .report import Report, TaskReport
from .tokenize import fingerprint, shape_of_output, shape_of_tokens
from .words import Recipe

__all__ = [
    "Misses",
    "Observed",
    "PackError",
    "Recipe",
    "RecipePack",
    "Report",
    "TaskReport",
    "count_misses",
    "fingerprint",
    "shape_of_output",
    "shape_of_tokens",
]
