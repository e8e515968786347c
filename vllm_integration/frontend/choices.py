"""What a request chooses beside its prediction: the packs of recipes it uses, and whether earlier answers matter.

    "vllm_xargs": {"recipes": ["triage"], "memory": false}      HTTP
    SamplingParams(extra_args={"recipes": ["triage"]})          the offline API

Both are taken out of the request and travel in its `wire.prediction.Prediction`. Without `recipes` a request uses
the recipes of all packs, with `[]` none. With `"memory": false` its drafts do not depend on earlier answers, and
later requests do not draft from its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_integration.config.packs import known_names
from vllm_integration.config.settings import MAX_PACKS, Settings
from vllm_integration.wire import prediction as wire

KEYS = (wire.RECIPES_KEY, wire.MEMORY_KEY)


class ChoiceError(ValueError):
    """A choice that is refused; the message names the field, what was expected and what was found, and never
    repeats what the client sent.

    parameter: the field.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class Choices:
    """recipes: names of packs, each once; None: not chosen. memory: False: takes no part; None: not chosen."""

    recipes: tuple[str, ...] | None = None
    memory: bool | None = None

    def __bool__(self) -> bool:
        return self.recipes is not None or self.memory is not None

    def put_into(self, prediction: wire.Prediction) -> wire.Prediction:
        return replace(prediction, recipes=self.recipes, memory=self.memory) if self else prediction


def choices_of(extra_args: Mapping[str, Any]) -> Choices:
    """What `vllm_xargs` or `extra_args` choose. Raises `ChoiceError`."""
    recipes = extra_args.get(wire.RECIPES_KEY)
    memory = extra_args.get(wire.MEMORY_KEY)
    return Choices(None if recipes is None else _names(recipes), None if memory is None else _flag(memory))


def check_known(choices: Choices, settings: Settings) -> None:
    """Raise `ChoiceError` for a pack that the server does not have, where this process knows which it has.

    The first call for a request that names packs reads them: call it from a thread.
    """
    if not choices.recipes:
        return
    known = known_names(settings)
    if known is not None and not set(choices.recipes) <= set(known):
        has = f"names out of {', '.join(known)}" if known else "no names, the server has no recipes"
        raise ChoiceError(f"recipes: expected {has}, got another one", wire.RECIPES_KEY)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise ChoiceError(
            f"recipes: expected an array of names, got {type(value).__name__}", wire.RECIPES_KEY
        )
    if len(value) > MAX_PACKS:
        raise ChoiceError(f"recipes: expected at most {MAX_PACKS} names, got {len(value)}", wire.RECIPES_KEY)
    for index, name in enumerate(value):
        if not isinstance(name, str) or not name:
            found = "an empty one" if name == "" else type(name).__name__
            raise ChoiceError(f"recipes[{index}]: expected a name, got {found}", wire.RECIPES_KEY)
    return tuple(dict.fromkeys(value))


def _flag(value: object) -> bool | None:
    """vLLM makes 0 and 1 of JSON's booleans. `true` is the default."""
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ChoiceError("memory: expected a boolean, got something else", wire.MEMORY_KEY)
    return None if value else False
