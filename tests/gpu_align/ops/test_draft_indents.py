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
from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from tests.gpu_align.step_harness import BACKENDS, Request

#: Words, line ends, and runs of one to six spaces and of one to three tabs.
END, BLANK, VOCAB = 100, 101, 200
SPACES = {n: 110 + n for n in range(1, 7)}
TABS = {n: 120 + n for n in range(1, 4)}


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


def block(by=0):
    """Four lines, so much further in; a run inside a line stays."""
    n, m = SPACES[2 + by], SPACES[3 + by]
    return (n, 1, 2, 3), (m, 4, 5, 6), (n, 7, SPACES[2], 8), (n, 9)


BEFORE = lines((None, 50), *block())
FEW = lines((None, 50), (SPACES[2], 1, 2, 3), (SPACES[2], 4), (SPACES[3], 5))
OUT = lines((None, 50), (SPACES[3], 1, 2, 3), (SPACES[3], 4), (SPACES[1], 5))
#: An edit that is replayed is not moved again: its tokens are those of the output.
WIDE = [(SPACES[2], 50, 3 * i, 3 * i + 1, 3 * i + 2) for i in range(1, 9)]
MOVED = [(SPACES[4], *words) for _, *words in WIDE]

#: Prediction, prompt, output, what is known of tokens, what is drafted first.
ROWS = {
    "further in": (BEFORE, [1], lines((None, 60), block(2)[0]), table(), lines(*block(2)[1:])),
    "nothing is known": (BEFORE, [1], lines((None, 60), block(2)[0]), None, lines(*block()[1:])),
    "further out": (BEFORE, [1], lines((None, 60), block(-1)[0]), table(), lines(*block(-1)[1:])),
    # A draft ends before a run that no token is: six spaces are the most, one the least.
    "too far in": (FEW, [1], lines((None, 60), (SPACES[6], 1, 2, 3)), table(), lines((SPACES[6], 4))),
    "too far out": (OUT, [1], lines((None, 60), (SPACES[1], 1, 2, 3)), table(), lines((SPACES[1], 4))),
    "from the context": ([], [1], [*BEFORE, *lines((None, 60), block(2)[0])], table(), lines(*block(2)[1:])),
    # No shift is known.
    "spaces became tabs": (BEFORE, [1], [60, END, TABS[2], 1, 2, 3, END], table(), lines(*block()[1:])),
    "no line end before the run": (BEFORE, [1], [60, 61, SPACES[4], 1, 2, 3, END], table(), lines(*block()[1:])),
    "a word in place of the run": (BEFORE, [1], [60, END, 61, 1, 2, 3, END], table(), lines(*block()[1:])),
    "a run in place of a word": (
        [50, END, 61, *lines((None, 1, 2, 3), *block()[1:])], [1],
        lines((None, 60), block()[0]), table(), lines(*block()[1:]),
    ),
    # Where the match goes back to the beginning of the output, no line of the output is known.
    "the prompt tells nothing": (BEFORE, [60, END, SPACES[4]], [1, 2, 3, END], table(), lines(*block()[1:])),
    # What nothing is known of is no line end and no run.
    "beyond the table": (
        [150, 160, *lines((SPACES[2], 1, 2, 3), (SPACES[2], 4))], [1],
        [151, 161, *lines((SPACES[4], 1, 2, 3))], table(130), lines((SPACES[2], 4)),
    ),
    "an edit that is replayed": (
        lines((None, 60), *WIDE), [1], lines((None, 61), *MOVED[:5]), table(), lines(*MOVED[5:])[:16],
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_indentation(backend, name):
    prediction, prompt, output, indents, expected = ROWS[name]
    recipes = None if indents is None else replace(Recipes.from_lists([]), indents=indents)
    request = Request(
        backend, prediction, prompt, K=16, vocab=VOCAB, capacity=256, recipes=recipes,
        length_factor=64, min_survival=0, min_survival_lost=0,
    )  # fmt: skip
    found = request.step(output).tokens
    assert (found if prediction else found[: len(expected)]) == expected


def test_what_tokens_do_to_lines():
    """Characters: one space, one tab, and the line end; of a real tokenizer runs of many lengths."""
    found = indents_of([], lambda texts: [list(text.encode()) for text in texts])
    assert (found[2], found[3], found[4]) == (32, 9, -1)
    known = {int(t): int(found[NUM_RUNS + t]) for t in np.flatnonzero(found[NUM_RUNS:])}
    assert known == {32: 2, 9: 3, 10: -1}
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
        replay(our_drafter([record], recipes=recipes), record, 64).steps
        for recipes in (known, replace(known, indents=None))
    ]
    assert steps[0] <= steps[1] / 3, steps


def test_packs_join():
    """Line ends that one pack knows are line ends."""
    a, b = table(), table(150)
    a[NUM_RUNS + BLANK] = 0
    packs = {"a": replace(Recipes.from_lists([]), indents=a), "b": replace(Recipes.from_lists([]), indents=b)}
    joined = Recipes.join({**packs, "c": Recipes.from_lists([])}).indents
    assert joined is not None
    assert joined.tolist() == table().tolist()
