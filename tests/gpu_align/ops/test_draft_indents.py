"""What tokens do to lines, of tokenizers and of packs; `test_step` has the drafts that are indented."""

from dataclasses import replace

import numpy as np

from gpu_align import RecipePack
from gpu_align.ops.compose import LINE_END, NUM_RUNS
from gpu_align.ops.recipes.table import Recipes
from gpu_align.recipes.tokenize import indents_of
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from tests.gpu_align.ops.test_step import END, layout


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


def test_packs_join():
    """Line ends that one pack knows are line ends."""
    a, b = layout(), layout(150)
    a[NUM_RUNS + END] = 0
    packs = {"a": replace(Recipes.from_lists([]), indents=a), "b": replace(Recipes.from_lists([]), indents=b)}
    joined = Recipes.join({**packs, "c": Recipes.from_lists([])}).indents
    assert joined.tolist() == layout().tolist()
