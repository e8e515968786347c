"""Triton's interpreter with the same results in less time.

The interpreter patches `triton.language` anew for every launch and every call of one kernel function by another,
and looks up the type of each number by its name. Here the language is patched once and types are made once. Every
check stays.
"""

from __future__ import annotations

from typing import Any


def speed_up() -> None:
    """Once a process, before the first launch. Nothing that compiles kernels may run in it afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_the_language_once(tl, interpreter)
    _remember_numpy_types(interpreter)


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
