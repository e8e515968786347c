"""Benchmark programs run, in their smallest sizes, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import edits
from benchmarks.gpu.__main__ import BUDGET, STAGES, Stage

ROOT = Path(__file__).parents[2]
#: Module, options, and a pattern of what it prints.
PROGRAMS = {
    "gpu": ("gpu --dry-run ngram suite --out {out}", "suite"),
    "the names that the ablation replaces": ("quality.ablation --check", ""),
    "what a request announces": (
        "agents announced --schemas {out}/cache.sqlite",
        r"objects, lines +skeleton, gpu_align",
    ),
    # After a change of a kernel: ``python -m benchmarks.compiled.static_check --write``, of all variants.
    "compiled kernels are those of the table": (
        "compiled.static_check --target sm_90 --only 'step 16' --only lcs --only index",
        r"(?s)(\| \w+_kernel.*){6}",
    ),
    "compiled kernels do what references do": ("compiled.machine_code --quick", r"(?s)(_kernel.*){5}"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    line, printed = PROGRAMS[name]
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if line.startswith("compiled"):
        pytest.importorskip("triton.backends.nvidia")
        env["TRITON_INTERPRET"] = "0"
    string = {"type": "string", "description": "Vermilion"}
    names = dict.fromkeys(("first_name", "last_name", "street"), string)
    with sqlite3.connect(tmp_path / "cache.sqlite") as cache:  # as SchemaStore's package has it
        cache.execute("create table responses (value blob)")
        schema = json.dumps({"type": "object", "properties": names})
        cache.execute("insert into responses values (?)", [b"_content" + schema.encode()])
    module, *options = shlex.split(line.format(out=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(printed, done.stdout), done.stdout[-3000:]


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
