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
    return _names(settings.packs, settings.recipe_registry)


@functools.cache
def _names(packs: tuple[str, ...], registry: str | None) -> tuple[str, ...] | None:
    try:
        return tuple(dict.fromkeys(load_pack(entry, registry)[0] for entry in packs))
    except Exception:  # the worker tells what is wrong with a pack
        return None
