"""Recipes: what is likely after a few tokens in any text, looked up in a table; see README.md here."""

from .table import MAX_CONTEXT, MAX_TOKENS, Recipes, RecipeTable

__all__ = ["MAX_CONTEXT", "MAX_TOKENS", "RecipeTable", "Recipes"]
