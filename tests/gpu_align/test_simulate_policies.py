"""Policies in the simulator: with which recipe pack, and predictors by import path, as the docs have one."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_align.policies import PromptLookup
from gpu_align.predictors import InputLookupTokenPredictor, TokenPredictor
from gpu_align.recipes import learn
from gpu_align.simulate import (
    Record,
    load_tokenizer,
    make_policies,
    replay,
    simulate,
)
from gpu_align.tools.html import Origin

TEXT = "alpha beta gamma delta\n"


def encoded(text: str, identifier: str = "a") -> Record:
    pytest.importorskip("mistral_common")
    return Record(identifier, [], [], load_tokenizer("tekken").encode(text), "tekken")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Of a made-up language, so that nothing else knows it."""
    path = tmp_path / "own.json.gz"
    learn([("one", TEXT * 20)]).save(path)
    return path


def test_recipes_draft_and_the_name_says_which(pack: Path) -> None:
    records = [encoded(TEXT)]
    steps = []
    for setting, recipes, name, drafts in (
        ({}, str(pack), f"gpu_align recipes={pack}", True),
        ({"length_factor": 1}, str(pack), f"gpu_align length_factor=1 recipes={pack}", True),
        ({"min_survival_recipe": 1.0}, str(pack), f"gpu_align min_survival_recipe=1.0 recipes={pack}", False),
        ({}, "off", "gpu_align recipes=off", False),
    ):
        [result] = simulate(records, make_policies(["gpu_align"], records, 8, [setting], recipes), 8)
        assert result.name == name
        assert (Origin.RECIPE in result.pairs[0].origins) == drafts
        steps.append(result.steps)
    assert steps[0] < steps[3]


DOCS = Path(__file__).parents[2] / "docs"
RECORDS = [Record("a", prompt=[1, 2, 3], prediction=[4, 5, 6, 7, 8, 9], output=[4, 5, 6, 7, 1, 9])]


@pytest.fixture
def after_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The predictor of the docs, as the module that the docs call it."""
    page = (DOCS / "predictors.md").read_text(encoding="utf-8")
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class AfterPair" in block
    ]
    body = code.split("class AfterPair")[1].strip().splitlines()
    assert 8 <= len(body) <= 10
    (tmp_path / "after_pair.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("after_pair")
    sys.modules.pop("after_pair", None)


def test_a_predictor_of_the_docs_runs_in_the_simulator(after_pair: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from gpu_align.tools.cli import app

    row = {"id": "a", "prompt": [1, 2, 3], "prediction": [4, 5, 6, 7, 8, 9], "output": [4, 5, 6, 7, 1, 9]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    sys.modules.pop("after_pair")
    names = ["cursor", "after_pair:AfterPair"]
    options = [text for name in names for text in ("--policy", name)]
    done = CliRunner().invoke(app, ["simulate", "pairs.jsonl", *options, "--json", "out.json"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert list(found) == names
    # 4; of [5 6 7 8 9] three are right, and 1 follows; 9.
    counts = [found["after_pair:AfterPair"][name] for name in ("steps", "accepted", "rejected")]
    assert counts == [3, 3, 2]


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("gpu_align.predictors:InputLookupTokenPredictor", InputLookupTokenPredictor()),
        ("gpu_align.predictors:InputLookupTokenPredictor?pattern_length=(2,4)&prediction_length=(1,6)",
         InputLookupTokenPredictor((2, 4), (1, 6))),
        ("gpu_align.policies:PromptLookup?pattern_min=2", PromptLookup()),
    ],
)  # fmt: skip
def test_options_of_a_predictor(path: str, same: TokenPredictor) -> None:
    [policy] = make_policies([path], RECORDS, 8)
    assert policy.name == path
    ours, theirs = replay(policy, RECORDS[0], 8), replay(same, RECORDS[0], 8)
    assert (ours.steps, ours.accepted, ours.rejected) == (theirs.steps, theirs.accepted, theirs.rejected)
    policy.dispose()
    with pytest.raises(RuntimeError, match="disposed"):  # figures would not be its own
        replay(policy, RECORDS[0], 8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Class", "cannot import 'no_such_module'"),
        ("gpu_align.predictors:Nothing", "expected a class or a function in 'gpu_align.predictors'"),
        ("gpu_align.predictors:InputLookupTokenPredictor?x=1", "unexpected keyword argument 'x'"),
        ("gpu_align.predictors:InputLookupTokenPredictor?pattern_length", "bad query"),
        ("builtins:dict", "expected a TokenPredictor, found dict"),
    ],
)
def test_bad_import_paths(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_policies([path], RECORDS, 8)
