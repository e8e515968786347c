"""`Drafter`: its contract, on references and kernels; what requests share never shows; bad input costs nothing."""

import contextlib
import math
import random
import re
import warnings

import numpy as np
import pytest
import torch

import gpu_align
from gpu_align import Drafter, DrafterConfig, ListDrafter, RecipePack, Source, TextKind
from gpu_align.ops import layout
from gpu_align.ops.layout import PAGE
from tests.gpu_align.engine import BACKENDS, Engine, device_of, distinct, same, snapshot


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
        """With tokens of one block and of many."""
        engine = Engine("triton", N=140_000, vocab=200_000)
        engine.drafter.warm_up()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot, num_tokens in enumerate((60, 8000, 140_000)):
                assert engine.drafter.add(slot, distinct(num_tokens), 0)
            engine.drafter.remove(1)
            engine.drafter.flush()
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
    ones = torch.ones(1, dtype=torch.int32)
    sizes = dict.fromkeys(("max_slots", "num_draft_tokens"), 8)
    sizes |= dict.fromkeys(("max_context_len", "max_prediction_len", "vocab_size"), 64)
    for making in (True, False):
        with torch.inference_mode(making):
            made = gpu_align.Drafter(**sizes | {"max_slots": 4}, device="cpu")
        made.token_ids.copy_(torch.arange(64))
        made.total_len.fill_(5)
        for mode in (not making, making, not making):
            with torch.inference_mode(mode):
                made.add(1, distinct(60), 0)
                drafted = made.propose(torch.tensor([1]), ones)
                assert drafted.length.tolist() == [8]
                made.remove(1)


def test_the_gpu_of_a_drafter_is_current_while_it_runs(monkeypatch):
    """Triton launches on the current one. A stand-in: nothing else of the drafter is on a GPU here."""
    engine, entered, current = Engine("reference"), [], [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(str(device)) or contextlib.nullcontext()
    )
    engine.drafter.flush()
    engine.drafter.device, engine.drafter._is_cuda = torch.device("cuda:1"), True
    engine.drafter.add(0, [1, 2], 0)
    engine.drafter.flush()
    assert entered == ["cuda:1"]
    current[0] = 1
    engine.drafter.flush()
    assert entered == ["cuda:1"]


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

    def test_earlier_answers_give_way_to_a_prediction(self, backend):
        """A text that might help is no reason to refuse one that a client has sent."""
        engine = Engine(backend, max_slots=5, T=600, N=300, K=16, max_prediction_tokens=3 * PAGE)
        answers = [distinct(30, 100 * slot) for slot in range(4)]
        held = [engine.add(slot, answers[slot], [900], [], kind=TextKind.MEMORY) for slot in range(4)]
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
        # A memory is evicted, and evicts no prediction.
        assert not engine.add(0, answers[0], [900], kind=TextKind.MEMORY)
        for slot in (0, 1, 2, 4):
            engine.drafter.remove(slot)
        assert engine.drafter.prediction_stats.used_tokens == 0

    def test_no_earlier_answer_is_given_up_for_nothing(self, backend):
        """A prediction that finds no room without them either; an answer that two draft from counts once."""
        engine = Engine(backend, max_slots=5, T=600, N=3 * PAGE, max_prediction_tokens=3 * PAGE)
        texts = [distinct(30), distinct(30), distinct(30, 100)]
        for slot, text in enumerate(texts):
            assert engine.add(slot, text, [900], text[:8], kind=TextKind.MEMORY)
        assert engine.add(3, distinct(9, 700), [900])
        assert not engine.add(4, distinct(2 * PAGE + 1), [900])
        assert [draft[3] for draft in engine.propose([0, 1, 2])] == [Source.MEMORY] * 3
        assert engine.add(4, distinct(2 * PAGE), [900])
        assert [draft[3] for draft in engine.propose([0, 1, 2])] == [Source.NONE] * 3

    def test_requests_with_different_keys_share_nothing_and_draft_the_same(self, backend):
        engine, prediction = Engine(backend), distinct(90)
        for slot, key in enumerate(["a", "a", "b", None]):
            assert engine.add(slot, prediction, [900], distinct(10), sharing_key=key)
        stats = engine.drafter.prediction_stats
        assert (stats.num_predictions, stats.reused, stats.used_tokens) == (3, 1, 3 * PAGE)
        first, *others = engine.propose([0, 1, 2, 3])
        assert (others, first[1]) == ([first] * 3, 16)
        with pytest.raises(TypeError, match=r"sharing_key: expected a hashable value, found \(1, \{\}\)"):
            engine.drafter.add(1, prediction, 1, sharing_key=(1, {}))
        assert engine.propose([1])[0] == first, "a refused add leaves the slot as it was"

    def test_an_add_that_raises_changes_nothing(self, backend):
        """A sharing key runs code of its own."""

        class Key:
            def __hash__(self):
                return 7

            def __eq__(self, other):
                raise RuntimeError("no answer")

        engine = Engine(backend, max_slots=2, max_prediction_tokens=PAGE)
        engine.add(0, distinct(40), [], [0, 1], sharing_key=Key())
        with pytest.raises(RuntimeError, match="no answer"):
            engine.drafter.add(0, distinct(40), 0, sharing_key=Key())
        assert not engine.add(1, distinct(8, 71), [])
        [(tokens, length, *_)] = engine.propose([0])
        assert tokens[:length] == distinct(16, 2)

    def test_an_add_that_is_interrupted_leaves_the_slot_vacant(self, backend, monkeypatch):
        """After its old prediction was released, whose pages another request may get."""
        engine = Engine(backend, max_slots=2, max_prediction_tokens=PAGE)
        engine.add(0, distinct(40), [], [0, 1])

        def interrupted(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.drafter._arena, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.drafter.add(0, distinct(40), 0)
        assert engine.add(1, distinct(8, 71), [])
        assert engine.propose([0])[0][1] == 0

    def test_a_memory_that_gives_way_keeps_the_index_of_its_context(self, backend):
        engine = Engine(backend, max_slots=2, N=PAGE, T=200, max_prediction_tokens=PAGE)
        engine.add(0, distinct(30), distinct(150, 300), distinct(9), kind=TextKind.MEMORY)
        engine.propose([0])
        assert engine.add(1, distinct(40, 500), [900], [500])
        engine.drafter.flush()
        state = engine.drafter._state
        assert state.align_state[0, [layout.SEEN, layout.INDEXED]].tolist() == [0, 159]
        engine.write(0, [7, 8])
        other = Engine(backend, T=200)
        other.add(3, [], distinct(150, 300), [*distinct(9), 7, 8])
        assert engine.propose([0]) == other.propose([3])
        slots = state.context_index[0], other.drafter._state.context_index[3]
        assert torch.equal(*slots)
        # And tokens that are taken back at that moment are in no index.
        engine.add(0, distinct(30), distinct(150, 300), distinct(9), kind=TextKind.MEMORY)
        engine.drafter.remove(1)
        engine.propose([0])
        assert engine.add(1, distinct(40, 600), [900], [500])
        engine.total_len[0] = 80
        other.total_len[3] = 80
        assert engine.propose([0]) == other.propose([3])
        assert torch.equal(*slots)


class Half:
    """Neither a number nor a sequence."""


def make(backend="reference", **change):
    sizes = {
        "max_slots": 2, "max_context_len": 8, "max_prediction_len": 4, "num_draft_tokens": 3, "vocab_size": 9,
        "device": device_of(backend),
    }  # fmt: skip
    return Drafter(**{**sizes, "backend": backend, **change})


def int32(*shape, **where):
    return torch.zeros(shape, dtype=torch.int32, **where)


def inputs(backend):
    """What a step of `make`'s drafter takes: one request, nothing in its row."""
    device = device_of(backend)
    return {"slots": int32(1, device=device).long(), "num_sampled": int32(1, device=device) + 1}


def refused(call, error, words):
    """That a call is refused, and all these words of what is said."""
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
class TestBadInput:
    @pytest.mark.parametrize(
        ("args", "error", "words"),
        [
            ((2, [], 0), ValueError, ["slot", "2"]),
            ((True, [], 0), TypeError, ["slot", "bool"]),
            (("0", [], 0), TypeError, ["slot", "str"]),
            ((0, [1] * 5, 0), ValueError, ["prediction", "4", "5"]),
            ((0, [1, 9], 0), ValueError, ["prediction[1]", "9"]),
            ((0, [2**63 + 5], 0), ValueError, ["prediction[0]", str(2**63 + 5)]),
            ((0, [2**70], 0), (ValueError, TypeError), ["prediction"]),
            *(
                ((0, wrong, 0), TypeError, ["prediction", found])
                for wrong, found in (
                    ([1.5], "float"), ([True], "bool"), (["a"], "<U1"), ([[1]], "2 dimensions"),
                    ([2, True], "[1]: expected an integer, found bool"), ([np.True_, 2], "[0]: "),
                    ([[1], [1, 2]], ""), (None, "NoneType"), (np.array(1), "0 dimensions"),
                    (torch.tensor([1.5]), "float32"), (torch.tensor([True]), "bool"),
                    (torch.ones(3, requires_grad=True), "float32"),
                    (torch.tensor([[1]]), "2 dimensions"), (torch.tensor(1), "0 dimensions"),
                    (torch.tensor([0, 1]).to_sparse(), "Sparse"),
                )
            ),
            ((0, torch.tensor([3, 9]), 0), ValueError, ["prediction[1]", "9"]),
            # The one device besides the CPU that is on every machine.
            ((0, int32(2, device="meta"), 0), ValueError, ["prediction", "CPU", "meta"]),
            ((0, [1], 9), ValueError, ["prompt_len", "8", "9"]),
            ((0, [1], 2.0), TypeError, ["prompt_len", "int", "float"]),
            ((0, [1], None), TypeError, ["prompt_len", "int", "NoneType"]),
            ((0, [1], None, {"context": [1] * 9}), ValueError, ["context", "8", "9"]),
            ((0, [1], None, {"context": [1, -1]}), ValueError, ["context[1]", "-1"]),
            ((0, [1], None, {"context": [1, 2.5]}), TypeError, ["context", "float"]),
            ((0, [1], 1, {"kind": True}), TypeError, ["kind", "TextKind", "bool"]),
            ((0, [1], 1, {"end_tokens": [1.5]}), TypeError, ["end_tokens", "float"]),
            ((0, [1], 1, {"end_tokens": [1, True]}), TypeError, ["end_tokens", "bool"]),
            *(
                ((0, [1], 1, {"temperature": wrong}), error, ["temperature", found])
                for wrong, error, found in (
                    ("1", TypeError, "str"), (True, TypeError, "bool"), (float("nan"), ValueError, "nan"),
                    (-1.0, ValueError, "-1.0"), (-1, ValueError, "-1"), (float("inf"), ValueError, "inf"),
                    (np.float32("-inf"), ValueError, "-inf"),
                )
            ),
        ],
    )  # fmt: skip
    def test_add(self, backend, args, error, words):
        drafter = make(backend)
        args, how = args[:3], dict(*args[3:])
        drafter.add(0, [1, 2], 1)
        before, stats = snapshot(drafter), drafter.prediction_stats
        refused(lambda: drafter.add(*args, **how), error, words)
        assert same(before, drafter)
        assert drafter.prediction_stats == stats

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"slots": int32(1, device="meta").long()}, ValueError, ["meta"]),
            ({"slots": int32(4).long()[::2], "num_sampled": int32(2)}, ValueError, ["slots", "stride"]),
            ({"slots": int32(1, 1).long()}, ValueError, ["slots", "1 dimensions", "(1, 1)"]),
            ({"slots": int32(1)}, TypeError, ["slots", "int64", "int32"]),
            ({"num_sampled": int32(2)}, ValueError, ["num_sampled", "[1]", "[2]"]),
            ({"slots": int32(3).long(), "num_sampled": int32(3)}, ValueError, ["slots", "at most 2", "3"]),
            ({"num_sampled": [1]}, TypeError, ["num_sampled", "list"]),
            ({"new_tokens": int32(1, 2)}, TypeError, ["new_tokens", "int64", "int32"]),
            ({"new_tokens": int32(2, 2).long()}, ValueError, ["new_tokens", "[1, any]", "[2, 2]"]),
            # Values of a row or of the state, which nobody looks at on a GPU.
            *(
                ({"total_len": [n, 0], "num_sampled": [num]}, None, f"total_len[0]: expected 0 to 8, found {n}")
                for n in (9, -1, 2**31 - 1, -(2**31)) for num in (0, 1)
            ),
            ({"num_sampled": [3], "new_tokens": [[4, 5]]}, None, "num_sampled[0]: expected 0 to 2, found 3"),
            ({"total_len": [7, 0], "num_sampled": [2], "new_tokens": [[4, 5]]}, None,
             "num_sampled[0]: expected 0 to 1, found 2"),
            *(({"slots": [n]}, None, f"slots[0]: expected 0 <= slot < 2, found {n}") for n in (2, -1, 2**62)),
            ({"slots": [1, 1], "num_sampled": [1, 2]}, None,
             "slots[1]: expected each slot once, found 1, as in slots[0]"),
        ],
    )  # fmt: skip
    def test_propose(self, backend, change, error, words):
        drafter, good = make(backend), inputs(backend)
        if not error and drafter.device.type != "cpu":
            pytest.skip("values on a GPU are not looked at")
        for slot in (0, 1):
            drafter.add(slot, [1, 2, 3], 0)
        before = snapshot(drafter)
        if not error:
            error, words = ValueError, [words]
            drafter.total_len.copy_(torch.tensor(change.get("total_len", [0, 0])))
            types = {**{name: t.dtype for name, t in good.items()}, "new_tokens": torch.int64}
            change = {n: torch.tensor(change[n], dtype=types[n]) for n in types if n in change}
        # On the drafter's device, but for what stands for another one.
        moved = {n: t for n, t in change.items() if isinstance(t, torch.Tensor) and not t.is_meta}
        change = {**change, **{n: t.to(drafter.device) for n, t in moved.items()}}
        refused(lambda: drafter.propose(**{**good, **change}), error, words)
        assert same(before, drafter)
        drafter.total_len.zero_()
        drafter.propose(**good)

    def test_only_slots_of_the_batch_and_only_what_was_sampled_counts(self, backend):
        """A batch may be filled up with any slot that nothing was sampled for, and other rows hold anything."""
        drafter, good = make(backend), inputs(backend)
        drafter.add(1, [1, 2, 3], 0)
        drafter.total_len[0] = -77
        good["slots"], good["num_sampled"] = (
            torch.tensor(values, dtype=good[name].dtype, device=drafter.device)
            for name, values in (("slots", [1, 1]), ("num_sampled", [0, 1]))
        )
        assert drafter.propose(**good).length.tolist() == [0, 3]


ROWS = {
    "token_ids": int32(2, 8), "total_len": int32(2),
    **dict.fromkeys(["max_slots", "max_context_len", "device"]),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_of_lists(backend):
    """Requests by id, in any slot, as by hand; what is refused changes nothing."""
    sizes = {"max_slots": 2, "max_context_len": 40, "max_prediction_len": 40, "vocab_size": 90}
    drafter = ListDrafter(**sizes, num_draft_tokens=4, device=device_of(backend), backend=backend)
    with pytest.raises(ValueError, match=r"prediction\[0\]: expected 0 <= id < 90"):
        drafter.add("a", [90])
    assert drafter.add("a", distinct(20, 50), [1, 2])
    assert drafter.add(("b", 2), distinct(20, 10), prompt=[3], end_tokens=[13])
    with pytest.raises(ValueError, match="request_id: expected at most 2 requests, found one more"):
        drafter.add("c", [1])
    assert drafter.propose({("b", 2): [10, 11], "a": []}) == {("b", 2): [12, 13], "a": []}
    assert drafter.propose({"a": [50]}) == {"a": [51, 52, 53, 54]}
    assert drafter.propose({}) == {}
    drafter.remove("unknown")
    drafter.remove("a")
    with pytest.raises(KeyError):
        drafter.propose({"a": [51]})
    assert drafter.add("c", distinct(20, 30))
    assert drafter.propose({"c": [30, 31], ("b", 2): []}) == {"c": [32, 33, 34, 35], ("b", 2): []}
    # Preempted, it comes back with its output.
    assert drafter.add(("b", 2), distinct(20, 10), [3, 10, 11, 12], prompt_len=1)
    assert drafter.propose({("b", 2): [13]}) == {("b", 2): [14, 15, 16, 17]}


#: Of `Drafter`: argument, what is given for it, what is said.
WRONG = [
    *(
        ({name: value}, error, f"{name}: expected {said}")
        for name, most in (
            ("max_slots", 2**31 - 1), ("max_context_len", 2**22 - 1), ("max_prediction_len", 2**21 - 1),
            ("num_draft_tokens", 256), ("vocab_size", 2**31 - 2**16), ("max_prediction_tokens", 2**31 - 256),
        )
        for value, error, said in (
            *((size, ValueError, f"1 to {most}, found {size}") for size in (0, most + 1, 10**30)),
            *((size, TypeError, f"an int, found {type(size).__name__}") for size in ("a", 2.0, True, Half())),
        )
    ),
    ({"vocab_size": None}, TypeError, "vocab_size: expected an int, found NoneType"),
    # More predictions than can be addressed.
    ({"max_slots": 2**20, "max_prediction_len": 2**20}, ValueError, "max_prediction_tokens: expected 1 to"),
    ({"config": {"min_match": 2}}, TypeError, "config: expected a DrafterConfig, found dict"),
    ({"config": Half()}, TypeError, "config: expected a DrafterConfig, found Half"),
    ({"recipes": RecipePack({}, [])}, TypeError,
     "recipes: expected Recipes, found RecipePack; call its tokenize(encode)"),
    ({"recipes": []}, TypeError, "recipes: expected Recipes, found list"),
    ({"device": Half()}, TypeError, "device: expected a str or torch.device, found Half"),
    *(({"device": device}, ValueError, f"device: expected 'cpu' or 'cuda', found '{device}'")
      for device in ("gpu", "", "meta")),
    ({"backend": "fast"}, ValueError, "backend: expected"),
    ({"max_slots": None}, TypeError, "max_slots: expected an int, found NoneType"),
    # With rows of the engine.
    *(
        ({**ROWS, **change}, error, message)
        for change, error, message in (
            ({"token_ids": torch.zeros((2, 8))}, TypeError, "token_ids: expected dtype torch.int32, found"),
            ({"token_ids": int32(8)}, ValueError, "token_ids: expected 2 dimensions, found 1"),
            ({"token_ids": int32(8, 2).T}, ValueError, "token_ids: expected stride 1 in the last dimension"),
            ({"token_ids": int32(2, 0)}, ValueError, "max_context_len: expected 1 to 4194303, found 0"),
            ({"token_ids": None}, TypeError, "token_ids: expected a torch.Tensor, found NoneType"),
            ({"token_ids": int32(2, 8, device="meta"), "total_len": int32(2, device="meta")}, ValueError,
             "device: expected 'cpu' or 'cuda', found"),
            ({"total_len": None}, TypeError, "total_len: expected a torch.Tensor, found NoneType"),
            ({"total_len": torch.zeros(2)}, TypeError, "total_len: expected dtype torch.int32, found"),
            ({"total_len": int32(3)}, ValueError, "total_len: expected shape [2], found [3]"),
            ({"total_len": int32(2, device="meta")}, ValueError, "total_len: expected device cpu, found meta"),
            ({"max_slots": 2}, ValueError, "max_slots: expected None beside token_ids, found 2"),
            ({"device": "cpu"}, ValueError, "device: expected None beside token_ids, found 'cpu'"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_the_arguments_of_a_drafter(change, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        make(**change)


@pytest.mark.parametrize(
    ("num_gpus", "device", "expected"),
    [
        *((0, device, "'cpu', for PyTorch sees no GPU") for device in ("cuda:0", torch.device("cuda"))),
        (2, "cuda:2", "'cpu' or one of 2 GPUs"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_there(num_gpus, device, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=f"^{re.escape(f'device: expected {expected}, found ')}"):
        make(device=device)


@pytest.mark.parametrize(
    ("name", "values", "error", "found"),
    [
        ("length_factor", [-1, 0.3, 2.0**30, float("nan"), float("inf")], ValueError, "expected .*, found"),
        ("min_survival", [2, float("nan")], ValueError, "expected .*, found"),
        ("min_survival_lost", [-0.5], ValueError, "expected .*, found"),
        ("min_survival_recipe", [1.5], ValueError, "expected 0 <= p <= 1, found 1.5"),
        ("min_match", [0], ValueError, "expected .*, found"),
        ("length_factor", ["8"], TypeError, "expected a number, found str$"),
        ("min_survival", [True], TypeError, "expected a number, found bool$"),
        ("min_survival_recipe", [None], TypeError, "expected a number, found NoneType$"),
        ("min_match", [2.0], TypeError, "expected an int, found float$"),
        ("use_context", ["no"], TypeError, "expected a bool, found str$"),
        ("survival_table", [5], TypeError, "expected a str or Path, found int$"),
    ],
)
def test_config(name, values, error, found):
    for value in values:
        with pytest.raises(error, match=f"^{name}: {found}"):
            DrafterConfig(**{name: value})


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_predictions_may_be_arrays_and_tensors(dtype):
    array = np.arange(20, dtype=dtype)
    fixed = np.arange(40, dtype=dtype) // 2
    fixed.flags.writeable = False
    views = array, array[::-1][::-1], fixed[::2], torch.from_numpy(array), torch.from_numpy(array)[::1]
    for prediction in views:
        engine = Engine("reference")
        with warnings.catch_warnings():  # its own arguments are of Python 3.11
            warnings.simplefilter("error")
            engine.add(np.int64(0), prediction, [])
        array[5:] = 3  # it is the caller's
        engine.write(0, [0])
        assert engine.propose([0])[0][0] == distinct(16, 1)
        array[:] = np.arange(20)
