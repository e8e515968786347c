"""`Drafter`: bad input is refused by name, and nothing is lost."""

import re
import warnings

import numpy as np
import pytest
import torch

from gpu_align import Drafter, DrafterConfig, RecipePack
from tests.gpu_align.engine import Engine, same, snapshot
from tests.gpu_align.step_harness import BACKENDS, device_of, distinct


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
    return {
        "token_ids": int32(2, 8, device=device), "total_len": int32(2, device=device),
        "slots": int32(1, device=device).long(), "num_sampled": int32(1, device=device) + 1,
    }  # fmt: skip


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
            ((-1, [], 0), ValueError, ["slot", "-1"]),
            ((True, [], 0), TypeError, ["slot", "bool"]),
            (("0", [], 0), TypeError, ["slot", "str"]),
            ((0, [1] * 5, 0), ValueError, ["prediction", "4", "5"]),
            ((0, [1, 9], 0), ValueError, ["prediction[1]", "9"]),
            ((0, [-1], 0), ValueError, ["prediction[0]", "-1"]),
            ((0, [2**40], 0), ValueError, ["prediction[0]", str(2**40)]),
            ((0, [2**63 + 5], 0), ValueError, ["prediction[0]", str(2**63 + 5)]),
            ((0, [2**70], 0), (ValueError, TypeError), ["prediction"]),
            *(
                ((0, wrong, 0), TypeError, ["prediction", found])
                for wrong, found in (
                    ([1.5], "float"), ([True], "bool"), (["a"], "<U1"), ([[1]], "2 dimensions"),
                    ([[1], [1, 2]], ""), (None, "NoneType"), (np.array(1), "0 dimensions"),
                    (torch.tensor([1.5]), "float32"), (torch.tensor([True]), "bool"),
                    (torch.tensor([[1]]), "2 dimensions"), (torch.tensor(1), "0 dimensions"),
                    (torch.tensor([0, 1]).to_sparse(), "sparse"),
                )
            ),
            ((0, torch.tensor([3, 9]), 0), ValueError, ["prediction[1]", "9"]),
            # The one device besides the CPU that is on every machine.
            ((0, int32(2, device="meta"), 0), ValueError, ["prediction", "CPU", "meta"]),
            ((0, [1], 9), ValueError, ["prompt_len", "8", "9"]),
            ((0, [1], -1), ValueError, ["prompt_len", "-1"]),
            ((0, [1], 2.0), TypeError, ["prompt_len", "int", "float"]),
            ((0, [1], 1, {"end_tokens": [1.5]}), TypeError, ["end_tokens", "float"]),
            ((0, [1], 1, {"end_tokens": 2}), TypeError, ["end_tokens", "int"]),
            ((0, [1], 1, {"temperature": "1"}), TypeError, ["temperature", "str"]),
            ((0, [1], 1, {"temperature": True}), TypeError, ["temperature", "bool"]),
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
            ({"token_ids": torch.zeros((2, 8))}, TypeError, ["token_ids", "int32", "float32"]),
            ({"token_ids": int32(2, 7)}, ValueError, ["token_ids", "[2, 8]", "[2, 7]"]),
            ({"token_ids": int32(8, 2).T}, ValueError, ["token_ids", "stride"]),
            ({"token_ids": int32(2, 8, device="meta")}, ValueError, ["meta"]),
            ({"total_len": torch.zeros(2)}, TypeError, ["total_len", "float32"]),
            ({"slots": int32(1)}, TypeError, ["slots", "int64", "int32"]),
            ({"num_sampled": int32(2)}, ValueError, ["num_sampled", "[1]", "[2]"]),
            ({"slots": int32(3).long(), "num_sampled": int32(3)}, ValueError, ["slots", "at most 2", "3"]),
            ({"num_sampled": [1]}, TypeError, ["num_sampled", "list"]),
            # Values of a row or of the state, which nobody looks at on a GPU.
            *(
                ({"total_len": [n, 0], "num_sampled": [num]}, None, f"total_len[0]: expected 0 to 8, found {n}")
                for n in (9, -1, 2**31 - 1, -(2**31)) for num in (0, 1)
            ),
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
            change = {name: torch.tensor(values, dtype=good[name].dtype) for name, values in change.items()}
        # On the drafter's device, but for what stands for another one.
        moved = {n: t for n, t in change.items() if isinstance(t, torch.Tensor) and not t.is_meta}
        change = {**change, **{n: t.to(drafter.device) for n, t in moved.items()}}
        refused(lambda: drafter.propose(**{**good, **change}), error, words)
        assert same(before, drafter)
        drafter.propose(**good)

    def test_only_slots_of_the_batch_and_only_what_was_sampled_counts(self, backend):
        """A batch may be filled up with any slot that nothing was sampled for, and other rows hold anything."""
        drafter, good = make(backend), inputs(backend)
        drafter.add(1, [1, 2, 3], 0)
        good["total_len"][0] = -77
        good["slots"], good["num_sampled"] = (
            torch.tensor(values, dtype=good[name].dtype, device=drafter.device)
            for name, values in (("slots", [1, 1]), ("num_sampled", [0, 1]))
        )
        assert drafter.propose(**good).length.tolist() == [0, 3]


#: Of `Drafter`: argument, what is given for it, what is said.
WRONG = [
    *(
        ({name: value}, error, f"{name}: expected {said}")
        for name, most in (
            ("max_slots", 2**31 - 1), ("max_context_len", 2**25 - 1), ("max_prediction_len", 2**24 - 1),
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
    ({"device": None}, TypeError, "device: expected a str or torch.device, found NoneType"),
    *(({"device": device}, ValueError, f"device: expected 'cpu' or 'cuda', found '{device}'")
      for device in ("gpu", "", "meta")),
    ({"backend": "fast"}, ValueError, "backend: expected"),
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
        with warnings.catch_warnings(action="error"):
            engine.add(np.int64(0), prediction, [])
        array[5:] = 3  # it is the caller's
        engine.write(0, [0])
        assert engine.propose([0])[0][0] == distinct(16, 1)
        array[:] = np.arange(20)


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.zeros(0, dtype=str), torch.tensor([])])
def test_an_empty_prediction_is_one_of_any_kind(empty):
    engine = Engine("reference")
    assert engine.drafter.add(0, empty, 0)
    engine.add(0, torch.arange(0, 40)[::2], [])
    assert engine.propose([0])[0][0] == list(range(0, 32, 2))
