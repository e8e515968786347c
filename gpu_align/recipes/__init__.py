"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here.

`learn`, `observe`, `merge`, `shapes_only` and `report` are functions of `gpu_align.tools.recipes`, which is
imported when one of them is used. As methods of `RecipePack` they are deprecated.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .misses import Misses, count_misses
from .pack import PackError, RecipePack
from .tokenize import Observed, Recipe, fingerprint, shape_of_output, shape_of_tokens

if TYPE_CHECKING:
    from ..tools.recipes.learn import learn, observe
    from ..tools.recipes.merge import merge, shapes_only
    from ..tools.recipes.report import report

__all__ = [
    "Misses",
    "Observed",
    "PackError",
    "Recipe",
    "RecipePack",
    "count_misses",
    "fingerprint",
    "learn",
    "merge",
    "observe",
    "report",
    "shape_of_output",
    "shape_of_tokens",
    "shapes_only",
]


def __getattr__(name: str) -> Any:
    from ..tools.recipes import learn, merge, report

    modules = {"learn": learn, "merge": merge, "observe": learn, "report": report, "shapes_only": merge}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(modules[name], name)


def _deprecated(name: str) -> Callable[..., Any]:
    """The method of `RecipePack` that was here before the function."""

    def method(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"RecipePack.{name}: use gpu_align.recipes.{name}", DeprecationWarning, stacklevel=2)
        function = __getattr__(name)
        return function(args, **kwargs) if name == "merge" else function(*args, **kwargs)

    return method


for _name in ("learn", "observe"):
    setattr(RecipePack, _name, staticmethod(_deprecated(_name)))
for _name in ("merge", "report", "shapes_only"):
    setattr(RecipePack, _name, _deprecated(_name))
