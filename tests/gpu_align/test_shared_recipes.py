"""Several drafters on one device share the table of their recipes."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gpu_align import DrafterConfig, Recipes, Source
from gpu_align.ops.recipes import RECIPE_LEN
from gpu_align.ops.recipes import table as shared
from gpu_align.ops.recipes.table import RecipeTable
from tests.gpu_align.engine import Engine


def rules() -> Recipes:
    return Recipes.from_lists([((5, 6), (7, 8, 9), (0.9, 0.8, 0.7))])


def made(recipes: Recipes | None, **changed: Any) -> Engine:
    sizes = {"max_slots": 2, "T": 32, "N": 16, "K": 4, "vocab": 50}
    return Engine("auto", **{**sizes, "recipes": recipes, **changed})


def tensors_of(engine: Engine) -> list[torch.Tensor]:
    return [value for value in engine.drafter._recipes if isinstance(value, torch.Tensor)]


def addresses(*engines: Engine) -> set[tuple[int, ...]]:
    return {tuple(t.data_ptr() for t in tensors_of(engine) if t.numel()) for engine in engines}


def propose(engine: Engine) -> Any:
    engine.add(0, [], [3, 4, 5], [6])
    return engine.drafter.propose(*engine.inputs([0]))


def test_one_table_in_memory_and_drafts_as_from_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    build = RecipeTable.build
    monkeypatch.setattr(RecipeTable, "build", lambda *args: built.append(args) or build(*args))
    recipes = rules()
    first, second, own = made(recipes), made(recipes, T=64), made(rules())
    assert len(built) == 2
    assert len(addresses(first, second)) == 1
    assert len(addresses(first, own)) == 2
    wanted = propose(own)
    before = [tensor.clone() for tensor in tensors_of(first)]
    for one in (first, made(recipes)):
        draft = propose(one)
        assert draft.source.tolist() == [Source.RECIPE]
        assert draft.token_ids.tolist() == wanted.token_ids.tolist() == [[7, 8, 9, 6]]
        assert torch.equal(draft.confidence, wanted.confidence)
    assert all(map(torch.equal, before, tensors_of(first))), "no drafter writes to the table"


@pytest.mark.parametrize(
    "changed",
    [{"K": 2}, {"vocab": 9}, {"config": DrafterConfig(min_survival_recipe=0.75)}],
    ids=["K", "vocabulary", "threshold"],
)
def test_what_changes_the_table_is_not_shared(changed: dict[str, Any]) -> None:
    recipes = rules()
    one, other = made(recipes), made(recipes, **changed)
    assert len(addresses(one, other)) == 2
    assert one.drafter._recipes.ways[..., RECIPE_LEN].max() == 3
    assert other.drafter._recipes.ways[..., RECIPE_LEN].max() == 2


def test_a_table_goes_with_its_last_drafter() -> None:
    recipes = rules()
    first, second = made(recipes), made(recipes)
    tables = len(shared._tables)
    del first
    gc.collect()
    assert len(shared._tables[recipes]) == 1
    assert propose(second).length.tolist() == [3]
    del second
    gc.collect()
    assert len(shared._tables[recipes]) == 0
    del recipes
    gc.collect()
    assert len(shared._tables) == tables - 1


def test_drafters_that_are_made_at_once_share_one_table() -> None:
    recipes = rules()
    with ThreadPoolExecutor(8) as pool:
        assert len(addresses(*pool.map(made, [recipes] * 8))) == 1
