"""Launches of kernels, taken before a GPU gets them: what Triton compiles for a target that need not be there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.compiled.sass_memory import Memory, constant_bank

OPS = Path(__file__).parents[2] / "gpu_align" / "ops"
#: Target → Triton's backend, architecture, lanes of a warp.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


class NoUtils:
    """The answers of an H100 to what Triton asks of a device."""

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, *_: Any) -> None:
        pass

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}


class NoDevice:
    """A driver that launches nothing. `launches` holds what it was asked to, while it `listens`.

    target: of `TARGETS`, or another GPU of NVIDIA's.
    """

    utils = NoUtils()

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*(TARGETS.get(target) or ("cuda", int(target.removeprefix("sm_")), 32)))
        self.launches: list[tuple[Any, ...]] = []
        self.listens = True

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if self.listens:
                self.launches.append(args)

        return launch

    def get_current_device(self) -> int:
        """A number for each target: by it Triton keeps what it compiled."""
        return int("".join(filter(str.isdigit, str(self.target.arch))))

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: the function's name.
        compiled: Triton's, for this launch.
        arguments: those in constant bank 0 by name; those in a named tuple one by one, as ``tuple.field``.
    """

    kernel: str
    compiled: Any
    arguments: dict[str, Any]
    grid: tuple[int, int]

    @property
    def label(self) -> str:
        """Kernel, constants, and the type of keys where there are any."""
        source = self.compiled.src
        names = list(source.signature)
        sizes = [f"{names[i]} {value}" for (i,), value in source.constants.items() if names[i].isupper()]
        keys = [f"keys {kind[1:]}" for name, kind in source.signature.items() if name == "keys_ptr"]
        return ", ".join([self.kernel, *sizes, *keys])

    @contextmanager
    def in_memory(self, target: str) -> Iterator[tuple[Memory, bytes]]:
        """Tensors in one block, and constant bank 0; what is written there is in the tensors afterwards."""
        tensors = (arg.untyped_storage() for arg in self.arguments.values() if isinstance(arg, torch.Tensor))
        # Views share their memory: a storage is laid out once.
        of_bytes = torch.empty(0, dtype=torch.uint8)
        storages = {each.data_ptr(): of_bytes.clone().set_(each).numpy() for each in tensors}
        memory = Memory(list(storages.values()))
        begins = {pointer: memory.address(i) for i, pointer in enumerate(storages)}

        def placed(arg: Any) -> tuple[int, int]:
            if not isinstance(arg, torch.Tensor):
                return int(arg), 4
            pointer = arg.untyped_storage().data_ptr()
            return begins[pointer] + arg.data_ptr() - pointer, 8

        yield memory, constant_bank(target, self.grid, map(placed, self.arguments.values()))
        for own, array in zip(storages.values(), memory.arrays, strict=True):
            own[:] = array


class _TakenKernel:
    """In the place of a ``@triton.jit`` function."""

    def __init__(self, kernel: Any, take: Callable[[Launch], None]) -> None:
        self.kernel, self.take = kernel, take
        self.fn, self.arg_names, self.params = kernel.fn, kernel.arg_names, kernel.params

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **by_name: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **by_name)
            given = {**dict(zip(self.arg_names, args, strict=False)), **by_name}
            kinds = compiled.src.signature.items()
            arguments = _flat({name: given[name] for name, kind in kinds if kind != "constexpr"})
            self.take(Launch(self.fn.__name__, compiled, arguments, (*grid, 1)[:2]))

        return launch


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        fields = getattr(value, "_fields", range(len(value))) if isinstance(value, tuple) else ()
        found |= {f"{name}.{field}": value[i] for i, field in enumerate(fields)} if fields else {name: value}
    return found


@contextmanager
def in_place_of_triton(target: str, take: Callable[[Launch], None]) -> Iterator[None]:
    """Give every launch of a kernel of the library, on CPU tensors, to `take`."""
    from triton.runtime import JITFunction, driver

    from gpu_align.ops import lcs

    driver.set_active(NoDevice(target))
    with ExitStack() as replaced:
        for path in sorted(OPS.glob("*/kernel.py")):
            module = importlib.import_module(f"gpu_align.ops.{path.parent.name}.kernel")
            for name, kernel in vars(module).copy().items():
                # Kernels of another module that this one imports belong there.
                if name.endswith("_kernel") and getattr(kernel, "__module__", None) == module.__name__:
                    if not isinstance(kernel, JITFunction):
                        found = type(kernel).__name__
                        raise RuntimeError(f"{name}: expected a compiled kernel, found {found}")
                    replaced.enter_context(patch.object(module, name, _TakenKernel(kernel, take)))
        # The backend "triton" takes CPU tensors where Triton interprets. Kernels are compiled ones by now.
        replaced.enter_context(patch.dict(os.environ, TRITON_INTERPRET="1"))
        replaced.enter_context(patch.object(lcs, "_INTERPRETER_REQUESTS", 1))
        if TARGETS.get(target, ("cuda",))[0] == "hip":
            replaced.enter_context(patch.object(torch.version, "hip", "7"))
        yield
