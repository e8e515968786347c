"""`Drafter.warm_up`: no slot changes, and behind it nothing is compiled, pinned or loaded any more."""

import random
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from gpu_align.ops import slots as slots_of
from gpu_align.ops.layout import PAGE
from tests.gpu_align.engine import BACKENDS, DEVICE, Engine, Stream, Streams, distinct, same, snapshot


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_changes_no_slot_and_holds_no_prediction(backend):
    cold, warm = (Engine(backend, N=600, max_prediction_tokens=PAGE) for _ in range(2))
    slots, stats = snapshot(warm.drafter)[3:], warm.drafter.prediction_stats
    warm.drafter.warm_up(warm.token_ids, warm.total_len)
    assert all(torch.equal(*pair) for pair in zip(slots, snapshot(warm.drafter)[3:], strict=True))
    assert warm.drafter.prediction_stats == stats
    for engine in (cold, warm):
        engine.add(0, distinct(60), [900, 901], distinct(3))
    assert warm.propose([0]) == cold.propose([0])
    # With requests under way, too.
    before = snapshot(warm.drafter)
    warm.drafter.warm_up(warm.token_ids, warm.total_len)
    assert same(before, warm.drafter)


class Loads(TorchDispatchMode):
    """What a GPU compiles, pins or loads when it comes for the first time.

    A variant of a kernel, as Triton tells them apart; pinned memory, which PyTorch keeps by powers of two; an
    operation of PyTorch by its types, a sort by its size as well. Without a GPU no kernel runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()
        if DEVICE == "cuda":

            def compiled(*, key: Any, fn: Any, **_: Any) -> None:
                self.seen.add((fn.name, key))

            monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
            return
        upload, launched, pinned = slots_of._upload, self.launched, self.pinned
        monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **sizes: launched(*args, **sizes))
        monkeypatch.setattr(
            slots_of, "_upload", lambda ids, out: upload(ids, torch.empty_like(out, device="meta"))
        )
        Streams(monkeypatch)
        engine.drafter._preparation._stream = Stream()
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned(t.nbytes) or t)

    def pinned(self, num_bytes: int) -> None:
        self.seen.add(("pinned", (num_bytes - 1).bit_length()))

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
            self.pinned(args[0][0] * kwargs["dtype"].itemsize)
            kwargs["pin_memory"] = DEVICE == "cuda"
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        sizes = []
        if "sort" in function.name():
            # PyTorch has a kernel for up to 32 keys, up to 64, ...; for none it runs none.
            sizes = [max((len(t) - 1).bit_length(), 5) for t in tensors]
            tensors = [t for t in tensors if len(t)]
        if tensors and not function.is_view:  # a view runs nothing
            self.seen.add((function.name(), *(t.dtype for t in tensors), *sizes))
        return function(*args, **kwargs)


def test_behind_it_nothing_is_compiled_pinned_or_loaded(monkeypatch):
    """Random traffic: predictions, preparations and batches of every size."""
    rng = random.Random(28)
    engine = Engine("triton", max_slots=40, N=100_000, K=8, vocab=200_000, max_prediction_tokens=1 << 20)
    drafter, rows = engine.drafter, (engine.token_ids, engine.total_len)
    loads = Loads(monkeypatch, engine)
    with loads:
        drafter.warm_up(*rows)
    warm, pinned = set(loads.seen), torch.cuda.host_memory_stats().get("num_host_alloc")
    # On a GPU an earlier test of this process may have compiled the kernels.
    kernels = {"step_kernel", "index_kernel"} if DEVICE == "cpu" else set()
    assert {"pinned", *kernels} <= {name for name, *_ in warm}
    for _ in range(400):
        slot, num_tokens = rng.randrange(40), min(int(2 ** rng.uniform(0, 17)) - 1, 100_000)
        prediction = torch.arange(num_tokens, dtype=torch.int32) + slot
        inputs = engine.inputs(rng.sample(range(40), rng.randint(1, 40)))
        with loads:
            drafter.add(slot, prediction, 0, memory=rng.random() < 0.3, sharing_key=rng.randrange(3))
            drafter.propose(*inputs)
            drafter.prepare(*rows, rng.sample(range(40), rng.randint(0, 40)))
            drafter.remove(rng.randrange(40))
        if DEVICE == "cuda":  # else what is still being copied takes another block
            torch.cuda.synchronize()
    assert loads.seen - warm == set()
    assert torch.cuda.host_memory_stats().get("num_host_alloc") == pinned
