"""Recipes for the served model: a pack in the tokens of its tokenizer, made once, when a worker starts.

Where they cannot be made, the server starts without them: drafts then come from predictions and contexts alone.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu_align import RecipePack, Recipes
from vllm_integration.config.settings import NO_RECIPES, SHIPPED_RECIPES, Settings
from vllm_integration.seams.install import install
from vllm_integration.seams.log_text import shown_error

logger = logging.getLogger("vllm.gpu_align")

#: No token has this id.
_NO_TOKEN = -2


def load_recipes(settings: Settings, vllm_config: Any) -> Recipes | None:
    """The recipes of this worker's drafter; None where `GPU_ALIGN_RECIPES` turns them off, and where they cannot
    be made: then one WARNING says why.

    Each tensor-parallel rank verifies its own drafts, so all ranks must draft the same: the first one makes the
    recipes and sends them, or None, to the others. Every rank of the group must call this.
    Raises `SeamError` when a vLLM seam is missing and `GPU_ALIGN_STRICT=1`.
    """
    if settings.recipes == NO_RECIPES:
        return None
    if reason := install("recipes"):
        _go_without(settings, reason)
        return None
    parallel = vllm_config.parallel_config
    if int(parallel.prefill_context_parallel_size) > 1:  # its ranks must agree too, and are in another group
        _go_without(settings, "not with prefill context parallelism")
        return None
    if int(parallel.tensor_parallel_size) == 1:
        return _make(settings, vllm_config.model_config)
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.rank_in_group == 0:
        made: Recipes | None = group.broadcast_object(_make(settings, vllm_config.model_config), src=0)
        return made
    sent = group.broadcast_object(None, src=0)
    # The received arrays may be read-only, which PyTorch warns about.
    return None if sent is None else Recipes(sent.context.copy(), sent.token_ids.copy(), sent.survival.copy())


def _make(settings: Settings, model_config: Any) -> Recipes | None:
    started = time.perf_counter()
    if model_config.skip_tokenizer_init:
        _go_without(settings, "the engine has no tokenizer")
        return None
    try:
        pack = RecipePack.load(None if settings.recipes == SHIPPED_RECIPES else Path(settings.recipes))
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config)
        recipes = in_tokens(pack, tokenizer, int(model_config.get_vocab_size()))
    except Exception as error:  # a tokenizer may bring code of its own
        _go_without(settings, shown_error(error))
        return None
    if not len(recipes):
        _go_without(
            settings, "this tokenizer cuts texts at other places than words, or does not know the words"
        )
        return None
    logger.info(
        "gpu_align drafts from %d recipes (GPU_ALIGN_RECIPES=%s), made in %.1f s",
        len(recipes),
        settings.recipes,
        time.perf_counter() - started,
    )
    return recipes


def in_tokens(pack: RecipePack, tokenizer: Any, vocab_size: int) -> Recipes:
    """The pack in the tokens of a vLLM tokenizer.

    Texts are encoded one by one: every tokenizer of vLLM can do that, and for short texts it is as fast as a
    batch. Recipes are left out that need a token the model does not have, ``id >= vocab_size``, or the
    tokenizer's unknown token.
    """
    recipes = pack.tokenize(
        lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    )
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = np.concatenate([recipes.context, recipes.token_ids], axis=1)
    wrong = (ids >= vocab_size) | (ids == (_NO_TOKEN if unknown is None else int(unknown)))
    kept = ~wrong.any(axis=1)
    return Recipes(recipes.context[kept], recipes.token_ids[kept], recipes.survival[kept])


def _go_without(settings: Settings, reason: str) -> None:
    logger.warning("gpu_align drafts without recipes (GPU_ALIGN_RECIPES=%s): %s", settings.recipes, reason)
