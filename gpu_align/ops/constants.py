"""The numbers of a step by name: columns and sizes of the layout, and those at the head of each operation."""

from __future__ import annotations

from typing import Any

from . import align, choose, compose, layout, match, recipes


def numbers() -> dict[str, Any]:
    """As they are now: a caller may have set other values than the files have."""
    owners = layout, align, match, choose, compose, recipes
    return {name: value for owner in owners for name, value in vars(owner).items() if name.isupper()}
