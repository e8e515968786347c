"""A draft is indented like the output: blocks that are copied further in or further out."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from gpu_align import RecipePack
from gpu_align.arena import PredictionArena
from gpu_align.ops.constants import LINE_END, NUM_RUNS
from gpu_align.ops.recipe_lookup import Recipes
from gpu_align.recipes.tokenize import indents_of
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import replay_batched
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from tests.gpu_align.step_harness import BACKENDS, Request

#: Words, line ends, and runs of one to six spaces and of one to three tabs.
END, BLANK = 100, 101
SPACES = {n: 110 + n for n in range(1, 7)}
TABS = {n: 120 + n for n in range(1, 4)}
VOCAB = 200


def table(vocab: int = VOCAB):
    indents = np.zeros(NUM_RUNS + vocab, dtype=np.int32)
    indents[:NUM_RUNS] = -1
    for kind, runs in enumerate((SPACES, TABS)):
        for n, token in runs.items():
            indents[2 * n + kind], indents[NUM_RUNS + token] = token, 2 * n + kind
    indents[[NUM_RUNS + END, NUM_RUNS + BLANK]] = LINE_END
    return indents


def lines(*rows):
    """Tokens of lines: each an indentation token (or None) and its words."""
    return [token for run, *words in rows for token in ([] if run is None else [run]) + words + [END]]


def draft_of(backend, prediction, output, indents, prompt=(1,)):
    recipes = None if indents is None else replace(Recipes.from_lists([]), indents=indents)
    request = Request(
        backend, prediction, prompt, K=16, vocab=VOCAB, capacity=256, recipes=recipes,
        length_factor=64, min_survival=0, min_survival_lost=0,
    )  # fmt: skip
    return request.step(output).tokens


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


BLOCK = (SPACES[2], 1, 2, 3), (SPACES[3], 4, 5, 6), (SPACES[2], 7, SPACES[2], 8), (SPACES[2], 9)


def test_a_block_further_in(backend):
    """Every line is moved by as much as the one before, deeper ones too; a run inside a line stays."""
    prediction = lines((None, 50), *BLOCK)
    output = lines((None, 60), (SPACES[4], 1, 2, 3))
    moved = lines((SPACES[5], 4, 5, 6), (SPACES[4], 7, SPACES[2], 8), (SPACES[4], 9))
    assert draft_of(backend, prediction, output, table()) == moved
    assert draft_of(backend, prediction, output, None) == lines(*BLOCK[1:])


def test_a_block_further_out(backend):
    prediction = lines((None, 50), *BLOCK)
    output = lines((None, 60), (SPACES[1], 1, 2, 3))
    moved = lines((SPACES[2], 4, 5, 6), (SPACES[1], 7, SPACES[2], 8), (SPACES[1], 9))
    assert draft_of(backend, prediction, output, table()) == moved


def test_a_draft_ends_before_a_run_that_no_token_is(backend):
    """Six spaces are the most: the line that would need seven is not drafted, nor what follows."""
    prediction = lines((None, 50), (SPACES[2], 1, 2, 3), (SPACES[2], 4), (SPACES[3], 5))
    output = lines((None, 60), (SPACES[6], 1, 2, 3))
    assert draft_of(backend, prediction, output, table()) == lines((SPACES[6], 4))
    out = lines((None, 50), (SPACES[3], 1, 2, 3), (SPACES[3], 4), (SPACES[1], 5))
    assert draft_of(backend, out, lines((None, 60), (SPACES[1], 1, 2, 3)), table()) == lines((SPACES[1], 4))


def test_from_the_context(backend):
    """The second copy of a block, further in than the first, without a prediction."""
    output = lines((None, 50), *BLOCK, (None, 60), (SPACES[4], 1, 2, 3))
    moved = lines((SPACES[5], 4, 5, 6), (SPACES[4], 7, SPACES[2], 8), (SPACES[4], 9))
    assert draft_of(backend, [], output, table())[: len(moved)] == moved


@pytest.mark.parametrize(
    ("before", "here"),
    [
        pytest.param([60], TABS[2], id="spaces became tabs"),
        pytest.param([60, 61], SPACES[4], id="no line end before the run"),
        pytest.param([60, END], 61, id="a word in place of the run"),
    ],
)
def test_no_shift_is_known(backend, before, here):
    prediction = lines((None, 50), *BLOCK)
    end = [END] if before == [60] else []
    output = [*before, *end, here, 1, 2, 3, END]
    assert draft_of(backend, prediction, output, table()) == lines(*BLOCK[1:])


def test_the_prompt_tells_nothing(backend):
    """Where the match goes back to the beginning of the output, no line of the output is known."""
    prediction = lines((None, 50), *BLOCK)
    drafted = draft_of(backend, prediction, [1, 2, 3, END], table(), prompt=[60, END, SPACES[4]])
    assert drafted == lines(*BLOCK[1:])


def test_tokens_beyond_the_table(backend):
    """What nothing is known of is no line end and no run."""
    prediction = [150, 160, *lines((SPACES[2], 1, 2, 3), (SPACES[2], 4))]
    output = [151, 161, *lines((SPACES[4], 1, 2, 3))]
    assert draft_of(backend, prediction, output, table(130)) == lines((SPACES[2], 4))


def test_what_tokens_do_to_lines():
    """Characters: one space, one tab, and the line end; of a real tokenizer runs of many lengths."""
    found = indents_of([], lambda texts: [list(text.encode()) for text in texts])
    assert (found[2], found[3], found[4]) == (32, 9, -1)
    assert {int(t): int(found[NUM_RUNS + t]) for t in np.flatnonzero(found[NUM_RUNS:])} == {
        32: 2,
        9: 3,
        10: -1,
    }
    tekken = load_tokenizer("tekken")
    pack = RecipePack.load().tokenize(lambda texts: [tekken.encode(text) for text in texts])
    assert pack.indents is not None
    for text, what in (("\n", LINE_END), (":\n", LINE_END), (" " * 7, 14), ("\t\t", 5), ("x", 0)):
        [token] = tekken.encode(text)
        assert pack.indents[NUM_RUNS + token] == what, text
        if what > 0:
            assert pack.indents[what] == token


def test_a_class_in_a_new_block():
    """A class put into an ``if``, every line four further in: with Tekken a third of the steps at most."""
    tekken = load_tokenizer("tekken")
    body = inspect.getsource(PredictionArena)
    moved = "".join(f"    {line}" if line.strip() else line for line in body.splitlines(keepends=True))
    record = Record("", [], tekken.encode(body), tekken.encode(f"if TYPE_CHECKING:\n{moved}"), "tekken")
    known = RecipePack.load().tokenize(lambda texts: [tekken.encode(text) for text in texts])
    steps = [
        replay_batched([record], 64, recipes=recipes).pairs[0].steps
        for recipes in (known, replace(known, indents=None))
    ]
    assert steps[0] <= steps[1] / 3, steps


def test_an_edit_that_is_replayed_is_not_moved_again(backend):
    """The two mechanisms meet: an edit's tokens are those of the output, and stand as far in as they should."""
    rows = [(SPACES[2], 50, 3 * i, 3 * i + 1, 3 * i + 2) for i in range(1, 9)]
    moved = [(SPACES[4], *words) for _, *words in rows]
    drafted = draft_of(backend, lines((None, 60), *rows), lines((None, 61), *moved[:5]), table())
    assert drafted == lines(*moved[5:])[: len(drafted)]
    assert len(drafted) == 16


def test_packs_join():
    """Line ends that one pack knows are line ends."""
    a, b = table(), table(150)
    a[NUM_RUNS + BLANK] = 0
    packs = {"a": replace(Recipes.from_lists([]), indents=a), "b": replace(Recipes.from_lists([]), indents=b)}
    joined = Recipes.join({**packs, "c": Recipes.from_lists([])}).indents
    assert joined is not None
    assert joined.tolist() == table().tolist()
