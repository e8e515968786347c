"""One table in device memory for all drafters that look the same recipes up in the same way."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from .table import Recipes, RecipeTable


class SharedRecipeTable:
    """A `RecipeTable` that is not written to. It lives as long as somebody holds this."""

    def __init__(self, table: RecipeTable) -> None:
        self.table = table


_Key = tuple[int, torch.device, float, int]
_tables: WeakKeyDictionary[Recipes, WeakValueDictionary[_Key, SharedRecipeTable]] = WeakKeyDictionary()
_lock = threading.Lock()


def shared_recipe_table(
    recipes: Recipes, num_draft_tokens: int, device: torch.device, min_survival: float, vocab_size: int
) -> SharedRecipeTable:
    """`RecipeTable.build` of these arguments, made once: who asks for the same `recipes` (the object) and equal
    other arguments gets the same tensors."""
    key = num_draft_tokens, device, min_survival, vocab_size
    with _lock:
        tables = _tables.setdefault(recipes, WeakValueDictionary())
        shared = tables.get(key)
        if shared is None:
            shared = SharedRecipeTable(
                RecipeTable.build(recipes, num_draft_tokens, device, min_survival, vocab_size)
            )
            tables[key] = shared
        return shared
