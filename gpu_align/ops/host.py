"""Numbers and rules as references see them: ``from ..host import c``, then ``c.WAYS`` and ``c.rank_of(...)``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import rules
from .constants import numbers
from .jit import njit

#: A module, as Numba takes what is in one for constants, and compiles calls of its functions.
c: Any = ModuleType("common")
vars(c).update(rules.compile_all(njit, numbers()))
