"""Triton's interpreter with the same results in less time.

A kernel's time under the interpreter is almost all spent on Python objects around numpy scalars: types that are
named, hashed and compared, and `triton.language`, patched anew for every launch and every call of one kernel
function by another. Here types are made once and the language is patched once. Every check stays.
"""

from __future__ import annotations

from typing import Any


def speed_up() -> None:
    """Once a process, before the first launch. Nothing that compiles kernels may run in it afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_the_language_once(tl, interpreter)
    _remember_numpy_types(interpreter)
    _compare_types_by_identity_first(tl.core.dtype)
    _remember_block_types(tl.core)
    _remember_shapes(tl.core)
    _leave_equal_shapes_alone(interpreter.interpreter_semantic)


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

    def patch_lang_once(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not modules or not modules <= patched:
            patch_lang(fn)
            patched.update(modules)
        return Kept()

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_lang_once


def _remember_numpy_types(interpreter: Any) -> None:
    make = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        name = dtype.name
        if name not in known:
            known[name] = make(dtype)
        return known[name]

    interpreter._get_np_dtype = get


def _compare_types_by_identity_first(dtype: Any) -> None:
    equal = dtype.__eq__
    dtype.__eq__ = lambda self, other: True if self is other else equal(self, other)


def _remember_block_types(core: Any) -> None:
    make = core.block_type.__init__
    known: dict[tuple[int, ...], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, prefix = known[key]
        self.name = f"{prefix}{element_ty}>"

    core.block_type.__init__ = init


def _remember_shapes(core: Any) -> None:
    make = core.tensor.__init__
    known: dict[tuple[int, ...], Any] = {}

    def init(self: Any, handle: Any, dtype: Any) -> None:
        key = tuple(dtype.shape) if dtype.is_block() else ()
        if key not in known:
            make(self, handle, dtype)
            known[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.shape, self.numel = known[key]

    core.tensor.__init__ = init


def _leave_equal_shapes_alone(semantic: Any) -> None:
    """Where neither tensor has to be broadcast."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block():
            same = rhs.type.is_block() and [*lhs.type.shape] == [*rhs.type.shape]
        else:
            same = not rhs.type.is_block()
        return (lhs, rhs) if same else broadcast(lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value
