"""Benchmark programs run, in their smallest sizes, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import edits
from benchmarks.gpu.__main__ import BUDGET, STAGES, Stage
from benchmarks.learn import samples
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.real_model import rollouts
from gpu_align.drafter import survival

ROOT = Path(__file__).parents[2]
#: Module, options, and a pattern of what it prints.
PROGRAMS = {
    "gpu": ("gpu --dry-run steps suite --out {out}", "suite"),
    "the names that the ablation replaces": ("quality.ablation --check", ""),
    "what a request announces": (
        "agents announced {out}",
        r"objects, lines +skeleton, gpu_align",
    ),
    # After a change of a kernel: ``python -m benchmarks.compiled.static_check --write``, of all variants.
    "compiled kernels are those of the table": (
        "compiled.static_check --target sm_90 --only 'step 16' --only lcs --only index",
        r"(?s)(\| \w+_kernel.*){6}",
    ),
    "compiled kernels do what references do": ("compiled.machine_code --quick", r"(?s)(_kernel.*){5}"),
}


def write_bfcl(folder: Path) -> None:
    """A call in the files of the Berkeley Function Calling Leaderboard."""
    properties = {key: {"type": "string"} for key in ("first_name", "last_name", "street")}
    function = {"name": "find", "parameters": {"type": "dict", "properties": properties}}
    asked = {"id": "0", "question": [[{"role": "user", "content": "Whom?"}]], "function": [function]}
    accepted = {"id": "0", "ground_truth": [{"find": {key: ["Ada"] for key in properties}}]}
    (folder / "possible_answer").mkdir()
    for name in ("live_simple", "simple_python", "multiple", "live_multiple"):
        (folder / f"BFCL_v4_{name}.json").write_text(json.dumps(asked))
        (folder / "possible_answer" / f"BFCL_v4_{name}.json").write_text(json.dumps(accepted))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    line, printed = PROGRAMS[name]
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if line.startswith("compiled"):
        pytest.importorskip("triton.backends.nvidia")
        env["TRITON_INTERPRET"] = "0"
    write_bfcl(tmp_path)
    module, *options = shlex.split(line.format(out=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(printed, done.stdout), done.stdout[-3000:]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of two prompts, in place of a model's."""
    draw, given = random.Random(0), [[1, 2, 3], [4, 5]]
    known = {
        rollouts.unchanged(t): {"samples": [[draw.choices(range(9), k=20) for _ in range(12)] for _ in given]}
        for t in rollouts.TEMPERATURES
    }
    for module in (rollouts, samples):
        monkeypatch.setattr(module, "rollouts", lambda *_: (given, 9, known))


def test_odds_are_learned_from_samples(
    sampled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped, learned = survival.SAMPLED, tmp_path / "samples.json"
    monkeypatch.setattr(survival, "SAMPLED", shipped)  # `main` replaces it for this process
    monkeypatch.setattr(sys, "argv", ["samples", str(learned)])
    samples.main()
    found, expected = (json.loads(path.read_text()) for path in (learned, shipped))
    assert {name: np.shape(found[name]) for name in samples.PARTS} == samples.PARTS
    assert found.keys() == expected.keys()


def test_drafters_are_compared_on_samples(sampled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    add_to_path()
    pytest.importorskip("arctic_inference.suffix_decoding")
    monkeypatch.setattr(rollouts, "IN_TENTH", 1)
    shown = rollouts.samples_block(rollouts.measure_samples()).splitlines()
    assert [line.partition(" @ ")[0].count("|") for line in shown[2:]] == [2] * len(rollouts.TEMPERATURES)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.tests], ids=lambda stage: stage.name)
def test_the_check_of_a_gpu_runs_tests_that_exist(stage: Stage) -> None:
    paths = [name for name in (*stage.tests, *stage.dry_tests) if "/" in name]
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_the_stages_of_a_gpu_fit_into_its_time() -> None:
    assert sum(stage.seconds for stage in STAGES) <= BUDGET
    assert [stage.name for stage in STAGES[:2]] == ["dense", "experts"]


#: Bytes of a GPU's memory, and model: its layers that fit, and how many such engines at a time.
FITTING = [
    ("H100", 84e9, "dense", (32, 1)),
    ("H100", 84e9, "experts", (41, 1)),
    ("H200", 149.6e9, "dense", (32, 2)),
    ("H200", 149.6e9, "experts", (48, 1)),
]


@pytest.mark.parametrize(("gpu", "memory", "model", "expected"), FITTING)
def test_engines_that_fit_on_a_gpu(gpu: str, memory: float, model: str, expected: tuple[int, int]) -> None:
    assert edits.fitting(edits.SHAPES[model], memory) == expected


def test_the_shapes_have_as_many_parameters_as_their_names_say() -> None:
    for model, billions in (("dense", 8.05), ("experts", 30.5)):
        rest, layer = edits.bytes_of(edits.SHAPES[model], 0)
        parameters = (rest + layer * edits.SHAPES[model]["num_hidden_layers"]) / 2e9
        assert parameters == pytest.approx(billions, rel=0.01)
