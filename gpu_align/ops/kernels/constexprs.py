"""What kernels need of `constants`, integers and tuples: ``constexprs.WAYS`` is ``tl.constexpr(constants.WAYS)``.

A kernel must not read a plain module constant: Triton does not make it part of its cache key, so a changed value
would run a stale binary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from .. import constants

if TYPE_CHECKING:

    def __getattr__(name: str) -> tl.constexpr: ...


globals().update(
    {name: tl.constexpr(value) for name, value in vars(constants).items() if isinstance(value, int | tuple)}
)
