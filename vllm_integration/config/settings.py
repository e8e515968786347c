"""What an operator can set: environment variables, because they reach every process of a vLLM server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_align.arena import tokens_for_all

#: Room for the predictions of all requests together, tokens: 12 bytes each on the device.
ARENA_TOKENS = 4 * 2**20
#: Tokens of a step up to which verifying drafts counts as free: docs/serving-model.md.
FILL_TOKENS = 128
#: Survival from which a draft is verified in any batch, told in time and told late. With these useless
#: predictions cost no batch more than 1 %: `benchmarks.serving` checks it.
SURE, SURE_LATE = 0.9, 0.92

#: Values of `GPU_ALIGN_RECIPES` that are no paths: the pack that comes with the library, and none.
SHIPPED_RECIPES, NO_RECIPES = "base", "off"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """The `GPU_ALIGN_*` environment variables.

    | variable | default | meaning |
    |---|---|---|
    | `GPU_ALIGN_STRICT` | 0 | 1: a vLLM seam that is missing raises instead of turning the plugin off |
    | `GPU_ALIGN_DRAFT_WITHOUT_PREDICTION` | 0 | 1: draft for requests without a prediction too |
    | `GPU_ALIGN_MAX_PREDICTION_TOKENS` | the model's context length | longer predictions are cut there |
    | `GPU_ALIGN_ARENA_TOKENS` | 4194304, or less where less can hold all | room for all predictions together |
    | `GPU_ALIGN_MAX_DRAFT_TOKENS` | half of `max_num_batched_tokens` | draft slots of a batch, V2 runner |
    | `GPU_ALIGN_FILL_TOKENS` | 128 | up to so many tokens a step drafts count as free, V2 runner |
    | `GPU_ALIGN_SURE` | 0.9, 0.92 where told late | drafts as likely as that are verified in any batch, V2 |
    | `GPU_ALIGN_RECIPES` | base | a pack to draft from: `base` is the library's own, `off` none, else a file |
    | `GPU_ALIGN_BILL_REJECTED` | 0 | 1: `completion_tokens` includes rejected prediction tokens |
    | `GPU_ALIGN_USAGE_DETAILS` | 0 | 1: `usage` also tells steps, and drafted and accepted tokens by source |
    | `GPU_ALIGN_DEBUG_DIR` | unset | directory for one YAML file a request (see `debug_log`) |
    | `GPU_ALIGN_STRICT_LIMITS` | 0 | 1: a prediction over a limit is refused instead of cut |
    | `GPU_ALIGN_MAX_PREDICTION_CHARS` | 16 a token of the limit above | text beyond is not tokenised |
    | `GPU_ALIGN_MAX_PREDICTION_PARTS` | 1000 | parts of a prediction given as an array |
    | `GPU_ALIGN_MAX_PREDICTION_DEPTH` | 8 | nesting of the field; without unknown keys it is 3 |
    | `GPU_ALIGN_MAX_BODY_BYTES` | 4194304 | a longer request body that brings a prediction is refused |
    """

    strict: bool = False
    draft_without_prediction: bool = False
    max_prediction_tokens: int | None = None
    debug_dir: str | None = None
    max_draft_tokens: int | None = None
    strict_limits: bool = False
    max_prediction_chars: int | None = None
    max_prediction_parts: int = 1000
    max_prediction_depth: int = 8
    max_body_bytes: int = 4 * 2**20
    bill_rejected: bool = False
    usage_details: bool = False
    fill_tokens: int = FILL_TOKENS
    sure: float | None = None
    arena_tokens: int | None = None
    recipes: str = SHIPPED_RECIPES

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables. Raises `ValueError` that names the variable and what it held."""
        env = os.environ if environ is None else environ
        fill = _count(env, "GPU_ALIGN_FILL_TOKENS", least=0)
        return cls(
            strict=_flag(env, "GPU_ALIGN_STRICT"),
            draft_without_prediction=_flag(env, "GPU_ALIGN_DRAFT_WITHOUT_PREDICTION"),
            max_prediction_tokens=_count(env, "GPU_ALIGN_MAX_PREDICTION_TOKENS"),
            arena_tokens=_count(env, "GPU_ALIGN_ARENA_TOKENS"),
            max_draft_tokens=_count(env, "GPU_ALIGN_MAX_DRAFT_TOKENS"),
            bill_rejected=_flag(env, "GPU_ALIGN_BILL_REJECTED"),
            usage_details=_flag(env, "GPU_ALIGN_USAGE_DETAILS"),
            debug_dir=env.get("GPU_ALIGN_DEBUG_DIR") or None,
            strict_limits=_flag(env, "GPU_ALIGN_STRICT_LIMITS"),
            max_prediction_chars=_count(env, "GPU_ALIGN_MAX_PREDICTION_CHARS", "characters"),
            max_prediction_parts=_count(env, "GPU_ALIGN_MAX_PREDICTION_PARTS", "parts")
            or cls.max_prediction_parts,
            max_prediction_depth=_count(env, "GPU_ALIGN_MAX_PREDICTION_DEPTH", "levels")
            or cls.max_prediction_depth,
            max_body_bytes=_count(env, "GPU_ALIGN_MAX_BODY_BYTES", "bytes") or cls.max_body_bytes,
            fill_tokens=cls.fill_tokens if fill is None else fill,
            sure=_share(env, "GPU_ALIGN_SURE"),
            recipes=_pack(env, "GPU_ALIGN_RECIPES"),
        )

    def prediction_capacity(self, max_model_len: int) -> int:
        """Tokens of a prediction that are kept: never more than the model can write."""
        if self.max_prediction_tokens is None:
            return max_model_len
        return min(self.max_prediction_tokens, max_model_len)

    def prediction_room(self, max_slots: int, capacity: int) -> int:
        """Tokens of all predictions together: room for the longest at least, and no more than can be needed."""
        wanted = ARENA_TOKENS if self.arena_tokens is None else self.arena_tokens
        return min(max(wanted, capacity), tokens_for_all(max_slots, capacity))


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}: expected 0 or 1, got {env[name]!r}")


def _count(env: Mapping[str, str], name: str, of: str = "tokens", *, least: int = 1) -> int | None:
    value = env.get(name, "").strip()
    if not value:
        return None
    if not value.isdecimal() or int(value) < least:
        wanted = f"a positive number of {of}" if least else f"a number of {of}, 0 or more"
        raise ValueError(f"{name}: expected {wanted}, got {env[name]!r}")
    return int(value)


def _share(env: Mapping[str, str], name: str) -> float | None:
    value = env.get(name, "").strip()
    if not value:
        return None
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # not a number fails here too
        raise ValueError(f"{name}: expected a number from 0 to 1, got {env[name]!r}")
    return share


def _pack(env: Mapping[str, str], name: str) -> str:
    """Any other value is a path; whether a pack is there shows when it is read."""
    value = env.get(name, "").strip()
    if not value or value.lower() == SHIPPED_RECIPES:
        return SHIPPED_RECIPES
    return NO_RECIPES if value.lower() in _FALSE else value
