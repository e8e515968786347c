"""``gpu-align policies``: the drafters of the simulator, with their options and sources."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpu_align import DrafterConfig, policies, simulate

#: Arguments that are not options on a command line.
_NOT_OPTIONS = ("name", "recipes", "earlier", "ends_line")


@dataclass(frozen=True)
class PolicyInfo:
    """One drafter.

    Attributes:
        name: for ``--policy``.
        summary: what it does, in a line.
        options: its arguments, and the values that it runs with.
        given_as: how another value is given.
        source: who published it.
        needs: what it cannot run without here; empty where nothing is missing.
    """

    name: str
    summary: str
    options: dict[str, Any]
    given_as: str
    source: str
    needs: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe() -> list[PolicyInfo]:
    """Every policy, in the order of ``simulate``."""
    factories: dict[str, Callable[..., Any]] = {
        **policies.POLICIES,
        **policies.RECIPE_POLICIES,
        **policies.OPTIONAL_POLICIES,
    }
    return [_ours(), *(_published(name, factory) for name, factory in factories.items())]


def _ours() -> PolicyInfo:
    names = "length_factor", "min_survival", "min_survival_recipe"
    options = {name: getattr(DrafterConfig(), name) for name in names}
    summary = "This library's drafter: aligns the prediction, looks the context and recipes up."
    given_as = "--length-factor F --min-survival P --min-survival-recipe P --recipes PATH|base|off"
    return PolicyInfo(simulate.OURS, summary, options, given_as, "this library, docs/alignment.md", "")


def _published(name: str, factory: Callable[..., Any]) -> PolicyInfo:
    function, args, keywords = factory, (), {}
    if isinstance(factory, functools.partial):
        function, args, keywords = factory.func, factory.args, factory.keywords
    bound = inspect.signature(function).bind_partial(*args, **keywords)
    bound.apply_defaults()
    options = {
        option: value
        for option, value in bound.arguments.items()
        if option not in _NOT_OPTIONS and not isinstance(value, tuple)
    }
    text = (inspect.getdoc(function) or "").replace("``", "`")
    return PolicyInfo(
        name=name,
        summary=" ".join(text.partition("\n\n")[0].split()),
        options=options,
        given_as=_given_as(function, options),
        source=_source(text),
        needs=_needs(name),
    )


def _given_as(function: Callable[..., Any], options: dict[str, Any]) -> str:
    if not options:
        return ""
    option, value = next(iter(options.items()))
    return f"--policy 'gpu_align.policies:{function.__name__}?{option}={value}'"


def _source(text: str) -> str:
    found = re.search(r"\bSource:\s+(.+?)(?:\n\n|\Z)", text, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _needs(name: str) -> str:
    if name in policies.OPTIONAL_POLICIES and not policies.suffix_decoding_available():
        return "arctic-inference"
    return "--tokenizer, or records that name one" if name in policies.RECIPE_POLICIES else ""


def lines_of(info: PolicyInfo) -> list[str]:
    """One policy in full, as lines of text."""
    options = ", ".join(f"{name}={value!r}" for name, value in info.options.items())
    told = {
        "options": options or "none",
        "given as": info.given_as,
        "source": info.source,
        "needs": info.needs,
    }
    return [
        info.name,
        f"  {info.summary}",
        *(f"  {what:9} {value}" for what, value in told.items() if value),
    ]
