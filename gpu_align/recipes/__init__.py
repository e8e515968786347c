"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here.

`learn`, `observe`, `merge`, `shapes_only`, `report`, `add_pack` and `update_index` are
names of `gpu_align.tools.recipes`, which is imported when one is used. As methods the functions are deprecated.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .pack import PackError, RecipePack
from .registry import Registry
from .tokenize import Observed, Recipe, fingerprint, shape_of_tokens

if TYPE_CHECKING:
    from ..tools.recipes.index import add_pack, update_index
    from ..tools.recipes.learn import learn, observe
    from ..tools.recipes.merge import merge, shapes_only
    from ..tools.recipes.report import report

__all__ = [
    "Observed",
    "PackError",
    "Recipe",
    "RecipePack",
    "add_pack",
    "fingerprint",
    "learn",
    "merge",
    "observe",
    "report",
    "shape_of_tokens",
    "shapes_only",
    "update_index",
]


def __getattr__(name: str) -> Any:
    from ..tools.recipes import index, learn, merge, report

    modules = {"learn": learn, "merge": merge, "observe": learn, "report": report, "shapes_only": merge}
    modules |= dict.fromkeys(("add_pack", "update_index"), index)
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(modules[name], name)


def _deprecated(owner: type, method: str, function: str) -> Callable[..., Any]:
    """The method that was here before the function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        message = f"{owner.__name__}.{method}: use gpu_align.recipes.{function}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        found = __getattr__(function)
        return found(args, **kwargs) if method == "merge" else found(*args, **kwargs)

    return call


for _name in ("learn", "observe", "merge", "report", "shapes_only"):
    _call = _deprecated(RecipePack, _name, _name)
    setattr(RecipePack, _name, staticmethod(_call) if _name in ("learn", "observe") else _call)
for _name, _function in (("add", "add_pack"), ("update", "update_index")):
    setattr(Registry, _name, _deprecated(Registry, _name, _function))
