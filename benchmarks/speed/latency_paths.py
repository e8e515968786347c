"""Requests in states that a step may find them in, and the compiled step run on them.

A drafter on the CPU brings a request to where it is; its tensors are the memory that the compiled kernel then runs
on, and its drafts are compared with the reference's: a path that ends elsewhere is no path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.speed.sass import Program
from benchmarks.speed.sass_memory import STACK, Latencies, Memory
from benchmarks.speed.sass_warp import Machine, Trace
from benchmarks.speed.workload import NUM_DRAFT_TOKENS, VOCAB_SIZE, make_recipes, make_shapes, make_texts
from gpu_align import Drafter, Recipes

NUM_TEXT = 32_768
Tokens = npt.NDArray[np.int32]

#: Target → where the kernel's arguments begin in constant bank 0, and where the stack pointer stands.
BANK = {"sm_90": (0x210, 0x28), "sm_100": (0x380, 0x37C)}


@dataclass(frozen=True)
class Path:
    """A request before and after the tokens of a step.

    Attributes:
        prediction, output: its tokens; `output` as far as it is written after the step.
        prompt: tokens of its prompt.
        steps: lengths of the output at which steps ran before; empty: none did.
    """

    prediction: Tokens
    output: Tokens
    prompt: Tokens
    steps: tuple[int, ...]


#: The last token of every output: one that each text of `make_texts` has about 330 times, more than are looked at.
OFTEN = 7


def aligned(new: int) -> Path:
    """In sync since its beginning, `new` tokens more."""
    texts = make_texts(1, NUM_TEXT, "aligned")
    prediction = texts.predictions[0].copy()
    prediction[texts.done + new - 1] = OFTEN
    return Path(prediction, prediction[: texts.done + new], _none(), (texts.done,))


def lost(new: int, done: int) -> Path:
    """Diverged at once and never in sync again: `done` tokens, and `new` more."""
    texts = make_texts(1, NUM_TEXT, "lost")
    output = texts.outputs[0][: done + new].copy()
    output[-1] = OFTEN
    return Path(texts.predictions[0], output, _none(), (done,) if done else ())


def repeated(new: int) -> Path:
    """Lost, and its last 64 tokens were written 200 tokens ago: the longest match, in its own context."""
    path = lost(new, NUM_TEXT // 2)
    path.output[-201] = OFTEN
    path.output[-64 - new :] = path.output[-264 - new : -200]
    return path


def edited(new: int) -> Path:
    """Four edits of two tokens each are behind it; in sync again, `new` tokens more."""
    path = aligned(new)
    output = path.output.copy()
    end = len(output) - new
    for at in range(end - 200, end - 40, 40):
        output[at : at + 2] = 50_000 + at
    return Path(path.prediction, output, path.prompt, tuple(range(end - 208, end + 1, 8)))


def resynced(new: int) -> Path:
    """The first two of `new` tokens differ from the prediction; then it is in sync again: an edit is recorded."""
    path = aligned(new)
    output = path.output.copy()
    output[-new : 2 - new] = 50_000
    return Path(path.prediction, output, path.prompt, path.steps)


def first_step(num_prompt: int, is_prepared: bool) -> Path:
    """The first step behind a prompt; one token is written, the prediction's first."""
    texts = make_texts(1, NUM_TEXT, "lost")
    prediction = texts.predictions[0].copy()
    prediction[0] = OFTEN
    return Path(prediction, prediction[:1], texts.outputs[0][:num_prompt], (0,) if is_prepared else ())


def _none() -> Tokens:
    return np.zeros(0, np.int32)


#: Name → the path. An output that diverged looks far at every eighth token, from 16,385 tokens on at 16,392.
PATHS: dict[str, Callable[[], Path]] = {
    "aligned, 1 new": lambda: aligned(1),
    "aligned, 8 new": lambda: aligned(8),
    "aligned, 17 new": lambda: aligned(17),
    "aligned behind edits, 8 new": lambda: edited(8),
    "diverged and resynced, 8 new": lambda: resynced(8),
    "lost, 1 new, looks near": lambda: lost(1, NUM_TEXT // 2),
    "lost, 1 new, looks far": lambda: lost(1, NUM_TEXT // 2 + 7),
    "lost, 8 new": lambda: lost(8, NUM_TEXT // 2),
    "lost, 17 new": lambda: lost(17, NUM_TEXT // 2),
    "lost, 17 new, 64 match in the context": lambda: repeated(17),
    "first step, prompt of 32k": lambda: first_step(NUM_TEXT - 32, is_prepared=False),
    "first step, prompt of 32k, prepared": lambda: first_step(NUM_TEXT - 32, is_prepared=True),
    "resume, 8k lost tokens, prepared": lambda: lost(1, 8192),
}
#: Name → (the path of a length, the length it stands for, the lengths that are run): all lost tokens are folded
#: again. Its cycles are the first length's, and for each further token as many as there are between the two.
SCALED: dict[str, tuple[Callable[[int], Path], int, tuple[int, int]]] = {
    "resume, 8k lost tokens": (lambda num_lost: lost(num_lost, 0), 8192, (128, 192)),
}

#: What drafters know.
RECIPES: dict[str, Callable[[], Recipes | None]] = {
    "no recipes": lambda: None,
    "recipes": make_recipes,
    "shapes": make_shapes,
}


@dataclass(frozen=True)
class Launch:
    """A kernel as a launcher calls it: arguments by name, in order; constants are constexprs and None.

    max_registers: of a thread; 0 leaves it to the compiler.
    """

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    max_registers: int


def launches(module: Any, call: Callable[[], object]) -> list[Launch]:
    """The launches of a module's kernels that `call` makes; nothing is launched."""
    found: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, _: Any) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int = 4, maxnreg: int = 0, **by_name: Any) -> None:
                named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **by_name}
                constants = {
                    p.name: named[p.name]
                    for p in self.kernel.params
                    if p.is_constexpr or named[p.name] is None
                }
                arguments = {name: named[name] for name in self.kernel.arg_names if name not in constants}
                found.append(Launch(self.kernel, arguments, constants, num_warps, maxnreg))

            return launch

    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return found


class Case:
    """A path as a drafter sees it, in front of its last step. recipes: a key of `RECIPES`."""

    def __init__(self, path: Path, recipes: str) -> None:
        length = NUM_TEXT + NUM_DRAFT_TOKENS
        self.drafter = Drafter(
            max_slots=1, max_context_len=length, max_prediction_len=NUM_TEXT,
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device="cpu", backend="reference",
            recipes=RECIPES[recipes](),
        )  # fmt: skip
        self.drafter.add(0, path.prediction, len(path.prompt))
        tokens = np.concatenate([path.prompt, path.output])
        self.tensors = (
            torch.zeros((1, length), dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32),
        )  # fmt: skip
        self.tensors[0][0, : len(tokens)] = torch.from_numpy(tokens)
        for written in path.steps:
            self.tensors[1].fill_(len(path.prompt) + written)
            self.drafter.propose(*self.tensors)
        self.tensors[1].fill_(len(tokens))

    def launches(self) -> list[Launch]:
        """What a step launches on a GPU."""
        from gpu_align.ops.kernels import step as kernels
        from gpu_align.ops.step import StepLaunch

        drafter = self.drafter
        step = StepLaunch(
            drafter._state, drafter._tables, drafter._recipes, drafter._draft, drafter._settings
        )
        return launches(kernels, lambda: step(*self.tensors))


def run_launch(launch: Launch, program: Program, target: str, latencies: Latencies) -> Trace:
    """Run program 0 of a launch; what it writes is in the tensors of `launch` afterwards."""
    tensors = {n: arg for n, arg in launch.arguments.items() if isinstance(arg, torch.Tensor)}
    memory = Memory([tensor.contiguous().numpy() for tensor in tensors.values()])
    addresses = {name: memory.address(i) for i, name in enumerate(tensors)}
    start, stack = BANK[target]
    bank = bytearray(4096)
    bank[stack : stack + 4] = STACK.to_bytes(4, "little")
    for name, arg in launch.arguments.items():
        size = 8 if name in addresses else 4
        start = -(-start // size) * size
        value = addresses.get(name, arg if name not in addresses else 0)
        bank[start : start + size] = (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
        start += size
    trace = Machine(program, memory, bytes(bank), launch.num_warps, latencies).run()
    for tensor, array in zip(tensors.values(), memory.arrays, strict=True):
        tensor.copy_(torch.from_numpy(array))
    return trace


def run_step(case: Case, programs: Callable[[Launch], Program], target: str, latencies: Latencies) -> Trace:
    """The compiled step on a case, which stays as it is.

    Raises:
        AssertionError: its drafts are not the reference's.
    """
    [launch] = case.launches()
    tensors = {n: arg for n, arg in launch.arguments.items() if isinstance(arg, torch.Tensor)}
    before = [tensor.clone() for tensor in tensors.values()]

    def drafts() -> dict[str, torch.Tensor]:
        """What there is now; all tensors are then as before."""
        found = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("draft")}
        for tensor, value in zip(tensors.values(), before, strict=True):
            tensor.copy_(value)
        return found

    trace = run_launch(launch, programs(launch), target, latencies)
    found = drafts()
    case.drafter.propose(*case.tensors)
    for name, expected in drafts().items():
        assert torch.equal(found[name], expected), f"{name}: expected {expected}, found {found[name]}"
    return trace
