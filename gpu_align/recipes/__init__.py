"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here."""

from .pack import Misses, PackError, RecipePack, count_misses
from .tokenize import Observed, Recipe, fingerprint, shape_of_output, shape_of_tokens

__all__ = [
    "Misses",
    "Observed",
    "PackError",
    "Recipe",
    "RecipePack",
    "count_misses",
    "fingerprint",
    "shape_of_output",
    "shape_of_tokens",
]
