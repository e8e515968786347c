"""`Drafter`: requests share the room for predictions, and what they share never shows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_align import Source
from gpu_align.ops.index.kernel import index_kernel, index_keys_kernel
from gpu_align.ops.layout import PAGE
from gpu_align.ops.slots.kernel import set_slot_kernel
from tests.gpu_align.engine import Engine
from tests.gpu_align.step_harness import BACKENDS, distinct


class Operations(TorchDispatchMode):
    """PyTorch's operations within a ``with`` block, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", BACKENDS)
class TestPredictions:
    """Requests share the room for predictions; none of that shows in what is drafted."""

    def test_a_refused_prediction_leaves_the_request_its_context(self, backend):
        engine = Engine(backend, max_slots=3, max_prediction_tokens=PAGE)
        block = distinct(20, 40)
        assert engine.add(0, distinct(100), [], [0, 1, 2])
        assert not engine.add(1, distinct(100, 5), [], [*block, 7, *block[:4]])
        assert engine.drafter.prediction_stats.refused == 1
        first, second = engine.propose([0, 1])
        assert first[0][: first[1]] == distinct(16, 3)
        assert second[3] == Source.CONTEXT
        assert second[0][: second[1]] == block[4 : 4 + second[1]]
        assert second[1] >= 4
        # The same as for a request without a prediction.
        assert engine.add(2, [], [], [*block, 7, *block[:4]])
        assert engine.propose([2])[0] == second
        # When the first is gone there is room.
        engine.drafter.remove(0)
        assert engine.add(1, distinct(100, 5), [], distinct(3, 5))
        assert engine.propose([1])[0][0] == distinct(16, 8)

    def test_a_refused_prediction_leaves_nothing_of_the_slot_s_old_one(self, backend):
        engine = Engine(backend, max_slots=1, N=600, max_prediction_tokens=2 * PAGE)
        assert engine.add(0, distinct(100, 300), [], [300, 301])
        assert engine.propose([0])[0][0] == distinct(16, 302)
        assert not engine.add(0, distinct(600), [], [300, 301])
        assert engine.propose([0])[0][1] == 0

    def test_earlier_answers_give_way_to_a_prediction(self, backend):
        """A text that might help is no reason to refuse one that a client has sent."""
        engine = Engine(backend, max_slots=5, T=600, N=300, K=16, max_prediction_tokens=3 * PAGE)
        answers = [distinct(30, 100 * slot) for slot in range(4)]
        held = [engine.add(slot, answers[slot], [900], [], memory=True) for slot in range(4)]
        assert held == [True, True, True, False]
        assert engine.add(4, [], [900])  # takes no room
        assert engine.drafter.prediction_stats.used_tokens == 3 * PAGE
        assert engine.add(4, distinct(300, 500), [900])  # two pages: the two oldest give way
        assert [len(step[2:]) for step in engine.generate(4, distinct(300, 500))] == [2] * 18
        assert engine.drafter.prediction_stats.used_tokens == 3 * PAGE
        sources = []
        for slot in range(4):
            engine.write(slot, answers[slot][:8])
            sources.append(engine.propose([slot])[0][3])
        assert sources == [Source.NONE, Source.NONE, Source.MEMORY, Source.NONE]
        assert not engine.add(
            0, answers[0], [900], memory=True
        )  # a memory gives way, and takes nobody's place
        for slot in (0, 1, 2, 4):
            engine.drafter.remove(slot)
        assert engine.drafter.prediction_stats.used_tokens == 0

    def test_no_earlier_answer_is_given_up_for_nothing(self, backend):
        """A prediction that finds no room without them either; an answer that two draft from counts once."""
        engine = Engine(backend, max_slots=5, T=600, N=3 * PAGE, max_prediction_tokens=3 * PAGE)
        texts = [distinct(30), distinct(30), distinct(30, 100)]
        for slot, text in enumerate(texts):
            assert engine.add(slot, text, [900], text[:8], memory=True)
        assert engine.add(3, distinct(9, 700), [900])
        assert not engine.add(4, distinct(2 * PAGE + 1), [900])
        assert [draft[3] for draft in engine.propose([0, 1, 2])] == [Source.MEMORY] * 3
        assert engine.add(4, distinct(2 * PAGE), [900])
        assert [draft[3] for draft in engine.propose([0, 1, 2])] == [Source.NONE] * 3

    def test_two_requests_share_one_prediction(self, backend):
        engine, prediction = Engine(backend), distinct(90)
        outputs = {0: distinct(10), 2: [*distinct(30), 500, *distinct(5, 31)], 3: distinct(4, 60)}
        for slot, output in outputs.items():
            assert engine.add(slot, prediction, [900] * slot, output)
        stats = engine.drafter.prediction_stats
        assert (stats.num_predictions, stats.reused, stats.used_tokens) == (1, 2, PAGE)
        together = dict(zip(outputs, engine.propose(list(outputs)), strict=True))
        for slot, output in outputs.items():
            alone = Engine(backend)
            alone.add(slot, prediction, [900] * slot, output)
            assert alone.propose([slot])[0] == together[slot]
        # It stays for the others when one of them ends, and when one is given another prediction.
        engine.drafter.remove(0)
        engine.add(2, distinct(50, 200), [], [200])
        assert engine.propose([3])[0] == together[3]
        assert engine.propose([2])[0][0] == distinct(16, 201)

    def test_requests_with_different_keys_share_nothing_and_draft_the_same(self, backend):
        engine, prediction = Engine(backend), distinct(90)
        for slot, key in enumerate(["a", "a", "b", None]):
            assert engine.add(slot, prediction, [900], distinct(10), sharing_key=key)
        stats = engine.drafter.prediction_stats
        assert (stats.num_predictions, stats.reused, stats.used_tokens) == (3, 1, 3 * PAGE)
        first, *others = engine.propose([0, 1, 2, 3])
        assert (others, first[1]) == ([first] * 3, 16)
        with pytest.raises(TypeError, match="sharing_key: expected a hashable value, found dict"):
            engine.drafter.add(1, prediction, 1, sharing_key={})
        assert engine.propose([1])[0] == first, "a refused add leaves the slot as it was"

    def test_an_upload_that_fails_leaves_the_slot_vacant(self, backend, monkeypatch):
        engine = Engine(backend)
        engine.add(0, distinct(60), [], [0, 1])
        engine.add(1, distinct(60, 100), [], [100, 101])

        def fail(*_):
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("gpu_align.ops.slots.build_index", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.add(0, distinct(60, 200), [])
        assert [length for _, length, *_ in engine.propose([0, 1])] == [0, 16]
        # What was uploaded in part is not taken for a prediction that is there.
        assert engine.add(0, distinct(60, 200), [], [200])
        assert engine.propose([0])[0][0] == distinct(16, 201)


#: Of an `add` that uploads and indexes.
OPERATIONS = ("slice.Tensor", "empty.memory_format", "copy_", "detach", "sort.stable")


class TestWhatAddCosts:
    """What `add` launches, and that nothing waits for it."""

    def test_kernels_and_operations_of_an_add(self, monkeypatch):
        """How many of them there are is what `add` costs the host. Here none of the kernels runs."""
        launched: list[tuple[Any, Any]] = []
        for module in ("index", "slots"):
            monkeypatch.setattr(
                f"gpu_align.ops.{module}.launch",
                lambda kernel, *_, variant=None, **__: launched.append((kernel, variant)),
            )
        drafter = Engine("triton").drafter
        with Operations() as operations:
            drafter.add(0, distinct(60), 0)
        assert [kernel for kernel, _ in launched] == [index_keys_kernel, index_kernel, set_slot_kernel]
        # On a GPU the pages are filled by a copy from pinned memory, `empty` and `copy_`, without `detach`.
        assert set(operations.names) <= {f"aten::{name}" for name in OPERATIONS}
        assert len(operations.names) <= len(OPERATIONS)
        for call in (lambda: drafter.add(1, distinct(60), 0), lambda: drafter.remove(0)):
            launched.clear()
            with Operations() as operations:
                call()
            assert (launched, operations.names) == ([(set_slot_kernel, None)], [])

    def test_an_upload_is_from_pinned_memory_and_not_waited_for(self, monkeypatch):
        """On a GPU; `meta` stands for one that is not there."""
        from gpu_align.ops.slots import _upload

        sources, copies = [], []
        empty, copy = torch.empty, torch.Tensor.copy_
        out = torch.zeros(5, dtype=torch.int32, device="meta")

        def unpinned(*size, pin_memory, **kwargs):
            assert pin_memory
            sources.append(empty(*size, **kwargs))
            return sources[-1]

        def copied(out, source, *, non_blocking):
            assert non_blocking
            copies.append((source, out.shape))
            return copy(out, source)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        _upload(np.arange(5, dtype=np.int32), out)
        [(source, shape)] = copies
        assert source is sources[0]
        assert (source.tolist(), source.dtype, shape) == (list(range(5)), torch.int32, out.shape)
