"""Recipe packs for records: which one, and its tables in the tokens of the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from gpu_align.simulate.records import Record
from gpu_align.simulate.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from gpu_align.ops.recipe_lookup import Recipes

#: Instead of a file's name: the pack that comes with the library, and none at all.
SHIPPED_PACK, NO_PACK = "base", "off"


def tokenizer_of(records: Sequence[Record]) -> str | None:
    """The tokenizer that all of `records` name, None where one names another or none."""
    names = {record.tokenizer for record in records}
    return names.pop() if len(names) == 1 else None


def recipes_for(records: Sequence[Record], pack: str = SHIPPED_PACK) -> Recipes | None:
    """The recipes of a pack in the records' tokens; None where their tokenizer is not known.

    A pack is tokenized once for a tokenizer, in a few seconds, and kept.

    Args:
        records: what is to be drafted.
        pack: a file of `RecipePack.save`, ``"base"``: the one that comes with the library, or ``"off"``.

    Raises:
        PackError: the file is no pack.
        OSError: it cannot be read.
        ValueError: the tokenizer cannot be loaded.
    """
    name = tokenizer_of(records)
    return None if name is None or pack == NO_PACK else _tokenized(pack, name)


@lru_cache(maxsize=8)
def _tokenized(pack: str, tokenizer: str) -> Recipes:
    # Imported here: the other policies run without torch.
    from gpu_align.recipes import RecipePack

    encode = load_tokenizer(tokenizer).encode
    loaded = RecipePack.load(None if pack == SHIPPED_PACK else pack)
    return loaded.tokenize(lambda texts: [encode(text) for text in texts])
