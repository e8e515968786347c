"""Recipes: what is likely after a few tokens in any text, looked up in a table; see README.md here."""

from ..constants import MAX_CONTEXT, MAX_TOKENS
from .table import Recipes, RecipeTable

__all__ = ["MAX_CONTEXT", "MAX_TOKENS", "RecipeTable", "Recipes"]
