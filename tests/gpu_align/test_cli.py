"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import gpu_align
from gpu_align.simulate import SWEEP, import_policy, policy_names, runnable_policy_names, setting_name
from gpu_align.tools.cli import app
from tests.gpu_align.test_simulate_records import lines

PAIRS = [
    {"id": "a", "prediction": list(range(1, 60)), "output": [*range(1, 30), 99, *range(30, 60)]},
    {"id": "b", "prediction": [], "output": [5, 6, 7]},
]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress(lines(*PAIRS)))
    return path


def test_every_policy_runs_by_default(pairs: Path, tmp_path: Path) -> None:
    result = run("simulate", pairs, "--json", tmp_path / "o.json", "--html", tmp_path / "o.html")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["num_draft_tokens"] == 32
    assert (found["version"], found["tokenizer"]) == (gpu_align.__version__, None)
    assert found["settings"]["drafter"][0]["length_factor"] == 8
    assert list(found["policies"]) == ["gpu_align recipes=off", *runnable_policy_names()[1:]]
    assert result.stderr.count("gpu_align runs without recipes") == 1
    for name, policy in found["policies"].items():
        assert policy["output_tokens"] == 63
        assert [pair["id"] for pair in policy["pairs"]] == ["a", "b"]
        for count in ("output_tokens", "steps", "accepted", "rejected"):
            assert policy[count] == sum(pair[count] for pair in policy["pairs"])
        assert name[:20] in result.output
    assert (tmp_path / "o.html").read_text().startswith("<!doctype html>")


def test_settings_of_our_drafter(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    options = ["--policy", "gpu_align", "--json", out, "--recipes", "off"]
    chosen = ["--length-factor", 1, "--length-factor", 4, "--min-survival", 0.5]
    assert run("simulate", pairs, *options, *chosen).exit_code == 0
    assert list(json.loads(out.read_text())["policies"]) == [
        "gpu_align length_factor=1 min_survival=0.5 recipes=off",
        "gpu_align length_factor=4 min_survival=0.5 recipes=off",
    ]
    assert run("simulate", pairs, *options, "--sweep").exit_code == 0
    names = list(json.loads(out.read_text())["policies"])
    assert names == [setting_name(setting, "off") for setting in ({}, *SWEEP)]


def test_chosen_policies_and_k(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    options = ["--policy", "prompt_lookup", *("--policy", "cursor") * 2, "-k", 8, "--json", out]
    assert run("simulate", pairs, *options).exit_code == 0
    found = json.loads(out.read_text())
    assert (found["num_draft_tokens"], list(found["policies"])) == (8, ["prompt_lookup", "cursor"])
    cursor = found["policies"]["cursor"]["pairs"][0]
    # 1; then 9 + 9 + 9 with full acceptance; 1 accepted of 8 and the 99; then one by one.
    assert (cursor["steps"], cursor["accepted"], cursor["rejected"]) == (1 + 3 + 1 + 30, 25, 7)
    assert run("simulate", pairs, *options, "--draft-in-prefill").exit_code == 0
    cursor = json.loads(out.read_text())["policies"]["cursor"]["pairs"][0]
    # 9 + 9 + 9; 2 accepted of 8 and the 99; then one by one.
    assert (cursor["steps"], cursor["accepted"], cursor["rejected"]) == (3 + 1 + 30, 26, 6)


@pytest.mark.parametrize("package", ["typer", "rich", "httpx"])
def test_a_missing_extra_is_one_line(package: str) -> None:
    """In a process of its own, where `package` cannot be imported."""
    code = f"import sys; sys.modules[{package!r}] = None; from gpu_align.tools import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "bench", "--base-url", "http://localhost:9/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == f'error: the gpu-align command needs {package}: pip install ".[cli]" in a checkout'
    )


def test_the_command_line_starts_without_torch() -> None:
    """`--help` and completion answer at once."""
    code = (
        "import sys, gpu_align.tools.cli; print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_one_line(pairs: Path) -> None:
    result = run("simulate", pairs, "--policy", "cursor", "--json", "/dev/full")
    assert (result.exit_code, result.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_without_a_terminal_progress_is_a_line_now_and_then(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [f"replaying cursor: {percent} %" for percent in (0, 95, 95, 100)]
    for seconds, expected in ((0.0, told), (900.0, [])):
        monkeypatch.setattr("gpu_align.tools.console.TELL_S", seconds)
        lines = run("simulate", pairs, "--policy", "cursor").stderr.splitlines()
        assert [line.partition(",")[0] for line in lines if line.startswith("replaying")] == expected


def test_version() -> None:
    assert run("--version").output == f"gpu-align {gpu_align.__version__}\n"


def test_policies_are_those_of_simulate() -> None:
    listed = json.loads(run("policies", "--json").output)["policies"]
    assert not run("policies").output.startswith("{")
    assert [policy["name"] for policy in listed] == policy_names()
    found = {policy["name"]: policy for policy in listed}
    assert found["openai"]["options"] == {"lookahead": 16, "resume_after": 32, "resume_delay": 0}
    assert found["prompt_lookup_vllm_2_5"]["options"] == {"pattern_min": 2, "pattern_max": 5}
    assert [name for name, policy in found.items() if not (policy["summary"] and policy["source"])] == []
    for policy in listed[1:]:
        if policy["given_as"] and not policy["needs"]:
            import_policy(policy["given_as"].split("'")[1])  # what is recommended works
