"""Triton's interpreter with the same results in an eighth of the time.

The interpreter patches `triton.language` anew for every launch and every call of one kernel function by another,
looks up the type of each number by its name, makes the type and shape of each block anew, and asks of all operands
whether they have to be cast or broadcast. Here the language is patched once, types and shapes are kept, and NumPy
computes at once what needs no cast: two operands of one type, of one shape or one of them a scalar; for all others
the interpreter's own code runs. Its check of 32-bit operations for overflow, which raises nothing unless it
debugs, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

#: Types beside which an integer of Python that fits takes their type.
SIGNED = {name: np.iinfo(name) for name in ("int32", "int64")}
#: Types of which two operands are computed as they are: by arithmetic, by bits, into an `int1`.
NUMBERS = {*SIGNED, "int8", "uint8", "int16", "uint16", "uint32", "uint64", "fp32", "fp64"}
BITS = {*SIGNED, "int1", "int8", "uint8", "int16", "uint16", "uint32", "uint64"}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
#: Operation → what computes it, types of its operands.
OPERATIONS: dict[str, tuple[Callable[..., Any] | None, Collection[str]]] = {
    **dict.fromkeys(("__add__", "__radd__"), (np.add, NUMBERS)),
    **dict.fromkeys(("__sub__", "__rsub__"), (np.subtract, NUMBERS)),
    **dict.fromkeys(("__mul__", "__rmul__"), (np.multiply, NUMBERS)),
    **{f"__{name}__": (getattr(np, f"bitwise_{name}"), BITS) for name in ("and", "or", "xor")},
    **{f"__{name[0]}shift__": (getattr(np, f"{name}_shift"), SIGNED) for name in ("left", "right")},
    **{f"__{name}__": (compare, NUMBERS) for name, compare in COMPARISONS.items()},
    **{name: (getattr(np, name), SIGNED) for name in ("minimum", "maximum")},
    **dict.fromkeys(("where", "load"), (None, ())),
}


def speed_up() -> None:
    """Once a process, before the first launch. Nothing that compiles kernels may run in it afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once(tl, interpreter)
    _remember_numpy_types(interpreter)
    _remember_shapes(tl.core)
    _reduce_bits_at_once(tl, interpreter)


def _patch_the_language_once(tl: Any, interpreter: Any) -> None:
    """And without the check that a builtin is called from a kernel: here it always is."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        if (obj is tl.tensor) == name.startswith("__") and name in OPERATIONS:
            interpreted = _at_once(tl, interpreter, name, interpreted)
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


def _at_once(tl: Any, interpreter: Any, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An operation by NumPy where operands are plain, and `otherwise` where they are not."""
    tensor, constant, handle, int1 = tl.core.tensor, tl.core.constexpr, interpreter.TensorHandle, tl.int1
    block_type, new = tl.core.block_type, object.__new__
    compute, types = OPERATIONS[name]
    compares = compute in COMPARISONS.values()
    swaps = name in ("__radd__", "__rsub__", "__rmul__")

    def result(data: Any, dtype: Any, like: Any) -> Any:
        """A tensor of this type with the shape of another one."""
        out, out.handle = new(tensor), new(handle)
        out.handle.data, out.handle.dtype, out.handle.attr = data, dtype, {}
        out.dtype, out.shape, out.numel = dtype, like.shape, like.numel
        if like.dtype is dtype:
            out.type = like.type
        elif not like.shape:
            out.type = dtype
        else:
            blocks = dtype.__dict__.setdefault("blocks", {})
            if like.type.shape not in blocks:
                blocks[like.type.shape] = block_type(dtype, like.type.shape)
            out.type = blocks[like.type.shape]
        return out

    def wider(left: Any, right: Any) -> Any:
        """The one whose shape both have together; None where they have to be broadcast."""
        if left.shape is right.shape or not right.shape:
            return left
        return None if left.shape else right

    def binary(left: Any, right: Any, **how: Any) -> Any:
        if type(left) is not tensor:
            return otherwise(left, right, **how)
        right = right.value if type(right) is constant else right
        dtype, like = left.dtype, left
        if dtype.name in types:
            if type(right) is not tensor:
                value = right if fits(right, dtype.name) else None
            else:
                like = wider(left, right)
                value = None if like is None or right.dtype.name != dtype.name else right.handle.data
            if value is not None:
                data = compute(value, left.handle.data) if swaps else compute(left.handle.data, value)
                return result(data, int1 if compares else dtype, like)
        elif name == "__add__" and dtype.is_ptr():
            width = max(1, dtype.element_ty.primitive_bitwidth // 8)
            if type(right) is tensor and right.dtype.name in SIGNED:
                if (like := wider(left, right)) is not None:
                    offset = width * right.handle.data.astype(np.uint64)
                    return result(left.handle.data + offset, dtype, like)
            elif fits(right, "int32"):
                return result(left.handle.data + np.uint64(width * right % 2**64), dtype, left)
        return otherwise(left, right, **how)

    def where(condition: Any, x: Any, y: Any) -> Any:
        if type(condition) is tensor and condition.dtype is int1:
            first, second = (x, y) if type(x) is tensor else (y, x)
            if type(first) is tensor:
                dtype, like = first.dtype, first
                if type(second) is tensor:
                    like = wider(x, y) if second.dtype.name == dtype.name else None
                elif not fits(second, dtype.name):
                    like = None
                if like is not None and (like := wider(like, condition)) is not None:
                    left, right = (each.handle.data if type(each) is tensor else each for each in (x, y))
                    return result(np.where(condition.handle.data, left, right), dtype, like)
        return otherwise(condition, x, y)

    def load(pointer: Any, mask: Any = None, other: Any = None, **how: Any) -> Any:
        element = getattr(pointer.dtype, "element_ty", int1)
        masked = mask is None or (type(mask) is tensor and mask.dtype is int1 and mask.shape is pointer.shape)
        filled = other is None or (mask is not None and fits(other, element.name))
        if element.name in NUMBERS and masked and filled:
            places, dtype = pointer.handle.data, interpreter._get_np_dtype(element)
            chosen = np.ones(places.shape, bool) if mask is None else mask.handle.data
            values = np.full(places.shape, other or 0, dtype)
            return result(interpreter._interpreter.load(places, chosen, values, dtype), element, pointer)
        return otherwise(pointer, mask, other, **how)

    return {"where": where, "load": load}.get(name, binary)


def fits(value: Any, name: str) -> bool:
    """Whether it is an integer that takes the type of a signed one beside it."""
    return type(value) is int and name in SIGNED and SIGNED[name].min <= value <= SIGNED[name].max


def _reduce_bits_at_once(tl: Any, interpreter: Any) -> None:
    reduce = interpreter.ReduceOps.apply_impl
    at_once = {tl.standard._or_combine: np.bitwise_or, tl.standard._xor_combine: np.bitwise_xor}

    def apply(self: Any, operands: Any) -> Any:
        if (compute := at_once.get(self.combine_fn)) is None:
            return reduce(self, operands)
        (operand,) = operands
        data = compute.reduce(operand.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, operand.dtype)

    interpreter.ReduceOps.apply_impl = apply
