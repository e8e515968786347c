"""A request that moves from one drafter to another goes on as if it had stayed."""

import pickle
import random

import numpy as np
import pytest
import torch

from gpu_align import Drafter, Recipes
from gpu_align.ops.constants import SEEN
from tests.gpu_align.step_harness import BACKENDS, INTERPRETED, device_of, edited, poison

K, CAPACITY = 8, 300
PACKS = Recipes.join(
    {
        name: Recipes.from_lists([((t,), (t + i, t), (0.9, 0.8)) for t in range(20)])
        for i, name in enumerate("ab", 1)
    }
)


def make(backend, **sizes):
    drafter = Drafter(
        max_slots=4, max_context_len=sizes.get("capacity", CAPACITY), max_prediction_len=300, num_draft_tokens=K,
        vocab_size=100, device=device_of(backend), backend=backend, recipes=sizes.get("recipes", PACKS),
    )  # fmt: skip
    poison(drafter)
    return drafter


def drafted(drafter, slot, tokens):
    device = drafter.device
    token_ids = torch.full((4, CAPACITY), -7, dtype=torch.int32)
    token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    total = torch.full((4,), len(tokens), dtype=torch.int32, device=device)
    slots, one = torch.tensor([slot], device=device), torch.ones(1, dtype=torch.int32, device=device)
    return [tensor.tolist() for tensor in drafter.propose(token_ids.to(device), total, slots, one)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
def test_it_goes_on_as_if_it_had_stayed(backend, seed):
    rng = random.Random(seed)
    prediction = [rng.randrange(20) for _ in range(rng.choice([0, 1, 60, 200]))]
    prompt = [rng.randrange(20) for _ in range(rng.choice([0, 30]))]
    tokens = [*prompt, *edited(rng, prediction, 20, 120)]
    how = {"recipes": rng.choice([None, ["b"], []]), "memory": rng.random() < 0.5}
    here, there = make(backend), make(backend)
    there.add(2, [1, 2, 3], 0)
    here.add(1, prediction, len(prompt), **how)
    there.add(3, [5] * 40, 0)
    done = len(prompt) + 1
    slot, current = 1, here
    for _ in range(4 if backend == "triton" and INTERPRETED else 20):
        stayed = make("reference")
        stayed.add(0, prediction, len(prompt), **how)
        assert drafted(current, slot, tokens[:done]) == drafted(stayed, 0, tokens[:done])
        if rng.random() < 0.4:
            snapshot = pickle.loads(pickle.dumps(current.export_slot(slot)))
            assert str(prediction) not in repr(snapshot)
            current, slot = (there, 3) if current is here else (here, 1)
            assert current.import_slot(slot, snapshot)
            # Nothing is aligned again.
            assert int(current._state.align_state[slot, SEEN]) == done
        done = min(done + rng.choice([1, 1, 5]), len(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_refused(backend):
    drafter = make(backend)
    with pytest.raises(ValueError, match="slot: expected one that holds a request, found 1"):
        drafter.export_slot(1)
    drafter.add(1, [1, 2, 3], 0, recipes=["b"])
    snapshot = drafter.export_slot(1)
    with pytest.raises(ValueError, match=r"snapshot.context_index: expected \[.*found \["):
        make(backend, capacity=5000).import_slot(0, snapshot)
    with pytest.raises(ValueError, match="recipes: expected names of"):
        make(backend, recipes=Recipes.from_lists([((1,), (2,), (0.5,))])).import_slot(0, snapshot)
    for wrong in ("snapshot", None):
        with pytest.raises(TypeError, match="snapshot: expected a SlotSnapshot, found"):
            drafter.import_slot(0, wrong)
    with pytest.raises(ValueError, match="slot"):
        drafter.import_slot(9, snapshot)
    assert np.array_equal(snapshot.prediction, [1, 2, 3])
