"""Triton's interpreter with the same results in a quarter of the time.

The interpreter patches `triton.language` anew for every launch and every call of one kernel function by another,
looks up the type of each number by its name, makes the type and shape of each block anew, and asks of all operands
whether they have to be cast or broadcast. Here the language is patched once, types and shapes are kept, and two
operands of one type and shape are taken as they are; for all others the interpreter's own code runs. Its check of
32-bit operations for overflow, which raises nothing unless it debugs, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

#: Types beside which an integer of Python that fits takes their type.
SIGNED = {name: np.iinfo(name) for name in ("int32", "int64")}
#: Two operands of one of these are computed as they are.
PLAIN = {*SIGNED, "int1", "int8", "uint8", "int16", "uint16", "uint32", "uint64", "fp32", "fp64"}


def speed_up() -> None:
    """Once a process, before the first launch. Nothing that compiles kernels may run in it afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once(tl, interpreter)
    _remember_numpy_types(interpreter)
    _remember_shapes(tl.core)
    _pass_plain_operands_on(tl, interpreter)


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


def _remember_numpy_types(interpreter: Any) -> None:
    make = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        name = dtype.name
        if name not in known:
            known[name] = make(dtype)
        return known[name]

    interpreter._get_np_dtype = get


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


def _pass_plain_operands_on(tl: Any, interpreter: Any) -> None:
    tensor, handle, semantic = tl.core.tensor, interpreter.TensorHandle, interpreter.interpreter_semantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def checked(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(lhs, tensor):
            name = lhs.dtype.name
            if isinstance(rhs, tensor):
                is_offset = args[:1] == (True,) and lhs.dtype.is_ptr() and rhs.dtype.name in SIGNED
                if is_offset or (name in PLAIN and name == rhs.dtype.name):
                    return broadcasted(lhs, rhs)
            elif type(rhs) is int and name in SIGNED and SIGNED[name].min <= rhs <= SIGNED[name].max:
                value = np.full(lhs.handle.data.shape or (1,), rhs, dtype=name)
                return lhs, tensor(handle(value, lhs.dtype), lhs.type)
        return check(lhs, rhs, *args, **kwargs)

    def broadcasted(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl = checked
    semantic.broadcast_impl_value = broadcasted
