"""The numbers of `constants` for kernels: ``WAYS`` is ``tl.constexpr(constants.WAYS)``. For ``import *``.

A kernel must not read a plain module constant, nor an attribute of a module: Triton does not make these part of
its cache key, so a changed value would run a stale binary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from .. import constants

if TYPE_CHECKING:
    from ..constants import *
else:
    numbers = {name: value for name, value in vars(constants).items() if isinstance(value, int | tuple)}
    globals().update({name: tl.constexpr(value) for name, value in numbers.items()})
    __all__ = [*numbers]
