"""Recipe packs: continuations that are likely in any text of a kind, or certain in a task; see README.md here.

`learn`, `observe`, `merge`, `shapes_only` and `report` are names of `gpu_align.tools.recipes`, which is imported
when one is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .pack import PackError as PackError
from .pack import RecipePack as RecipePack
from .tokenize import Observed as Observed
from .tokenize import Recipe as Recipe

if TYPE_CHECKING:
    from ..tools.recipes.learn import learn as learn
    from ..tools.recipes.learn import observe as observe
    from ..tools.recipes.merge import merge as merge
    from ..tools.recipes.merge import shapes_only as shapes_only
    from ..tools.recipes.report import report as report

_TOOLS = {"learn": "learn", "observe": "learn", "merge": "merge", "shapes_only": "merge", "report": "report"}


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"..tools.recipes.{_TOOLS[name]}", __name__), name)
