"""The policies the simulator can run, by name, and the recipes that ours drafts from."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ...drafter.config import DrafterConfig
from ...ops.layout import FIRST_GAP
from ...ops.recipes.table import Recipes
from ...predictors.base import PredictorOptions, TokenPredictor
from ...predictors.predicted_output import PredictedOutputTokenPredictor
from ...recipes.registry import find_pack
from ..policies import OPTIONAL_POLICIES, POLICIES, RECIPE_POLICIES, StaticText, suffix_decoding_available
from .records import Record
from .tokenizers import line_end_test, load_tokenizer

#: What may stand for a file's name: the pack that comes with the library, or no pack.
SHIPPED_PACK, NO_PACK = "base", "off"


def tokenizer_of(records: Sequence[Record]) -> str | None:
    """The tokenizer that all of `records` name, None where one names another or none."""
    names = {record.tokenizer for record in records}
    return names.pop() if len(names) == 1 else None


def recipes_for(records: Sequence[Record], pack: str = SHIPPED_PACK) -> Recipes | None:
    """The recipes of a pack in the records' tokens; None where their tokenizer is not known.

    pack: a file of `RecipePack.save`, ``"base"``: the one that comes with the library, or ``"off"``. One is
    tokenized once for each tokenizer, which takes a few seconds. PackError, OSError: the file is not a pack, or
    cannot be read. ValueError: the tokenizer cannot be loaded.
    """
    name = tokenizer_of(records)
    return None if name is None or pack == NO_PACK else tokenized_pack(pack, name)


@lru_cache(maxsize=8)
def tokenized_pack(pack: str, tokenizer: str) -> Recipes:
    encode = load_tokenizer(tokenizer).encode
    return find_pack(pack)[1].tokenize(lambda texts: [encode(text) for text in texts])


class Sizes(NamedTuple):
    """Arguments of a `Drafter`, and of a `PredictedOutputTokenPredictor`."""

    max_context_len: int
    max_prediction_len: int
    vocab_size: int


def sizes_for(records: Sequence[Record], recipes: Recipes | None = None) -> Sizes:
    """Of a drafter that can hold any one of `records`, and draft all of `recipes`."""
    texts = [tokens for r in records for tokens in (r.prompt, r.prediction, r.output)]
    # A draft ends before an id that is out of the vocabulary: with recipes that the records use no token of, what
    # is drafted for one record would depend on the others.
    if recipes is not None and len(recipes):
        texts.append([int(recipes.token_ids.max())])
    return Sizes(
        max_context_len=max((len(r.prompt) + len(r.output) for r in records), default=1),
        max_prediction_len=max((len(r.prediction) for r in records), default=0) or 1,
        vocab_size=max((token for tokens in texts for token in tokens if token < FIRST_GAP), default=0) + 1,
    )


def our_drafter(
    records: Sequence[Record], config: DrafterConfig | None = None, recipes: Recipes | None = None
) -> PredictedOutputTokenPredictor:
    """Ours, large enough for every one of `records`: what it remembers of a text depends on its size."""
    sizes = sizes_for(records, recipes)._asdict()
    return PredictedOutputTokenPredictor(config=config, recipes=recipes, **sizes)


def import_policy(path: str) -> TokenPredictor:
    """The policy that the class or function at ``module:name`` or ``module:name?argument=value&...`` makes.

    A value is a Python literal where it reads as one, else text: ``?max_tokens=8&model=org/name``. ValueError: no
    such module or name, arguments that it does not take, or no `TokenPredictor`.
    """
    target, _, query = path.partition("?")
    module_name, _, name = target.partition(":")
    try:
        made: Any = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"policy {path!r}: cannot import {module_name!r}: {error}") from error
    for part in name.split("."):
        made = getattr(made, part, None)
    if not callable(made):
        raise ValueError(f"policy {path!r}: expected a class or a function in {module_name!r}")
    try:
        arguments = {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        policy = made(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {path!r}: {error}") from error
    if isinstance(policy, TokenPredictor):
        return policy
    raise ValueError(f"policy {path!r}: expected a TokenPredictor, found {type(policy).__name__}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


#: This library's drafter.
OURS = "gpu_align"
# Length factor and minimal survival, where a recipe needs that, too, and where not.
_WITH_RECIPES = (
    (0.5, 0.99), (0.5, 0.98), (0.5, 0.97), (0.75, 0.95), (0.75, 0.65), (0.5, 0.5), (0.75, 0.5), (1, 0.5),
    (1.5, 0.4),
)  # fmt: skip
_WITHOUT_RECIPES = (1, 0.3), (1.5, 0.3), (2, 0.2), (3, 0.1), (6, 0.08), (12, 0.05), (12, 0.02)
#: Fields of `DrafterConfig` along the trade-off, from few rejected drafts to few steps, beside the default. They
#: were chosen on `kinds-tune` of the corpus.
SWEEP: tuple[dict[str, Any], ...] = (
    *({"length_factor": f, "min_survival": p, "min_survival_recipe": p} for f, p in _WITH_RECIPES),
    *({"length_factor": f, "min_survival": p} for f, p in _WITHOUT_RECIPES),
    {"length_factor": 64, "min_survival": 0.02, "min_survival_lost": 0.2},
    {"length_factor": 16, "min_survival": 0, "min_survival_lost": 0.05},
)


def setting_name(setting: Mapping[str, Any], pack: str = SHIPPED_PACK) -> str:
    """Our drafter's name in reports: ``gpu_align``, then its settings and its recipes where not the default."""
    recipes = {} if pack == SHIPPED_PACK else {"recipes": pack}
    return " ".join([OURS, *(f"{name}={value}" for name, value in {**setting, **recipes}.items())])


def policy_names() -> list[str]:
    """Every policy: ours, then those of `gpu_align.tools.policies`."""
    return [OURS, *POLICIES, *RECIPE_POLICIES, *OPTIONAL_POLICIES]


def runnable_policy_names(with_recipes: bool = False) -> list[str]:
    """Those of `policy_names` whose packages are installed; those that draft from recipes only `with_recipes`."""
    optional = OPTIONAL_POLICIES if suffix_decoding_available() else ()
    return [OURS, *POLICIES, *optional, *(RECIPE_POLICIES if with_recipes else ())]


def nearest_to(name: str) -> str:
    """Name the policies that are spelled alike, or all, for a message."""
    near = difflib.get_close_matches(name, policy_names())
    return " or ".join(near) or f"one of {', '.join(policy_names())}"


def make_policies(
    names: Sequence[str],
    records: Sequence[Record],
    num_draft_tokens: int,
    settings: Sequence[Mapping[str, Any]] = ({},),
    recipes: str = SHIPPED_PACK,
) -> list[TokenPredictor]:
    """One policy for each of `names`, large enough for `records`; ours once for each of `settings`.

    Where not all records name the same tokenizer, ours has no recipes, and its name says so, ``static_text``,
    which works on lines, guesses where they end, and ``recipe_pack``, which has recipes alone, cannot run.

    Args:
        names: each one of `policy_names`, or ``module:name?argument=value`` of a `TokenPredictor`.
        num_draft_tokens: K, at least 1.
        settings: of our drafter: fields of `DrafterConfig`, like those of `SWEEP`.
        recipes: as in `recipes_for`, which also raises.

    ValueError: no such name, or a policy that needs recipes without any. MissingExtraError: a package is missing.
    """
    factories = {**POLICIES, **OPTIONAL_POLICIES}
    tokenizer = tokenizer_of(records)
    policies: list[TokenPredictor] = []
    for name in names:
        known = recipes_for(records, recipes) if name in (OURS, *RECIPE_POLICIES) else None
        if name == OURS:
            for setting in settings:
                ours = our_drafter(records, DrafterConfig(**setting), known)
                ours.name = setting_name(setting, NO_PACK if known is None else recipes)
                ours.reset([], PredictorOptions(num_draft_tokens))  # so that a bad setting is refused here
                policies.append(ours)
            continue
        if name == "static_text":
            made: TokenPredictor = StaticText(
                None if tokenizer is None else line_end_test(load_tokenizer(tokenizer))
            )
        elif name in RECIPE_POLICIES:
            if known is None:
                off = recipes == NO_PACK
                why = "they are off" if off else "the records do not all name the same tokenizer"
                raise ValueError(f"policy {name!r}: drafts from recipes, and there are none: {why}")
            made = RECIPE_POLICIES[name](known)
        elif name in factories:
            made = factories[name]()
        elif ":" in name:
            made = import_policy(name)
        else:
            raise ValueError(f"policy: expected {nearest_to(name)}, found {name!r}")
        made.name = name
        policies.append(made)
    return policies
