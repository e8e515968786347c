"""Recipes and indentation as tokens: what is refused, their table, who shares it, and looking them up."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_align import DrafterConfig, RecipePack, Recipes, Source
from gpu_align.ops.choose import SURVIVAL_ONE
from gpu_align.ops.layout import Request, as_arrays
from gpu_align.ops.recipes import ALL_PACKS, LINE_END, NUM_RUNS, RECIPE_WAYS
from gpu_align.ops.recipes import SHAPE_IDENTIFIER as IDENTIFIER
from gpu_align.ops.recipes import SHAPE_SPACE as SPACE
from gpu_align.ops.recipes import SHAPE_START as START
from gpu_align.ops.recipes.reference import find_recipe
from gpu_align.ops.recipes.table import RecipeTable, keys_of
from gpu_align.recipes.tokenize import indents_of
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from tests.gpu_align.engine import BACKENDS, Engine, drafted, flat_curves
from tests.gpu_align.ops.test_step import END, layout
from tests.modules import python


def request_of(tokens: list[int]) -> Request:
    return Request(np.array(tokens), len(tokens), 0, 0, None, None, ALL_PACKS, None, None, None)


class TestFromLists:
    def test_columns(self):
        recipes = Recipes.from_lists([((5, 6), (7, 8, 9), (0.5, 0.5, 0.25)), ((1,), (), ())])
        assert len(recipes) == 2
        assert recipes.context.tolist() == [[6, 5, *[-1] * 6], [1, *[-1] * 7]]
        assert recipes.token_ids.tolist() == [[7, 8, 9, *[-1] * 13], [-1] * 16]
        assert recipes.survival.tolist() == [[0.5, 0.5, 0.25, *[0] * 13], [0] * 16]

    @pytest.mark.parametrize(
        ("recipe", "said"),
        [
            (((), (1,), (0.5,)), "expected a context of 1 to 8 tokens, found 0"),
            ((range(9), (1,), (0.5,)), "expected a context of 1 to 8 tokens, found 9"),
            (((1,), range(17), [0.5] * 17), "expected at most 16 tokens, found 17"),
            (((-1,), (1,), (0.5,)), "expected token ids, found -1"),
            (((1,), (1 << 31,), (0.5,)), "expected token ids, found 2147483648"),
            (((1,), (1, 2), (0.5,)), r"expected 2 probabilities .* found \[0.5\]"),
            (((1,), (1, 2), (0.5, 0.6)), "expected 2 probabilities"),
            (((1,), (1,), (1.5,)), "expected 1 probabilities"),
            (((1,), (1,), (float("nan"),)), "expected 1 probabilities"),
            (((7,), (1,), (0.5,)), r"expected each context once, found \[7\]"),
        ],
    )
    def test_what_is_refused(self, recipe, said):
        for shape_of in (None, np.zeros(9, dtype=np.int32)):
            with pytest.raises(ValueError, match=f"recipe 1: .*{said}"):
                Recipes.from_lists([((7,), (1,), (0.5,)), recipe], shape_of=shape_of)


class TestTable:
    def test_more_recipes_of_a_bucket_than_it_has_places(self):
        """All keys begin with the same bits: the table grows until they part."""
        tokens = np.arange(40_000)
        keys = keys_of(np.stack([tokens, *[np.full_like(tokens, -1)] * 7], axis=1))
        alike = tokens[keys >> 21 == 5][: 2 * RECIPE_WAYS].tolist()
        assert len(alike) == 2 * RECIPE_WAYS
        table = RecipeTable.build(Recipes.from_lists([((t,), (t + 1,), (0.5,)) for t in alike]), 4, "cpu")
        assert len(table.keys) > 1 << 10
        arrays = as_arrays(table)
        assert [find_recipe(arrays, request_of([t])).table_row for t in alike] == list(range(len(alike)))

    def test_contexts_of_many_packs_leave_the_table_small(self):
        """Each of 300 fills a bucket; the first pack's 3,000 others stay."""
        many = {str(n): Recipes.from_lists([((7 * i,), (1,), (0.9,)) for i in range(300)]) for n in range(12)}
        first = Recipes.from_lists([((i, i + 1), (2,), (0.9,)) for i in range(3000)])
        table = RecipeTable.build(Recipes.join({"first": first, **many}), 16, "cpu")
        rows = table.ways[..., 0]
        assert len(table.keys) == 1 << 16
        assert int(((rows >= 0) & (rows < 3000)).sum()) == 3000

    def test_of_two_with_one_key_the_first_is_found(self):
        by_key: dict[int, int] = {}
        tokens = np.random.default_rng(1).integers(0, 1 << 17, (200_000, 2))
        context = np.concatenate([tokens, np.full((len(tokens), 6), -1)], axis=1)
        for i, key in enumerate(keys_of(context).tolist()):
            j = by_key.setdefault(key, i)
            if tokens[i].tolist() != tokens[j].tolist():
                break
        else:
            pytest.fail("no two contexts with one key among so many")
        first, second = tokens[j][::-1].tolist(), tokens[i][::-1].tolist()
        table = RecipeTable.build(
            Recipes.from_lists([(first, (1,), (0.5,)), (second, (2,), (0.5,))]), 4, "cpu"
        )
        assert (table.keys != -1).sum() == 1
        assert find_recipe(as_arrays(table), request_of(second)).table_row == 0


ALONE = DrafterConfig(use_context=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_promises_more_is_drafted(backend):
    """The prediction here; in a tie, too."""
    for survival, source in ((0.5, 1), (0.5 + 2**-16, 3)):
        recipes, curves = (
            Recipes.from_lists([((4,), (10,), (survival,))]),
            flat_curves(SURVIVAL_ONE // 2, K=1),
        )
        config = DrafterConfig(use_context=False, min_survival_lost=0)
        found = drafted(backend, [7, 4, 9], [1, 4], K=1, curves=curves, recipes=recipes, config=config)
        assert found[1] == source


NAME, COMMA = 1, 3  # stay themselves in a shape
SHAPES = Recipes.from_lists(
    [((NAME, IDENTIFIER, COMMA), (20, 21, 22), (0.9, 0.9, 0.9)), ((START, NAME), (23,), (0.95,))],
    shape_of=np.array([SPACE, 1, 2, 3, 4, *[IDENTIFIER] * 5], dtype=np.int32),
)
WORDS = Recipes.from_lists([((COMMA,), (30,), (0.6,))])
BOTH = Recipes.join({"shapes": SHAPES, "words": WORDS})
ONE_PACK = replace(BOTH, packs=np.ones(len(BOTH), dtype=np.int32), names=("both",))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("recipes", "output", "expected"),
    [
        (BOTH, [NAME, 5, COMMA], [20, 21, 22]), (ONE_PACK, [NAME, 5, COMMA], [30]),
        # 29 free tokens, name and comma are 31; with 31 of them the name is out of sight.
        (SHAPES, [NAME, *[5] * 29, COMMA], [20, 21, 22]), (SHAPES, [NAME, *[5] * 31, COMMA], []),
        (SHAPES, [NAME], [23]), (SHAPES, [5, NAME], []),
    ],
)  # fmt: skip
def test_shapes(backend, recipes, output, expected):
    """In one pack a literal context wins. The beginning is that of the output: of the prompt nothing is seen."""
    found = drafted(backend, [], output, [4, NAME], recipes=recipes, config=ALONE)
    assert found[:2] == (expected, 3 if expected else 0)


PACKS = {
    "a": Recipes.from_lists([((4,), (10,), (0.5,)), ((3, 4), (11,), (0.5,))]),
    "b": Recipes.from_lists([((4,), (20,), (0.9,)), ((9,), (21,), (0.9,))]),
    "c": Recipes.from_lists([((3, 4), (30,), (0.9,))]),
}


@pytest.mark.parametrize("backend", BACKENDS)
class TestPacks:
    @pytest.mark.parametrize(
        ("packs", "output", "expected"),
        [
            (None, [4], [10]), (["b", "a"], [4], [10]), (["b"], [4], [20]), (["c"], [4], []), (None, [3, 4], [11]),
            (["b", "c"], [3, 4], [20]), (["c"], [3, 4], [30]), (["b", "c"], [3, 9], [21]), (["a"], [9], []),
            ([], [4], []),
        ],
    )  # fmt: skip
    def test_of_those_that_a_request_uses_the_first_decides(self, backend, packs, output, expected):
        found = drafted(backend, [], output, recipes=Recipes.join(PACKS), packs=packs, config=ALONE)
        assert found[0] == expected

    def test_what_is_refused(self, backend):
        with pytest.raises(ValueError, match=r"recipes: expected names of 'a', 'b', 'c', found 'd'"):
            drafted(backend, [], [], recipes=Recipes.join(PACKS), packs=["d"])
        for wrong, found in (("a", "the str 'a'"), (5, "int")):
            with pytest.raises(TypeError, match=f"recipes: expected names of packs, found {found}"):
                drafted(backend, [], [], recipes=Recipes.join(PACKS), packs=wrong)

    def test_more_packs_than_a_bucket_has_ways(self, backend):
        """The first eight with a context can be found; of the others other contexts can."""
        lists = {str(i): [((4,), (100 + i,), (0.9,)), ((5 + i,), (200 + i,), (0.9,))] for i in range(12)}
        joined = Recipes.join({name: Recipes.from_lists(rows) for name, rows in lists.items()})
        for i in (0, 7, 8, 11):
            how = {"recipes": joined, "packs": [str(i)], "config": ALONE}
            assert drafted(backend, [], [4], **how)[0] == ([100 + i] if i < 8 else [])
            assert drafted(backend, [], [4, 5 + i], **how)[0] == [200 + i]


class TestJoin:
    def test_what_is_refused(self):
        one = Recipes.from_lists([((4,), (10,), (0.5,))])
        with pytest.raises(ValueError, match="names: expected 1 to 31 packs, found 32"):
            Recipes.join({str(i): one for i in range(32)})
        with pytest.raises(ValueError, match="packs: expected one pack each, found 2 in 'ab'"):
            Recipes.join({"ab": Recipes.join({"a": one, "b": one})})
        with pytest.raises(ValueError, match="shape_of: expected the item of each token"):
            Recipes(one.context, one.token_ids, one.survival, np.array([True]))

    def test_more_recipes_than_a_kernel_reaches(self):
        rows = np.broadcast_to(np.int32(-1), (1 << 23, 16))
        recipes = Recipes(rows[:, :8], rows, rows.view(np.float32))
        with pytest.raises(ValueError, match=r"recipes: expected fewer than 2\*\*23, found 8388608"):
            RecipeTable.build(recipes, 16, "cpu")

    def test_a_token_that_stays_itself_in_one_stays_itself(self):
        a = Recipes.from_lists([((1,), (2,), (0.5,))], shape_of=np.array([-2, 1, -3], dtype=np.int32))
        b = Recipes.from_lists([((0,), (2,), (0.5,))], shape_of=np.array([0, -4, -4, -4], dtype=np.int32))
        joined = Recipes.join({"a": a, "b": b})
        assert joined.shape_of.tolist() == [0, 1, -3, -4]
        assert (joined.packs.tolist(), joined.names) == ([1, 2], ("a", "b"))


def test_what_tokens_do_to_lines():
    """Characters: one space, one tab, and the line end; of a real tokenizer runs of many lengths."""
    found = indents_of([], lambda texts: [list(text.encode()) for text in texts])
    assert (found[2], found[3], found[4]) == (32, 9, -1)
    known = {int(t): int(found[NUM_RUNS + t]) for t in np.flatnonzero(found[NUM_RUNS:])}
    assert known == {32: 2, 9: 3, 10: -1}
    pytest.importorskip("mistral_common")
    tekken = load_tokenizer("tekken")
    pack = RecipePack.load().tokenize(lambda texts: [tekken.encode(text) for text in texts])
    assert pack.indents is not None
    for text, what in (("\n", LINE_END), (":\n", LINE_END), (" " * 7, 14), ("\t\t", 5), ("x", 0)):
        [token] = tekken.encode(text)
        assert pack.indents[NUM_RUNS + token] == what, text
        if what > 0:
            assert pack.indents[what] == token


def test_packs_join():
    """Line ends that one pack knows are line ends."""
    a, b = layout(), layout(150)
    a[NUM_RUNS + END] = 0
    packs = {"a": replace(Recipes.from_lists([]), indents=a), "b": replace(Recipes.from_lists([]), indents=b)}
    joined = Recipes.join({**packs, "c": Recipes.from_lists([])}).indents
    assert joined.tolist() == layout().tolist()


def rules() -> Recipes:
    return Recipes.from_lists([((5, 6), (7, 8, 9), (0.9, 0.8, 0.7))])


def made(recipes: Recipes, **changed: Any) -> Engine:
    return Engine(
        "auto", **{"max_slots": 2, "T": 32, "N": 16, "K": 4, "vocab": 50, "recipes": recipes, **changed}
    )


def test_the_same_recipes_are_one_table_that_goes_with_its_drafters() -> None:
    """Made at once, with other sizes, or one by one; what is drafted is as from a table of one's own."""
    recipes, own = rules(), made(rules())
    with ThreadPoolExecutor(8) as pool:
        engines = [*pool.map(made, [recipes] * 8), made(recipes, T=64)]
    tables = {engine.drafter._recipes.keys.data_ptr() for engine in engines}
    assert len(tables) == 1
    assert own.drafter._recipes.keys.data_ptr() not in tables
    before = engines[0].drafter._recipes.ways.clone()
    for engine in (own, *engines):
        engine.add(0, [], [3, 4, 5], [6])
        assert engine.propose([0])[0][::3] == ([7, 8, 9, 6], Source.RECIPE)
    assert before.equal(engines[0].drafter._recipes.ways), "no drafter writes to the table"
    keys = weakref.ref(engines[0].drafter._recipes.keys)
    del engine, engines, recipes
    gc.collect()
    assert keys() is None


@pytest.mark.parametrize(
    "changed",
    [{"K": 2}, {"vocab": 9}, {"config": DrafterConfig(min_survival_recipe=0.75)}],
    ids=["K", "vocabulary", "threshold"],
)
def test_what_changes_the_table_is_not_shared(changed: dict[str, Any]) -> None:
    recipes = rules()
    one, other = (engine.drafter._recipes for engine in (made(recipes), made(recipes, **changed)))
    assert one.keys is not other.keys
    assert (one.ways[..., 1].max(), other.ways[..., 1].max()) == (3, 2)


def test_a_debug_build_does_not_trap_on_keys_that_wrap() -> None:
    """With ``TRITON_DEBUG=1`` a kernel checks sums and products of 32 bits for overflow, when compiled as here."""
    code = """
from dataclasses import replace
from triton.runtime import interpreter
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, debug=True, sanitize_overflow=True)
import torch, numpy as np
from gpu_align import Drafter, Recipes
from gpu_align.texts.several import joined
recipes = Recipes.from_lists([([1, 2], [3, 4], [0.5, 0.5])], shape_of=np.arange(-8, 42, dtype=np.int32).clip(-2))
sizes = dict(max_slots=1, max_context_len=16, max_prediction_len=16, num_draft_tokens=4, vocab_size=50)
drafter = Drafter(**sizes, device="cpu", backend="triton", recipes=recipes)
drafter.add(0, joined([[1, 2, 3, 9, 10, 11, 12], [9, 10, 11, 12]]), 0, temperature=0.7)
total = torch.tensor([6], dtype=torch.int32)
drafter.total_len.copy_(total)
drafter.token_ids[0, :6] = torch.tensor([1, 2, 30, 3, 4, 9])
print(drafter.propose(torch.tensor([0]), total).length.tolist())
"""
    assert python(code, TRITON_INTERPRET="1")[0] == "[3]"
