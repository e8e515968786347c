"""`Drafter`: the contract, on the references everywhere and on the kernels (interpreted or native)."""

import contextlib
import math
import random

import pytest
import torch

import gpu_align
from tests.gpu_align.engine import Engine
from tests.gpu_align.step_harness import BACKENDS, distinct


@pytest.mark.parametrize("K", [16, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_perfect_prediction_takes_the_fewest_steps(backend, K):
    generator = random.Random(K)
    for L, alphabet in [(1, 3), (K + 1, 50), (K + 2, 2), (3 * K + 5, 900)]:
        output = [generator.randrange(alphabet) for _ in range(L)]
        engine = Engine(backend, N=210, K=K)
        engine.add(0, output, [7] * 5)
        assert 1 + len(engine.generate(0, output)) == 1 + math.ceil((L - 1) / (K + 1)), (L, alphabet)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_caller_may_write_to_the_draft(backend):
    engine = Engine(backend)
    engine.add(0, distinct(40), [], [0])
    first = engine.propose([0])
    for tensor in engine.drafter.propose(*engine.inputs([0])):
        tensor.fill_(-1)
    assert engine.propose([0]) == first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnTheGPU:
    def engine(self):
        engine = Engine("triton", T=512, N=512)
        for slot in range(4):
            engine.add(slot, distinct(300, slot), [900 + slot])
            engine.write(slot, [*distinct(40, slot), 700, *distinct(3, slot + 50)])
        args = engine.inputs([0, 1, 2, 3])
        engine.drafter.propose(*args)
        torch.cuda.synchronize()
        return engine, args

    def test_a_step_waits_for_nothing_and_allocates_nothing(self):
        engine, args = self.engine()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.drafter.propose(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated

    def test_add_and_remove_wait_for_nothing(self):
        """With few tokens, which PyTorch sorts by one kernel, with many, and with an index of 32 bits."""
        engine = Engine("triton", N=140_000, vocab=200_000)
        engine.drafter.warm_up(engine.token_ids, engine.total_len)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot, num_tokens in enumerate((60, 8000, 140_000)):
                assert engine.drafter.add(slot, distinct(num_tokens), 0)
            engine.drafter.remove(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_graph_replays_the_same_bits(self):
        engine, args = self.engine()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft = engine.drafter.propose(*args)
        for step in ([301], distinct(4, 60), [5, 6, 7]):
            for slot in range(4):
                engine.write(slot, step)
            eager = [t.clone() for t in engine.drafter.propose(*args)]
            for tensor in draft:
                tensor.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(eager, draft, strict=True))


def test_inference_mode_may_come_and_go():
    """Whatever made the drafter: an engine steps in it, and a thread that frees slots does not."""
    token_ids = torch.arange(64, dtype=torch.int32).expand(4, 64).contiguous()
    total_len, ones = torch.full((4,), 5).int(), torch.ones(1, dtype=torch.int32)
    sizes = dict.fromkeys(("max_slots", "num_draft_tokens"), 8)
    sizes |= dict.fromkeys(("max_context_len", "max_prediction_len", "vocab_size"), 64)
    for making in (True, False):
        with torch.inference_mode(making):
            made = gpu_align.Drafter(**sizes | {"max_slots": 4}, device="cpu")
        for mode in (not making, making, not making):
            with torch.inference_mode(mode):
                made.add(1, distinct(60), 0)
                made.prepare(token_ids, total_len, [1])
                drafted = made.propose(token_ids, total_len, torch.tensor([1]), ones)
                assert drafted.length.tolist() == [8]
                made.remove(1)


def test_the_gpu_of_a_drafter_is_current_while_it_runs(monkeypatch):
    """Triton launches on the current one. A stand-in: nothing else of the drafter is on a GPU here."""
    engine, entered = Engine("reference"), []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(str(device)) or contextlib.nullcontext()
    )
    engine.drafter.device = torch.device("cuda:1")
    engine.drafter.add(0, [1, 2], 0)
    engine.drafter.remove(0)
    engine.drafter.device = torch.device("cpu")
    engine.drafter.remove(0)
    assert entered == ["cuda:1", "cuda:1"]
