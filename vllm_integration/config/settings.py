"""The settings of an operator: environment variables, read where vLLM makes an engine's configuration. The
settings travel with it, as one object, to the scheduler and to the workers, also to those on other machines."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpu_align.drafter.arena import MAX_PREDICTION_LEN, tokens_for_all
from gpu_align.ops.match import MAX_MATCH

from ..seams.guard import logger, shown_reason
from ..wire.request import KEY

PREFIX = "GPU_ALIGN_"
#: Tokens that the predictions of all requests together may have: 12 bytes each on the device.
ARENA_TOKENS = 4 * 2**20
#: How much longer a step with drafts may take than without, where a request has none: docs/tuning.md.
MAX_SLOWDOWN = 4.0
#: Settings that went, and what there is in their place.
GONE = dict.fromkeys(("FILL_TOKENS", "SURE", "MAX_DRAFT_TOKENS"), "MAX_SLOWDOWN")
#: Characters of a prediction that are tokenised, for each token that is kept.
CHARS_PER_TOKEN = 16

#: Values of `GPU_ALIGN_RECIPES` that are no paths: the pack that comes with the library, and none.
SHIPPED_RECIPES, NO_RECIPES = "base", "off"
#: Digits of a pack's hash that logs and the metric show.
SHOWN_HASH = len("sha256:") + 12
#: Packs that a drafter can tell apart.
MAX_PACKS = 31

#: Attribute of a `SpeculativeConfig`: the settings. `additional_config`, vLLM's place for such, is part of the key
#: of its compiled models: another log directory would have them compiled again.
_ATTRIBUTE = "gpu_align_settings"

_FALSE = ("0", "false", "no", "off")
_MAX_SHOWN = 60


def _packs(value: str) -> str:
    """A path keeps its case; whether a pack is there shows when it is read."""
    if value.lower() in _FALSE:
        return NO_RECIPES
    packs = [pack.strip() for pack in value.split(",")]
    packs = [SHIPPED_RECIPES if pack.lower() == SHIPPED_RECIPES else pack for pack in packs]
    if len(packs) > MAX_PACKS or not all(packs) or any(pack.lower() in _FALSE for pack in packs):
        raise ValueError("expected a list of packs")
    return ",".join(packs)


# The description is what an error says was expected.
_Flag = Annotated[bool, Field(description="0 or 1")]
_Path = Annotated[str | None, Field(description="a directory")]
_PACKS = f"base, off, or 1 to {MAX_PACKS} packs (base, name, name@version or path), comma-separated"
_Packs = Annotated[str, BeforeValidator(_packs), Field(description=_PACKS)]
_Ratio = Annotated[float, Field(ge=1, allow_inf_nan=False, description="a number, 1 or more")]


def _count(of: str, *, least: int = 1) -> Any:
    expected = f"a positive number of {of}" if least else f"a number of {of}, 0 or more"
    return Field(ge=least, description=expected)


class Settings(BaseModel):
    """The `GPU_ALIGN_*` environment variables of docs/settings.md. White space around a value counts for nothing,
    and an empty value is the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strict: _Flag = False
    draft_without_prediction: _Flag = False
    max_prediction_tokens: Annotated[int | None, _count("tokens")] = None
    debug_dir: _Path = None
    verbose: _Flag = False
    cuda_graphs: _Flag = True
    drafter: Annotated[str | None, Field(description="a speculative configuration of vLLM's as JSON")] = None
    drafter_fills: _Flag = False
    max_slowdown: _Ratio = MAX_SLOWDOWN
    strict_limits: _Flag = False
    max_prediction_chars: Annotated[int | None, _count("characters")] = None
    max_body_bytes: Annotated[int, _count("bytes")] = 4 * 2**20
    bill_rejected: _Flag = False
    usage_details: _Flag = False
    arena_tokens: Annotated[int | None, _count("tokens")] = None
    recipes: _Packs = SHIPPED_RECIPES
    recipe_registry: _Path = None
    conversation: _Flag = False
    memory_tokens: Annotated[int, _count("tokens", least=0)] = 0
    min_match: Annotated[int, Field(ge=1, le=MAX_MATCH, description=f"1 to {MAX_MATCH} tokens")] = 1
    survival_table: Annotated[str | None, Field(description="a file")] = None

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Those of an engine; the variables of this process where its configuration brings none."""
        speculative = getattr(vllm_config, "speculative_config", None)
        return getattr(speculative, _ATTRIBUTE, None) or cls.from_env()

    def travel_with(self, vllm_config: Any) -> None:
        """Be the settings of the engine of this configuration."""
        setattr(vllm_config.speculative_config, _ATTRIBUTE, self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables. Raises one `ValueError` for all that cannot be read."""
        env = os.environ if environ is None else environ
        given = {field: env.get(PREFIX + field.upper(), "").strip() for field in cls.model_fields}
        try:
            return cls.model_validate({field: value for field, value in given.items() if value})
        except ValidationError as error:
            wrong = dict.fromkeys(str(found["loc"][0]) for found in error.errors(include_url=False))
        names = {PREFIX + field.upper(): cls.model_fields[field].description for field in wrong}
        shown = {name: shown_reason(env[name], _MAX_SHOWN) for name in names}
        raise ValueError("; ".join(f"{n}: expected {names[n]}, got {shown[n]!r}" for n in names))

    @property
    def packs(self) -> tuple[str, ...]:
        """The packs to draft from, as they were named."""
        return () if self.recipes == NO_RECIPES else tuple(self.recipes.split(","))

    def changed(self) -> dict[str, Any]:
        """The variables whose values are not the defaults."""
        fields = type(self).model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        return {PREFIX + name.upper(): getattr(self, name) for name in changed}

    def prediction_capacity(self, max_model_len: int) -> int:
        """Tokens of a prediction that are kept: never more than the model can write, or the drafter read."""
        return min(self.max_prediction_tokens or max_model_len, max_model_len, MAX_PREDICTION_LEN)

    def prediction_room(self, max_slots: int, capacity: int) -> int:
        """Tokens of all predictions together: the longest fits at least, and no more than can be needed."""
        wanted = ARENA_TOKENS if self.arena_tokens is None else self.arena_tokens
        return min(max(wanted, capacity), tokens_for_all(max_slots, capacity))


def drafts_without_prediction(
    settings: Settings, recipes: Sequence[str] | None = None, memory: bool | None = None
) -> bool:
    """Whether a request is drafted for that brings no prediction. An invalid pack does not count. recipes, memory:
    as of `Prediction`."""
    if settings.draft_without_prediction or (settings.memory_tokens and memory is not False):
        return True
    if recipes is not None:
        return bool(recipes)
    own = (pack for pack in settings.packs if pack != SHIPPED_RECIPES)
    return any(_pack(pack, settings.recipe_registry)[2] for pack in own)


@functools.cache
def warn_of_unknown_names(settings: Settings) -> None:
    """WARNINGs, once a process: `GPU_ALIGN_*` variables that mean nothing, and vLLM's Rust front end."""
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known):
        if instead := GONE.get(name.removeprefix(PREFIX)):
            logger.warning("%s is no setting any more; in its place is %s%s", name, PREFIX, instead)
            continue
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
        logger.warning("%s is not a setting of gpu_align; the nearest one is %s", name, nearest[0])
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        logger.warning(
            "VLLM_USE_RUST_FRONTEND is set: that front end drops the `prediction` field of requests. "
            "Clients can send the token ids of a prediction in vllm_xargs.%s",
            KEY,
        )


def packs_of(settings: Settings) -> tuple[tuple[str, str | None], ...]:
    """The name and the content hash of each pack; as in the settings, and no hash, where it cannot be read here.
    The first call reads all packs, which may take a second."""
    return tuple(_pack(entry, settings.recipe_registry)[:2] for entry in settings.packs)


@functools.cache
def _pack(entry: str, registry: str | None) -> tuple[str, str | None, bool]:
    """Name and content hash of a pack, and whether it may be used: a worker may find what is not found here."""
    from gpu_align.recipes import PackError
    from gpu_align.recipes.registry import find_pack

    try:
        name, pack = find_pack(entry, registry)
    except Exception as error:  # the worker tells what is wrong with a pack
        return entry, None, not isinstance(error, PackError)
    return name, pack.content_hash, True
