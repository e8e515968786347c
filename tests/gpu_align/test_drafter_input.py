"""`Drafter`: bad input is refused by name, and nothing is lost."""

import pytest
import torch

from gpu_align import Drafter, DrafterConfig
from tests.gpu_align.engine import Engine, distinct, same, snapshot


class TestBadInput:
    def make(self, **change):
        sizes = {
            "max_slots": 2,
            "max_context_len": 8,
            "max_prediction_len": 4,
            "num_draft_tokens": 3,
            "vocab_size": 9,
        }
        return Drafter(**{**sizes, **change}, device="cpu")

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
            ((0, [2**40], 0), ValueError, ["prediction[0]"]),
            ((0, [2**70], 0), (ValueError, TypeError), ["prediction"]),
            ((0, [1.5], 0), TypeError, ["prediction", "float"]),
            ((0, [True], 0), TypeError, ["prediction", "bool"]),
            ((0, ["a"], 0), TypeError, ["prediction"]),
            ((0, [[1]], 0), TypeError, ["prediction", "2 dimensions"]),
            ((0, [[1], [1, 2]], 0), TypeError, ["prediction"]),
            ((0, None, 0), TypeError, ["prediction", "NoneType"]),
            ((0, [1], 9), ValueError, ["prompt_len", "8", "9"]),
            ((0, [1], -1), ValueError, ["prompt_len", "-1"]),
        ],
    )
    def test_add(self, args, error, words):
        drafter = self.make()
        drafter.add(0, [1, 2], 1)
        before, stats = snapshot(drafter), drafter.prediction_stats
        with pytest.raises(error) as caught:
            drafter.add(*args)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert same(before, drafter)
        assert drafter.prediction_stats == stats

    def test_remove(self):
        with pytest.raises(ValueError, match=r"slot: expected 0 <= slot < 2, found 7"):
            self.make().remove(7)

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"token_ids": torch.zeros((2, 8))}, TypeError, ["token_ids", "int32", "float32"]),
            (
                {"token_ids": torch.zeros((2, 7), dtype=torch.int32)},
                ValueError,
                ["token_ids", "[2, 8]", "[2, 7]"],
            ),
            ({"token_ids": torch.zeros((8, 2), dtype=torch.int32).T}, ValueError, ["token_ids", "stride"]),
            (
                {"token_ids": torch.zeros((2, 8), dtype=torch.int32, device="meta")},
                ValueError,
                ["cpu", "meta"],
            ),
            ({"total_len": torch.zeros(2)}, TypeError, ["total_len", "float32"]),
            (
                {"total_len": torch.tensor([9, 0], dtype=torch.int32)},
                ValueError,
                ["total_len[0]", "at most 8", "9"],
            ),
            ({"slots": torch.zeros(1, dtype=torch.int32)}, TypeError, ["slots", "int64", "int32"]),
            ({"slots": torch.tensor([5])}, ValueError, ["slots", "5"]),
            ({"slots": torch.tensor([-1])}, ValueError, ["slots", "-1"]),
            ({"num_sampled": torch.zeros(2, dtype=torch.int32)}, ValueError, ["num_sampled", "[1]", "[2]"]),
            (
                {
                    "slots": torch.zeros(3, dtype=torch.int64),
                    "num_sampled": torch.zeros(3, dtype=torch.int32),
                },
                ValueError,
                ["slots", "at most 2", "3"],
            ),
            ({"num_sampled": [1]}, TypeError, ["num_sampled", "list"]),
        ],
    )
    def test_propose(self, change, error, words):
        good = {
            "token_ids": torch.zeros((2, 8), dtype=torch.int32),
            "total_len": torch.zeros(2, dtype=torch.int32),
            "slots": torch.zeros(1, dtype=torch.int64),
            "num_sampled": torch.ones(1, dtype=torch.int32),
        }
        drafter = self.make()
        with pytest.raises(error) as caught:
            drafter.propose(**{**good, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
        drafter.propose(**good)

    @pytest.mark.parametrize(
        ("name", "most"),
        [
            ("max_slots", None),
            ("max_context_len", 2**25 - 1),
            ("max_prediction_len", 2**24 - 1),
            ("num_draft_tokens", 256),
            ("vocab_size", None),
            ("max_prediction_tokens", None),
        ],
    )
    def test_sizes(self, name, most):
        domain = "1 or more" if most is None else f"1 to {most}"
        with pytest.raises(ValueError, match=rf"^{name}: expected {domain}, found 0"):
            self.make(**{name: 0})
        if most is not None:
            with pytest.raises(ValueError, match=rf"^{name}: expected {domain}, found {most + 1}"):
                self.make(**{name: most + 1})

    def test_backend(self):
        with pytest.raises(ValueError, match="backend"):
            Drafter(
                max_slots=1, max_context_len=1, max_prediction_len=1, num_draft_tokens=1, vocab_size=1,
                device="cpu", backend="fast",
            )  # fmt: skip

    @pytest.mark.parametrize(
        "setting",
        [
            {"length_factor": -1},
            {"length_factor": 0.3},
            {"min_survival": 2},
            {"min_survival_lost": -0.5},
            {"min_match": 0},
            {"min_context_match": 65},
        ],
    )
    def test_config(self, setting):
        with pytest.raises(ValueError, match=next(iter(setting))):
            DrafterConfig(**setting)


def test_predictions_may_be_numpy_arrays():
    numpy = pytest.importorskip("numpy")
    engine = Engine("reference")
    engine.add(0, numpy.arange(20, dtype=numpy.int64), [])
    engine.write(0, [0])
    assert engine.propose([0])[0][0] == distinct(16, 1)
