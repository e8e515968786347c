"""Comparing two benchmark runs, plotting one, and the batches that the contestants are timed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import compare
from benchmarks.speed.workload import STATES, STEP_TOKENS, Steps, make_texts

MACHINE = {"gpu": "none", "cpu": "a CPU", "python": "3.12"}


def row(name: str, median: float, iqr: float, **more: Any) -> dict[str, Any]:
    """One benchmark as pytest-benchmark writes it; seconds."""
    stats = {"median": median * 1e-6, "iqr": iqr * 1e-6}
    test = f"test_{name}[64-1024-lost]"
    base = {"name": test, "fullname": f"benchmarks/t.py::T::{test}", "params": {"batch": 64, "size": 1024}}
    group = "step, batch 64, 1024 tokens, lost"
    return {**base, "group": group, "stats": stats, "extra_info": {}, **more}


def write_run(path: Path, *rows: dict[str, Any], machine: dict[str, str] = MACHINE) -> str:
    path.write_text(json.dumps({"machine_info": {"gpu_align": machine}, "benchmarks": rows}))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "code", "verdict"),
    [
        ((100, 2), (103, 2), 0, "same"),  # within a tenth
        ((100, 2), (115, 2), 1, "SLOWER"),
        ((100, 20), (115, 2), 0, "same"),  # within the noise of the old run
        ((100, 2), (115, 20), 0, "same"),  # … of the new one
        ((100, 2), (80, 2), 0, "faster"),
        ((100, 30), (80, 2), 0, "same"),
    ],
)
def test_slower_is_beyond_the_noise(
    old: tuple[float, float], new: tuple[float, float], code: int, verdict: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    runs = [write_run(tmp_path / f"{i}.json", row("cpu", *times)) for i, times in enumerate((old, new))]
    assert compare.main(runs) == code
    assert capsys.readouterr().out.split()[0] == verdict


def test_other_machines_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_run(tmp_path / "old.json", row("cpu", 100, 1))
    new = write_run(tmp_path / "new.json", row("cpu", 100, 1), machine={**MACHINE, "cpu": "another"})
    assert compare.main([old, new]) == 2
    assert "cpu: a CPU → another" in capsys.readouterr().out
    assert compare.main([old, new, "--any-machine"]) == 0


@pytest.mark.parametrize("state", STATES)
def test_the_states_of_a_batch(state: str) -> None:
    texts = make_texts(4, 160, state)
    same = (texts.outputs == texts.predictions).all(axis=1).tolist()
    assert same == {"aligned": [True] * 4, "lost": [False] * 4, "mixed": [False, True] * 2}[state]
    assert texts.done == 80
    steps = Steps(texts, "cpu")
    for _ in range(12):  # goes back to the middle on the way
        steps.advance()
        steps.check()
        written = int(steps.total_len[0])
        assert written % STEP_TOKENS == 0
        lost = texts.outputs[:, written - 1] != texts.predictions[:, written - 1]
        assert lost.tolist() == [not value for value in same]
    with pytest.raises(ValueError, match="state: expected one of aligned"):
        make_texts(1, 160, "other")
    with pytest.raises(ValueError, match="num_text: expected 128 or more"):
        make_texts(1, 100, state)
