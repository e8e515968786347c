"""The two faults of vLLM's V1 rejection sampler, met in vLLM's own functions and mended in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler

from vllm_integration.seams.install import wrapped_by
from vllm_integration.worker import proposer_v1 as rejection


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with our wrappers, whether or not an engine of this process has put them there."""
    for name, wrapper in (
        ("apply_sampling_constraints", rejection.constraints),
        ("expand_batch_to_tokens", rejection.expand),
    ):
        original = getattr(rejection_sampler, name)
        original = getattr(original, "__wrapped__", original)
        monkeypatch.setattr(rejection_sampler, name, wrapped_by(wrapper)(original))
    return rejection_sampler


def sampling(*, temperature: list[float], top_k: list[int]) -> Any:
    return SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=None,
    )


def test_a_step_without_drafts_has_nothing_to_constrain(mended: Any) -> None:
    logits = torch.zeros((0, 11))
    given = sampling(temperature=[1.0, 0.0], top_k=[3, 11])
    assert mended.apply_sampling_constraints(logits, torch.tensor([0, 0], dtype=torch.int32), given) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_each_draft_gets_the_value_of_its_request(mended: Any, dtype: torch.dtype) -> None:
    x, ends = torch.tensor([7, 0, 5, 9], dtype=dtype), torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    expanded = mended.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
    assert expanded.tolist() == [7, 7, 1, 1, 1, 9]
    assert expanded.dtype == dtype
    assert x.tolist() == [7, 0, 5, 9]
    assert mended.expand_batch_to_tokens(x, ends * 0, 0).tolist() == []
    assert mended.expand_batch_to_tokens(x * 0 + 1, ends, 6).tolist() == [1] * 6  # nothing is replaced


def test_drafts_are_scaled_and_masked_by_their_own_request(mended: Any) -> None:
    """A greedy request keeps its logits; one at a temperature has them divided, and `top_k` of them left."""
    row = torch.tensor([1.0, 4.0, 2.0, 3.0])
    given = sampling(temperature=[0.0, 0.5], top_k=[4, 2])
    ends = torch.tensor([1, 3], dtype=torch.int32)
    constrained = mended.apply_sampling_constraints(row.repeat(3, 1), ends, given)
    none = -float("inf")
    assert constrained.tolist() == [[1.0, 4.0, 2.0, 3.0], [none, 8.0, none, 6.0], [none, 8.0, none, 6.0]]
