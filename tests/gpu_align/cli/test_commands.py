"""Commands: what they print and write, the examples of every ``--help``, and the page of the reference."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import gpu_align
from gpu_align import RecipePack
from gpu_align.simulate import runnable_policy_names
from gpu_align.tools.cli import app
from gpu_align.tools.console import EXAMPLES
from gpu_align.tools.doctor import Finding
from tests.gpu_align.test_simulate_records import lines
from tests.modules import ROOT, git, load
from vllm_integration.demo.command import EXAMPLE as DEMO

OLD = "def load(path):\n    with open(path) as file:\n        return file.read()\n"
NEW = OLD.replace("load", "read_text")


SCRIPT = load("docs/_scripts/cli_reference.py")
COMMANDS = [" ".join(path) for path, _ in SCRIPT.commands()]


def test_the_page_has_each_command_once() -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").count(SCRIPT.MARK) == 1
    headings = [line[3:] for line in SCRIPT.reference().splitlines() if line.startswith("## ")]
    assert headings == ["gpu-align", *COMMANDS]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    _, examples, lines = result.output.partition("Examples:")
    assert examples
    assert f"gpu-align {command}" in lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples read."""
    folder = tmp_path_factory.mktemp("examples")
    lines = {
        "pairs.jsonl": {"id": "a", "prediction": [1, 2, 3, 4, 5], "output": [1, 2, 9, 4, 5]},
        "samples.jsonl": {"task": "t", "prompt": "p", "samples": ["one two three", "one two three"]},
        "outputs.jsonl": {"task": "t", "prompt": "p", "output": "one two three"},
    }
    for name, line in lines.items():
        (folder / name).write_text(json.dumps(line) + "\n")
    edits = [
        {
            "id": str(n),
            "prediction": [*range(n, n + 60)],
            "output": [*range(n, n + 40), 7000, *range(n + 41, n + 60)],
        }
        for n in range(5000, 5240, 20)  # neighbours share words, of which a pack is made
    ]
    (folder / "traffic.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
    (folder / "old.py").write_text(OLD)
    (folder / "new.py").write_text(NEW)
    for name in ("one", "two"):
        (folder / "projects" / name).mkdir(parents=True)
        (folder / "projects" / name / "a.py").write_text("alpha beta gamma delta\n" * 5)
    (folder / "packs").mkdir()
    for name in ("one.json.gz", "two.json.gz", "packs/base.json.gz"):
        RecipePack({}, []).save(folder / name)
    (folder / "logs").mkdir()
    shutil.copy(Path(__file__).parents[1] / "step_log.yaml", folder / "logs" / "chatcmpl-1.yaml")
    project = folder / "project"
    project.mkdir()
    git(project, "init", "-q")
    for number, text in enumerate((OLD, NEW, OLD)):
        (project / "file.py").write_text(text)
        git(project, "add", "-A")
        git(project, "commit", "-q", "-m", str(number))
    return folder


@pytest.mark.parametrize("line", [*(line for line in EXAMPLES if " bench " not in line), DEMO])
def test_an_example_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--tokenizer tekken" in line or "--before" in line or "--git" in line:
        pytest.importorskip("mistral_common")
    # The demo, the examination and bench have tests of their own.
    monkeypatch.setattr("vllm_integration.demo.run.run_demo", lambda model, out, ngram: 0)
    findings = [Finding("torch", "2.13.0", True)]
    for name in ("examine", "examine_server"):
        monkeypatch.setattr(f"gpu_align.tools.doctor.{name}", lambda *_: findings)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    written = [word for before, word in zip(line.split(), line.split()[1:], strict=False)
               if before in ("--json", "--html") and "." in word]  # fmt: skip
    for name in written:
        text = (folder / name).read_text(encoding="utf-8")
        assert "<!doctype html>" in text if name.endswith(".html") else json.loads(text)["version"]


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


@pytest.mark.parametrize("package", ["typer", "httpx"])
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


def test_without_a_terminal_progress_is_a_line_now_and_then(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [f"replaying cursor: {percent} %" for percent in (0, 95, 95, 100)]
    for seconds, expected in ((0.0, told), (900.0, [])):
        monkeypatch.setattr("gpu_align.tools.console.TELL_S", seconds)
        lines = run("simulate", pairs, "--policy", "cursor").stderr.splitlines()
        assert [line.partition(",")[0] for line in lines if line.startswith("replaying")] == expected
