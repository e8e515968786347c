"""The recipe packs that `GPU_ALIGN_RECIPES` names: read by the worker, and by the front end for their names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_integration.config.settings import Settings

if TYPE_CHECKING:
    from gpu_align import RecipePack


def load_pack(entry: str, registry: str | None) -> tuple[str, RecipePack]:
    """The name of a pack and the pack. entry: one of `Settings.packs`. registry: the folder of packs, if any.

    Raises whatever keeps the pack from being read: `PackError`, `OSError`.
    """
    from gpu_align.recipes.registry import resolve_packs

    ((name, pack),) = resolve_packs(entry, None if registry is None else Path(registry)).items()
    return name, pack


def known_names(settings: Settings) -> tuple[str, ...] | None:
    """The names that a request may choose from; None where a pack cannot be read here, and its name is not known.

    The first call reads all packs, which may take a second.
    """
    found = packs_of(settings)
    if any(content_hash is None for _, content_hash in found):
        return None
    return tuple(dict.fromkeys(name for name, _ in found))


def packs_of(settings: Settings) -> tuple[tuple[str, str | None], ...]:
    """The name and the content hash of each pack. One that cannot be read here is named as in the settings and has
    no hash. The first call reads all packs, which may take a second."""
    return tuple(_pack(entry, settings.recipe_registry) for entry in settings.packs)


@functools.cache
def _pack(entry: str, registry: str | None) -> tuple[str, str | None]:
    try:
        name, pack = load_pack(entry, registry)
        return name, pack.content_hash
    except Exception:  # the worker tells what is wrong with a pack
        return entry, None
