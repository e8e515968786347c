"""`Drafter.warm_up`: no slot changes, and after it nothing is compiled, pinned or loaded any more."""

import random
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from gpu_align.ops.layout import PAGE, TextKind
from tests.gpu_align.engine import BACKENDS, DEVICE, Engine, distinct, same, snapshot


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_changes_no_slot_and_holds_no_prediction(backend):
    cold, warm = (Engine(backend, N=600, max_prediction_tokens=PAGE) for _ in range(2))
    slots, stats = snapshot(warm.drafter)[3:], warm.drafter.prediction_stats
    warm.drafter.warm_up()
    assert all(torch.equal(*pair) for pair in zip(slots, snapshot(warm.drafter)[3:], strict=True))
    assert warm.drafter.prediction_stats == stats
    for engine in (cold, warm):
        engine.add(0, distinct(60), [900, 901], distinct(3))
    assert warm.propose([0]) == cold.propose([0])
    # With requests under way, too, whatever the rows hold.
    before = snapshot(warm.drafter)
    warm.drafter.warm_up()
    warm.token_ids.zero_()
    warm.total_len.fill_(5)
    warm.drafter.warm_up()
    assert same(before, warm.drafter)


class Loads(TorchDispatchMode):
    """Records what a GPU compiles, pins or loads on first use: variants of a kernel, as Triton tells them apart;
    pinned memory; operations of PyTorch, by their types. Without a GPU no kernel runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()
        if DEVICE == "cuda":

            def compiled(*, key: Any, fn: Any, **_: Any) -> None:
                self.seen.add((fn.name, key))

            monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
            return
        launched = self.launched
        monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **sizes: launched(*args, **sizes))

    def launched(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **sizes: Any) -> None:
        def kind(name: str, arg: Any) -> tuple[Any, ...]:
            if isinstance(arg, tuple):
                return tuple(kind(name, each) for each in arg)
            if isinstance(arg, torch.Tensor):
                found, value = arg.dtype, arg.data_ptr()
            else:
                found, value = ("i32" if -(2**31) <= arg < 2**31 else "i64"), arg
            return (found,) if name in kernel.kwargs["do_not_specialize"] else (found, value == 1, value % 16)

        kinds = tuple(kind(*pair) for pair in zip(kernel.arg_names, args, strict=False))
        self.seen.add((kernel.fn.__name__, kinds, tuple(sizes.items())))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            self.seen.add(("pinned",))
            kwargs["pin_memory"] = DEVICE == "cuda"
        if not function.is_view:  # a view runs nothing
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.seen.add((function.name(), *(t.dtype for t in tensors)))
        return function(*args, **kwargs)


def test_after_it_nothing_is_compiled_pinned_or_loaded(monkeypatch):
    """Random traffic: predictions and batches of every size. Nothing is ever pinned but by a new drafter: PyTorch
    drops what it keeps for later when a graph is captured."""
    rng = random.Random(28)
    engine = Engine(
        "triton", max_slots=40, N=100_000, K=8, T=2048, vocab=200_000, max_prediction_tokens=1 << 20
    )
    drafter = engine.drafter
    drafter._admission._make_ring()  # as on a GPU
    loads = Loads(monkeypatch)
    with loads:
        drafter.warm_up()
    warm, pinned = set(loads.seen), torch.cuda.host_memory_stats().get("num_host_alloc")
    # On a GPU an earlier test of this process may have compiled the kernels.
    kernels = {"step", "admit", "merge", "offsets", "contexts", "append"} if DEVICE == "cpu" else set()
    assert {f"{name}_kernel" for name in kernels} <= {name for name, *_ in warm}
    assert ("pinned",) not in warm
    new = torch.zeros((40, 3), dtype=torch.int64, device=DEVICE)
    for _ in range(400):
        slot, num_tokens = rng.randrange(40), min(int(2 ** rng.uniform(0, 17)) - 1, 100_000)
        prediction = torch.arange(num_tokens, dtype=torch.int32) + slot
        inputs = engine.inputs(rng.sample(range(40), rng.randint(1, 40)))
        with loads:
            drafter.add(slot, prediction, 0, kind=TextKind(rng.random() < 0.3), sharing_key=rng.randrange(3))
            if rng.random() < 0.5:
                drafter.propose(*inputs, new[: len(inputs[0])] if rng.random() < 0.5 else None)
            drafter.remove(rng.randrange(40))
    assert loads.seen - warm == set()
    assert torch.cuda.host_memory_stats().get("num_host_alloc") == pinned
