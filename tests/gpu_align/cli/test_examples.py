"""The examples of every ``--help`` run, and the page of the reference is made from the commands as they are."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from gpu_align import RecipePack
from gpu_align.tools.cli import app
from gpu_align.tools.console import EXAMPLES
from gpu_align.tools.doctor import Finding
from tests.gpu_align.bench.test_bench_data import git
from tests.modules import ROOT, load
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
    """What the examples find."""
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
