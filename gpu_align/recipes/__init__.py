"""Recipe packs: continuations that are likely in any text of a kind; see README.md here."""

from .pack import PackError, RecipePack
from .words import Recipe

__all__ = ["PackError", "Recipe", "RecipePack"]
