"""Recipe packs for records: which one, and its tables in the tokens of the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...ops.recipe_lookup import Recipes
from ...recipes.pack import RecipePack
from .records import Record
from .tokenizers import load_tokenizer

#: What may stand for a file's name: the pack that comes with the library, or no pack.
SHIPPED_PACK, NO_PACK = "base", "off"


def tokenizer_of(records: Sequence[Record]) -> str | None:
    """The tokenizer that all of `records` name, None where one names another or none."""
    names = {record.tokenizer for record in records}
    return names.pop() if len(names) == 1 else None


def recipes_for(records: Sequence[Record], pack: str = SHIPPED_PACK) -> Recipes | None:
    """The recipes of a pack in the records' tokens; None where their tokenizer is not known.

    A pack is tokenized once for each tokenizer, which takes a few seconds.

    Args:
        records: what is to be drafted.
        pack: a file of `RecipePack.save`, ``"base"``: the one that comes with the library, or ``"off"``.

    Raises:
        PackError: the file is not a pack.
        OSError: the file cannot be read.
        ValueError: the tokenizer cannot be loaded.
    """
    name = tokenizer_of(records)
    return None if name is None or pack == NO_PACK else _tokenized(pack, name)


@lru_cache(maxsize=8)
def _tokenized(pack: str, tokenizer: str) -> Recipes:
    encode = load_tokenizer(tokenizer).encode
    loaded = RecipePack.load(None if pack == SHIPPED_PACK else pack)
    return loaded.tokenize(lambda texts: [encode(text) for text in texts])
