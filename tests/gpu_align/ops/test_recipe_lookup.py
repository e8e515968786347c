"""Recipes as tokens: what is refused, the table they become, and looking them up."""

import random
from dataclasses import replace

import numpy as np
import pytest

from gpu_align import DrafterConfig
from gpu_align.ops.constants import (
    ALL_PACKS,
    KEY_BITS,
    MAX_CONTEXT,
    MAX_TOKENS,
    NO_KEY,
    RECIPE_WAYS,
    SHAPE_IDENTIFIER,
    SHAPE_NUMBER,
    SHAPE_SPACE,
    SHAPE_START,
    SHAPE_STRING,
    SURVIVAL_ONE,
)
from gpu_align.ops.recipe_lookup import Recipes, RecipeTable, keys_of
from gpu_align.ops.reference.recipe_lookup import find_recipe
from tests.gpu_align.step_harness import BACKENDS, Request, flat_curves, recipes_of


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
            (((7,), (1,), (0.5,)), r"the context \[7\] is there twice"),
        ],
    )
    def test_what_is_refused(self, recipe, said):
        with pytest.raises(ValueError, match=f"recipe 1: .*{said}"):
            Recipes.from_lists([((7,), (1,), (0.5,)), recipe])


class TestTable:
    def test_what_is_worth_drafting(self):
        recipes = Recipes.from_lists(
            [((1,), (2, 3, 4), (0.75, 0.5, 0.125)), ((2,), (), ()), ((3,), (9,), (0.1,))]
        )
        table = RecipeTable.build(recipes, 64, "cpu", 0.2)
        assert table.max_draft_len.tolist() == [2, 0, 0]
        assert table.expected_accepted.tolist() == [round(1.25 * SURVIVAL_ONE), 0, 0]
        assert table.confidence[0].tolist() == pytest.approx([0.75, 2 / 3, *[0] * 14])
        assert table.token_ids[0, :3].tolist() == [2, 3, 4]

    def test_no_more_than_k(self):
        table = RecipeTable.build(Recipes.from_lists([((1,), range(8), [0.5] * 8)]), 3, "cpu")
        assert (table.max_draft_len.item(), table.expected_accepted.item()) == (3, 3 * SURVIVAL_ONE // 2)

    def test_nothing_from_a_token_on_that_the_model_does_not_have(self):
        """It promises no more than what is drafted of it."""
        recipes = Recipes.from_lists([((1,), (3, 4, 2), (0.75, 0.5, 0.5))])
        for vocab_size, kept in ((4, 1), (5, 3)):
            table = RecipeTable.build(recipes, 64, "cpu", vocab_size=vocab_size)
            assert table.max_draft_len.item() == kept
            assert table.expected_accepted.item() == round(sum([0.75, 0.5, 0.5][:kept]) * SURVIVAL_ONE)

    def test_a_threshold_is_kept_to_the_unit(self):
        survival = np.float32(0.3)
        for threshold, kept in ((0.3, 1), (0.30002, 0)):
            table = RecipeTable.build(Recipes.from_lists([((1,), (2,), (survival,))]), 4, "cpu", threshold)
            assert table.max_draft_len.item() == kept

    def test_none_at_all(self):
        for recipes in (None, Recipes.from_lists([])):
            table = RecipeTable.build(recipes, 4, "cpu")
            assert table.num_recipes == 0
            assert find_recipe(table.numpy(), np.arange(9), 0, ALL_PACKS) == -1

    def test_the_key_of_the_readme(self):
        key = 0x5BD1E995
        for token in (3, 70_000, 131_071):
            key = ((key ^ token) * 0x9E3779B1) % 2**31
        assert keys_of(np.array([[3, 70_000, 131_071, -1, -1, -1, -1, -1]]))[0] == key

    def test_more_recipes_of_a_bucket_than_it_has_places(self):
        """All keys begin with the same bits: the table grows until they part."""
        tokens = np.arange(40_000)
        keys = keys_of(np.stack([tokens, *[np.full_like(tokens, -1)] * 7], axis=1))
        alike = tokens[keys >> (KEY_BITS - 10) == 5][: 2 * RECIPE_WAYS].tolist()
        assert len(alike) == 2 * RECIPE_WAYS
        table = RecipeTable.build(Recipes.from_lists([((t,), (t + 1,), (0.5,)) for t in alike]), 4, "cpu")
        assert len(table.keys) > 1 << 10
        arrays = table.numpy()
        assert [find_recipe(arrays, np.array([t]), 0, ALL_PACKS) for t in alike] == list(range(len(alike)))

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
        assert table.num_recipes == 1
        assert find_recipe(table.numpy(), np.array(second), 0, ALL_PACKS) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_context_is_found(seed):
    rng = random.Random(seed)
    alphabet = rng.choice([2, 3, 50])
    lists = recipes_of(rng, alphabet, rng.choice([1, 10, 300]))
    number = {context: i for i, (context, _, _) in enumerate(lists)}
    arrays = RecipeTable.build(Recipes.from_lists(lists), 8, "cpu").numpy()
    context = np.array([rng.randrange(alphabet) for _ in range(300)], dtype=np.int32)
    for total in range(301):
        tokens = tuple(context[:total].tolist())
        expected = next(
            (number[tokens[-n:]] for n in range(min(8, total), 0, -1) if tokens[-n:] in number), -1
        )
        assert find_recipe(arrays, context[:total], 0, ALL_PACKS) == expected


def test_sizes():
    assert (MAX_CONTEXT, MAX_TOKENS, NO_KEY) == (8, 16, -1)


@pytest.mark.parametrize("backend", BACKENDS)
class TestDrafted:
    """Through a `Drafter`."""

    RECIPES = Recipes.from_lists(
        [
            ((4,), (10, 11), (0.9, 0.5)),
            ((3, 4), (12,), (0.8,)),
            ((5, 3, 4), (), ()),
            ((6,), (99_999,), (0.9,)),
        ]
    )

    def drafted(self, backend, output, prediction=(), **how):
        return Request(backend, list(prediction), recipes=self.RECIPES, use_context=False, **how).step(output)

    def test_where_there_is_nothing_else(self, backend):
        assert self.drafted(backend, [1, 4]) == ([10, 11], 3, pytest.approx([0.9, 0.5 / 0.9], abs=1e-4))
        assert self.drafted(backend, [1, 2]) == ([], 0, [])

    def test_a_longer_context_wins(self, backend):
        assert self.drafted(backend, [3, 4])[0] == [12]

    def test_a_context_that_says_nothing_is_likely(self, backend):
        assert self.drafted(backend, [5, 3, 4])[:2] == ([], 0)

    def test_no_more_than_k_and_the_threshold(self, backend):
        assert self.drafted(backend, [4], K=1)[0] == [10]
        assert self.drafted(backend, [4], min_survival_recipe=0.6)[0] == [10]
        assert self.drafted(backend, [4], min_survival_recipe=0.95)[0] == []

    def test_never_past_the_end_of_the_row(self, backend):
        assert self.drafted(backend, [1, 1, 4], capacity=4)[0] == [10]
        assert self.drafted(backend, [1, 1, 4], capacity=3)[:2] == ([], 0)

    def test_a_token_that_the_model_does_not_have(self, backend):
        assert self.drafted(backend, [6])[:2] == ([], 0)

    def test_the_prediction_goes_first_where_it_promises_more(self, backend):
        text = list(range(100, 120))
        tokens, source, _ = self.drafted(backend, [*text[:5]], [*text[:4], 104, 4, 8, 9])
        assert (tokens[:2], source) == ([4, 8], 1)

    def test_in_a_tie_the_candidate_is_drafted(self, backend):
        for survival, source in ((0.5, 1), (0.5 + 2**-16, 3)):
            recipes = Recipes.from_lists([((4,), (10,), (survival,))])
            curves = flat_curves(SURVIVAL_ONE // 2, K=1)
            request = Request(backend, [7, 4, 9], K=1, curves=curves, recipes=recipes, use_context=False)
            assert request.step([1, 4]).source == source

    def test_in_the_prompt_too(self, backend):
        assert Request(backend, [], [1, 4], recipes=self.RECIPES, use_context=False).step([])[0] == [10, 11]

    def test_what_is_refused(self, backend):
        with pytest.raises(ValueError, match=r"min_survival_recipe: expected 0 <= p <= 1, found 1.5"):
            DrafterConfig(min_survival_recipe=1.5)


NAME, COLON, COMMA, QUOTE = 1, 2, 3, 4  # stay themselves in a shape
SHAPE_OF = np.array([SHAPE_SPACE, 1, 2, 3, 4, *[SHAPE_IDENTIFIER] * 5, *[SHAPE_NUMBER] * 5], dtype=np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
class TestShapes:
    """Through a `Drafter`: tokens 5 to 9 are identifiers, 10 to 14 numbers, those beyond are not known."""

    RECIPES = Recipes.from_lists(
        [
            ((NAME, COLON, SHAPE_IDENTIFIER, COMMA), (20, 21, 22), (0.9, 0.9, 0.9)),
            ((SHAPE_NUMBER, COMMA), (23,), (0.8,)),
            ((SHAPE_STRING, COMMA), (24,), (0.7,)),
            ((SHAPE_START,), (NAME, COLON), (1.0, 1.0)),
            ((SHAPE_START, NAME), (COLON,), (0.95,)),
            ((COMMA, COMMA), (25,), (0.9,)),
            ((NAME, COMMA, COMMA), (), ()),
        ],
        shape_of=SHAPE_OF,
    )

    def drafted(self, backend, output, recipes=None, **how):
        request = Request(
            backend, [], [QUOTE, NAME], recipes=recipes or self.RECIPES, use_context=False, **how
        )
        return request.step(output)[:2]

    @pytest.mark.parametrize("value", [[5], [6, 7, 8], [10, 5], [*range(5, 10)] * 5])
    def test_a_run_of_free_tokens_is_one_item(self, backend, value):
        assert self.drafted(backend, [NAME, COLON, *value, COMMA]) == ([20, 21, 22], 3)

    def test_its_last_token_says_which(self, backend):
        assert self.drafted(backend, [NAME, COLON, 5, 10, COMMA]) == ([23], 3)
        assert self.drafted(backend, [NAME, COLON, 10, 999, COMMA]) == ([24], 3)
        assert self.drafted(backend, [NAME, COLON, 10, 0, COMMA]) == ([], 0)

    def test_what_is_longer_than_the_window(self, backend):
        """28 free tokens, name, colon and comma are 31; with 30 of them the name is out of sight."""
        for num, drafted in ((29, [20, 21, 22]), (30, [])):
            assert self.drafted(backend, [NAME, COLON, *[5] * num, COMMA])[0] == drafted

    def test_the_beginning_of_the_output(self, backend):
        """Of the prompt nothing is seen."""
        assert self.drafted(backend, []) == ([NAME, COLON], 3)
        assert self.drafted(backend, [NAME]) == ([COLON], 3)
        assert self.drafted(backend, [5, NAME]) == ([], 0)

    def test_a_longer_shape_may_say_that_nothing_is_likely(self, backend):
        assert self.drafted(backend, [COLON, COMMA, COMMA]) == ([25], 3)
        assert self.drafted(backend, [NAME, COMMA, COMMA]) == ([], 0)

    def test_a_literal_context_wins(self, backend):
        words = Recipes.from_lists([((COMMA,), (30,), (0.6,))])
        both = Recipes.join({"words": words, "shapes": self.RECIPES})
        assert self.drafted(backend, [NAME, COLON, 5, COMMA], both) == ([30], 3)
        assert self.drafted(backend, [NAME, COLON, 5, COMMA], both, packs=["shapes"]) == ([20, 21, 22], 3)

    def test_but_not_that_of_a_later_pack(self, backend):
        words = Recipes.from_lists([((COMMA,), (30,), (0.6,)), ((9,), (31,), (0.6,))])
        both = Recipes.join({"shapes": self.RECIPES, "words": words})
        assert self.drafted(backend, [NAME, COLON, 5, COMMA], both) == ([20, 21, 22], 3)
        assert self.drafted(backend, [NAME, COLON, 9], both) == ([31], 3)

    def test_of_one_pack_too(self, backend):
        words = Recipes.from_lists([((COMMA,), (30,), (0.6,))])
        joined = Recipes.join({"words": words, "shapes": self.RECIPES})
        one = replace(joined, packs=np.ones(len(joined), dtype=np.int32), names=("both",))
        assert self.drafted(backend, [NAME, COLON, 5, COMMA], one) == ([30], 3)
        assert self.drafted(backend, [5, NAME], one) == ([], 0)

    def test_nothing_is_in_front_of_the_beginning(self, backend):
        lists = [((SHAPE_START, SHAPE_START, NAME), (40,), (0.9,)), ((SHAPE_START, COLON), (41,), (0.9,))]
        recipes = Recipes.from_lists(lists, shape_of=SHAPE_OF)
        assert self.drafted(backend, [NAME], recipes) == ([], 0)
        assert self.drafted(backend, [COLON], recipes) == ([41], 3)

    def test_a_context_is_no_shape(self, backend):
        """The same numbers as a context and as a shape are two keys."""
        words = Recipes.from_lists([((COMMA, COMMA), (31,), (0.6,))])
        assert self.drafted(backend, [COLON, COMMA, COMMA], words) == ([31], 3)
        keys = keys_of(np.array([[3, 3, *[-1] * 6]] * 2), np.array([False, True]))
        assert keys[0] != keys[1]


PACKS = {
    "a": Recipes.from_lists([((4,), (10,), (0.5,)), ((3, 4), (11,), (0.5,))]),
    "b": Recipes.from_lists([((4,), (20,), (0.9,)), ((9,), (21,), (0.9,))]),
    "c": Recipes.from_lists([((3, 4), (30,), (0.9,))]),
}


@pytest.mark.parametrize("backend", BACKENDS)
class TestPacks:
    @pytest.mark.parametrize(
        ("packs", "output", "drafted"),
        [
            (None, [4], [10]),
            (["b", "a"], [4], [10]),
            (["b"], [4], [20]),
            (["c"], [4], []),
            (None, [3, 4], [11]),
            (["b", "c"], [3, 4], [20]),
            (["c"], [3, 4], [30]),
            (["b", "c"], [3, 9], [21]),
            (["b"], [3, 4], [20]),
            (["a"], [9], []),
            ([], [4], []),
        ],
    )
    def test_of_those_that_a_request_uses_the_first_decides(self, backend, packs, output, drafted):
        request = Request(backend, [], recipes=Recipes.join(PACKS), packs=packs, use_context=False)
        assert request.step(output).tokens == drafted

    def test_what_is_refused(self, backend):
        with pytest.raises(ValueError, match=r"recipes: expected names of 'a', 'b', 'c', found 'd'"):
            Request(backend, [], recipes=Recipes.join(PACKS), packs=["d"])
        with pytest.raises(TypeError, match=r"recipes: expected names of packs, found the str 'a'"):
            Request(backend, [], recipes=Recipes.join(PACKS), packs="a")

    def test_more_packs_than_a_bucket_has_ways(self, backend):
        """The first eight with a context can be found; of the others other contexts can."""
        lists = {str(i): [((4,), (100 + i,), (0.9,)), ((5 + i,), (200 + i,), (0.9,))] for i in range(12)}
        joined = Recipes.join({name: Recipes.from_lists(rows) for name, rows in lists.items()})
        for i in (0, 7, 8, 11):
            request = Request(backend, [], recipes=joined, packs=[str(i)], use_context=False)
            assert request.step([4]).tokens == ([100 + i] if i < 8 else [])
            assert request.step([4, 5 + i]).tokens == [200 + i]


class TestJoin:
    def test_what_is_refused(self):
        one = Recipes.from_lists([((4,), (10,), (0.5,))])
        with pytest.raises(ValueError, match="packs: expected 1 to 31, found 32"):
            Recipes.join({str(i): one for i in range(32)})
        with pytest.raises(ValueError, match="packs: expected one pack each, found 2 in 'ab'"):
            Recipes.join({"ab": Recipes.join({"a": one, "b": one})})
        with pytest.raises(ValueError, match="shape_of: expected the item of each token"):
            Recipes(one.context, one.token_ids, one.survival, np.array([True]))

    def test_a_token_that_stays_itself_in_one_stays_itself(self):
        a = Recipes.from_lists([((1,), (2,), (0.5,))], shape_of=np.array([-2, 1, -3], dtype=np.int32))
        b = Recipes.from_lists([((0,), (2,), (0.5,))], shape_of=np.array([0, -4, -4, -4], dtype=np.int32))
        joined = Recipes.join({"a": a, "b": b})
        assert joined.shape_of.tolist() == [0, 1, -3, -4]
        assert (joined.packs.tolist(), joined.names) == ([1, 2], ("a", "b"))


@pytest.mark.parametrize("backend", BACKENDS)
class TestMemory:
    """A text of earlier answers in place of a prediction."""

    ANSWERS = (*range(100, 160), *range(200, 260))

    def test_its_beginning_is_not_drafted(self, backend):
        assert Request(backend, self.ANSWERS).step([]).source == 1
        assert Request(backend, self.ANSWERS, memory=True).step([]) == ([], 0, [])

    def test_what_the_output_has_matched_is(self, backend):
        request = Request(backend, self.ANSWERS, memory=True, K=16)
        tokens, source, _ = request.step([*range(200, 220)])
        assert (tokens, source) == ([*range(220, 236)], 4)
