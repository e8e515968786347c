"""The policies the simulator can run, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_align.config import DrafterConfig
from gpu_align.policies import (
    OPTIONAL_POLICIES,
    POLICIES,
    RECIPE_POLICIES,
    Policy,
    StaticText,
    suffix_decoding_available,
)
from gpu_align.simulate.drafter_policy import DrafterPolicy
from gpu_align.simulate.packs import NO_PACK, SHIPPED_PACK, recipes_for, tokenizer_of
from gpu_align.simulate.predictor_policy import import_policy, is_import_path
from gpu_align.simulate.records import Record
from gpu_align.simulate.tokenizers import line_ending_ids, load_tokenizer

#: This library's drafter.
OURS = "gpu_align"
#: Fields of `DrafterConfig` along the trade-off, from few rejected drafts to few steps, beside the default. They
#: were chosen on `kinds-tune` of the corpus.
SWEEP: tuple[dict[str, Any], ...] = (
    {"length_factor": 0.5, "min_survival": 0.99, "min_survival_recipe": 0.99},
    {"length_factor": 0.5, "min_survival": 0.98, "min_survival_recipe": 0.98},
    {"length_factor": 0.5, "min_survival": 0.97, "min_survival_recipe": 0.97},
    {"length_factor": 0.75, "min_survival": 0.95, "min_survival_recipe": 0.95},
    {"length_factor": 0.75, "min_survival": 0.65, "min_survival_recipe": 0.65},
    {"length_factor": 0.5, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 0.75, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 1, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 1.5, "min_survival": 0.4, "min_survival_recipe": 0.4},
    {"length_factor": 1, "min_survival": 0.3},
    {"length_factor": 1.5, "min_survival": 0.3},
    {"length_factor": 2, "min_survival": 0.2},
    {"length_factor": 3, "min_survival": 0.1},
    {"length_factor": 6, "min_survival": 0.08},
    {"length_factor": 12, "min_survival": 0.05},
    {"length_factor": 12, "min_survival": 0.02},
    {"length_factor": 64, "min_survival": 0.02, "min_survival_lost": 0.2},
    {"length_factor": 16, "min_survival": 0, "min_survival_lost": 0.05},
)


def setting_name(setting: Mapping[str, Any], pack: str = SHIPPED_PACK) -> str:
    """Our drafter's name in reports: ``gpu_align``, then its settings and its recipes where not the default."""
    recipes = {} if pack == SHIPPED_PACK else {"recipes": pack}
    return " ".join([OURS, *(f"{name}={value}" for name, value in {**setting, **recipes}.items())])


def policy_names() -> list[str]:
    """Every policy: ours, then those of `gpu_align.policies` in their order."""
    return [OURS, *POLICIES, *RECIPE_POLICIES, *OPTIONAL_POLICIES]


def runnable_policy_names(with_recipes: bool = False) -> list[str]:
    """Those of `policy_names` whose packages are installed; those that draft from recipes only `with_recipes`."""
    optional = OPTIONAL_POLICIES if suffix_decoding_available() else ()
    return [OURS, *POLICIES, *optional, *(RECIPE_POLICIES if with_recipes else ())]


def make_policies(
    names: Sequence[str],
    records: Sequence[Record],
    num_draft_tokens: int,
    settings: Sequence[Mapping[str, Any]] = ({},),
    recipes: str = SHIPPED_PACK,
) -> list[Policy]:
    """One policy for each of `names`, large enough for `records`; ours once for each of `settings`.

    Each setting holds fields of `DrafterConfig`, like those of `SWEEP`; an empty one is the default.

    Where all records name the same tokenizer, ours drafts from recipes, too, and ``static_text``, which works on
    lines, gets the tokens that end a line. Otherwise ours has no recipes, and its name says so, ``static_text``
    guesses, and ``recipe_pack``, which drafts from recipes alone, cannot run.

    Args:
        names: each one of `policy_names`, or ``module:name?argument=value`` of a `TokenPredictor` or `Policy`.
        records: what they are to draft for.
        num_draft_tokens: K, at least 1.
        settings: of our drafter.
        recipes: the file of a `RecipePack`, ``"base"``: the pack that comes with the library, or ``"off"``: none.

    Raises:
        ValueError: a name is not one of these, nothing can be made of ``module:name``, a policy needs recipes and
            there are none, or the file is not a pack.
        OSError: the pack cannot be read.
        MissingExtraError: a policy's package is not installed.
    """
    factories = {**POLICIES, **OPTIONAL_POLICIES}
    policies: list[Policy] = []
    for name in names:
        if name == OURS:
            known = recipes_for(records, recipes)
            pack = NO_PACK if known is None else recipes
            for setting in settings:
                named = config_of(setting), setting_name(setting, pack)
                policies.append(DrafterPolicy.for_records(records, num_draft_tokens, *named, known))
        elif name == "static_text":
            policies.append(StaticText(ends_line=_ends_line(records)))
        elif name in RECIPE_POLICIES:
            known = recipes_for(records, recipes)
            if known is None:
                off = recipes == NO_PACK
                why = "they are off" if off else "the records do not all name the same tokenizer"
                raise ValueError(f"policy {name!r}: drafts from recipes, and there are none: {why}")
            policies.append(RECIPE_POLICIES[name](known))
        elif name in factories:
            policies.append(factories[name]())
        elif is_import_path(name):
            policies.append(import_policy(name))
        else:
            raise ValueError(f"policy: expected one of {', '.join(policy_names())}, found {name!r}")
    return policies


def config_of(setting: Mapping[str, Any]) -> DrafterConfig:
    """The `DrafterConfig` with these fields and the defaults of the others.

    Raises:
        ValueError: a value outside its domain.
    """
    return DrafterConfig(**setting)


def _ends_line(records: Sequence[Record]) -> Callable[[int], bool] | None:
    """Whether a token ends a line, if one tokenizer holds for all `records`, else None."""
    name = tokenizer_of(records)
    if name is None:
        return None
    ids = {token for record in records for text in (record.prediction, record.output) for token in text}
    return line_ending_ids(load_tokenizer(name), ids).__contains__
