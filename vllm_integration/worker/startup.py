"""A worker's start: its drafter's settings, its recipes, and compilation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_align import DrafterConfig, RecipePack, Recipes
from gpu_align.recipes import PackError
from gpu_align.recipes.registry import find_pack
from gpu_align.recipes.tokenize import Encode

from ..config.settings import SHOWN_HASH, Settings
from ..seams.guard import logger, shown_error, shown_reason
from ..seams.install import install


@functools.cache
def drafter_config(survival_table: str | None, min_match: int = 1) -> DrafterConfig:
    """With this file's survival table; with the shipped one if it is missing or, with one WARNING a process,
    where it cannot be used. min_match: of both prediction and context."""
    try:
        config = DrafterConfig() if survival_table is None else DrafterConfig.tuned(survival_table)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else shown_error(error)
        told = "gpu_align drafts with the survival table that comes with it (GPU_ALIGN_SURVIVAL_TABLE=%r): %s"
        logger.warning(told, survival_table, reason)
        config = DrafterConfig()
    return replace(config, min_match=min_match)


def load_recipes(settings: Settings, vllm_config: Any) -> Recipes | None:
    """The recipes of all packs; None where they are off or, with a WARNING a pack, none can be made. All
    tensor-parallel ranks must call this: the first one sends what it makes, so that they draft the same."""
    if not settings.packs or install("recipes"):
        return None
    parallel = vllm_config.parallel_config
    if int(parallel.prefill_context_parallel_size) > 1:  # its ranks must agree too, and are in another group
        _go_without(settings.recipes, "not with prefill context parallelism")
        return None
    if int(parallel.tensor_parallel_size) == 1:
        return _make(settings, vllm_config.model_config)
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    made = _make(settings, vllm_config.model_config) if logs_here(vllm_config) else None
    sent: Recipes | None = group.broadcast_object(made, src=0)
    if sent is None:
        return None
    # The received arrays may be read-only, which PyTorch warns about.
    arrays: dict[str, Any] = {
        name: value.copy() for name, value in vars(sent).items() if isinstance(value, np.ndarray)
    }
    return replace(sent, **arrays)


def _make(settings: Settings, model_config: Any) -> Recipes | None:
    started = time.perf_counter()
    if model_config.skip_tokenizer_init:
        _go_without(settings.recipes, "the engine has no tokenizer")
        return None
    made: dict[str, Recipes] = {}
    told: list[str] = []
    with _or_without(settings.recipes):  # a tokenizer may bring code of its own
        tokenizer = tokenizer_of(model_config)
        vocab_size = int(model_config.get_vocab_size())
        for entry in settings.packs:
            with _or_without(entry):
                name, pack = find_pack(entry, settings.recipe_registry)
                recipes = in_tokens(pack, tokenizer, vocab_size)
                if name in made:
                    raise PackError(f"another pack is called {name!r} too")
                if not len(recipes):
                    cause = "cuts texts at other places than words, or does not know the words"
                    raise PackError(f"this tokenizer {cause}")
                made[name] = recipes
                told.append(f"{name} {len(recipes):,} {pack.content_hash[:SHOWN_HASH]}")
        if made:
            joined = Recipes.join(made)
            logger.info(
                "gpu_align drafts from %d recipes (GPU_ALIGN_RECIPES=%s), made in %.1f s: %s",
                len(joined),
                settings.recipes,
                time.perf_counter() - started,
                shown_reason("; ".join(told)),
            )
            return joined
    return None


def in_tokens(pack: RecipePack, tokenizer: Any, vocab_size: int) -> Recipes:
    """The pack in a vLLM tokenizer's tokens, without recipes that need its unknown one, or another vocabulary."""
    recipes = pack.tokenize(encoder_of(tokenizer), token_texts_of(tokenizer, vocab_size))
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = np.concatenate([recipes.context, recipes.token_ids], axis=1)
    wrong = ids >= vocab_size
    if unknown is not None:
        wrong |= ids == int(unknown)
    return recipes.select(np.logical_not(wrong.any(axis=1)))


def tokenizer_of(model_config: Any) -> Any:
    """The tokenizer of the served model."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def encoder_of(tokenizer: Any) -> Encode:
    """The token ids of texts, all in one call: one by one takes four times as long."""
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def token_texts_of(tokenizer: Any, vocab_size: int) -> Callable[[Sequence[int]], list[str]]:
    """The text of each token, decoded behind a bracket, where it keeps the space that it begins with. Empty for an
    id that the tokenizer does not know; none for one that the model does not have."""
    lead = list(tokenizer.encode("(", add_special_tokens=False))
    before = tokenizer.decode(lead)

    def text_of(token: int) -> str:
        try:
            text: str = tokenizer.decode([*lead, token])
            return text[len(before) :] if text.startswith(before) else str(tokenizer.decode([token]))
        except Exception:  # the model may have more ids than its tokenizer
            return ""

    return lambda token_ids: [text_of(int(token)) for token in token_ids if token < vocab_size]


def _go_without(what: str, reason: str) -> None:
    logger.warning("gpu_align drafts without recipes (GPU_ALIGN_RECIPES=%s): %s", what, reason)


@contextmanager
def _or_without(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _go_without(what, shown_error(error))


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """An INFO line where this has taken more than two seconds."""
    started = time.perf_counter()
    yield
    if (seconds := time.perf_counter() - started) > 2:
        logger.info("gpu_align compiled %s in %.1f s; it is cached for the next start", what, seconds)


def logs_here(vllm_config: Any) -> bool:
    """Whether this is the first of its tensor-parallel ranks, which draft the same: it writes logs."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank) % int(parallel.tensor_parallel_size) == 0
