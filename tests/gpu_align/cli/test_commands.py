"""Commands: what they print and write, the examples of every ``--help``, and the page of the reference."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("mistral_common")

import gpu_align
from gpu_align import RecipePack
from gpu_align.tools.console import EXAMPLES
from gpu_align.tools.doctor import Finding
from gpu_align.tools.simulate.replay import runnable_policy_names
from tests.gpu_align.recipes.test_learn import records
from tests.gpu_align.test_simulate import lines
from tests.modules import ROOT, command, git, load, python
from vllm_integration.demo.command import EXAMPLE as DEMO

OLD = "def load(path):\n    with open(path) as file:\n        return file.read()\n"
NEW = OLD.replace("load", "read_text")

SCRIPT = load("docs/_scripts/cli_reference.py")
COMMANDS = [" ".join(path) for path, _ in SCRIPT.commands()]


def test_the_page_has_each_command_once() -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").count(SCRIPT.MARK) == 1
    headings = [line[3:] for line in SCRIPT.reference().splitlines() if line.startswith("## ")]
    assert headings == ["gpu-align", *COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = command(*name.split(), "--help")
    assert result.exit_code == 0
    _, examples, lines = result.output.partition("Examples:")
    assert examples
    assert f"gpu-align {name}" in lines


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
    # The demo, the examination and bench have tests of their own.
    monkeypatch.setattr("vllm_integration.demo.run.run_demo", lambda model, out, ngram: 0)
    findings = [Finding("torch", "2.13.0", True)]
    for name in ("examine", "examine_server"):
        monkeypatch.setattr(f"gpu_align.tools.doctor.{name}", lambda *_: findings)
    monkeypatch.chdir(folder)
    result = command(*shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("{") == line.endswith("--json"), "JSON is printed where it is asked for"
    written = [word for before, word in zip(line.split(), line.split()[1:], strict=False)
               if before in ("--json", "--html") and "." in word]  # fmt: skip
    for name in written:
        text = (folder / name).read_text(encoding="utf-8")
        assert "<!doctype html>" in text if name.endswith(".html") else json.loads(text)["version"]


PAIRS = [
    {"id": "a", "prediction": list(range(1, 60)), "output": [*range(1, 30), 99, *range(30, 60)]},
    {"id": "b", "prediction": [], "output": [5, 6, 7]},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress(lines(*PAIRS)))
    return path


def test_every_policy_runs_by_default(pairs: Path, tmp_path: Path) -> None:
    result = command("simulate", pairs, "--json", tmp_path / "o.json", "--html", tmp_path / "o.html")
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
        assert policy["rejected_per_accepted"] == policy["rejected"] / policy["accepted"]
        assert name[:20] in result.output
    assert (tmp_path / "o.html").read_text().startswith("<!doctype html>")


def test_chosen_policies_and_k(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    options = ["--policy", "prompt_lookup", *("--policy", "cursor") * 2, "-k", 8, "--json", out]
    assert command("simulate", pairs, *options).exit_code == 0
    found = json.loads(out.read_text())
    assert (found["num_draft_tokens"], list(found["policies"])) == (8, ["prompt_lookup", "cursor"])
    cursor = found["policies"]["cursor"]["pairs"][0]
    # 1; then 9 + 9 + 9 with full acceptance; 1 accepted of 8 and the 99; then one by one.
    assert (cursor["steps"], cursor["accepted"], cursor["rejected"]) == (1 + 3 + 1 + 30, 25, 7)
    assert command("simulate", pairs, *options, "--draft-in-prefill").exit_code == 0
    cursor = json.loads(out.read_text())["policies"]["cursor"]["pairs"][0]
    # 9 + 9 + 9; 2 accepted of 8 and the 99; then one by one.
    assert (cursor["steps"], cursor["accepted"], cursor["rejected"]) == (3 + 1 + 30, 26, 6)


@pytest.mark.parametrize("package", ["typer", "httpx"])
def test_a_missing_extra_is_one_line(package: str) -> None:
    """In a process of its own, where `package` cannot be imported."""
    code = f"import sys; sys.modules[{package!r}] = None; from gpu_align.tools import main; sys.exit(main())"
    _, told = python(code, "bench", "--base-url", "http://localhost:9/v1", code_of=1)
    assert told == f'error: the gpu-align command needs {package}: pip install ".[cli]" in a checkout'


def test_without_a_terminal_progress_is_a_line_now_and_then(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [f"replaying cursor: {percent} %" for percent in (0, 95, 95, 100)]
    for seconds, expected in ((0.0, told), (900.0, [])):
        monkeypatch.setattr("gpu_align.tools.console.TELL_S", seconds)
        lines = command("simulate", pairs, "--policy", "cursor").stderr.splitlines()
        assert [line.partition(",")[0] for line in lines if line.startswith("replaying")] == expected


TEKKEN = ("--tokenizer", "tekken")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    rows = [
        {"task": task, "prompt": p, "samples": texts} for task, p, texts in records(random.Random(1), 20, 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    path = tmp_path / "outputs.jsonl"
    texts = [text for _, _, group in records(random.Random(2), 5, 1) for text in group]
    texts[0] = texts[0].replace("kind", "sort")
    rows = [{"task": f"task {i % 2}", "prompt": "Write.", "output": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


@pytest.fixture
def pack(tmp_path: Path, samples: Path) -> Path:
    path = tmp_path / "pack.json"
    assert command("recipes", "observe", samples, "-o", path, *TEKKEN).exit_code == 0
    return path


def test_recipes_observe_writes_the_same_pack_plain_and_gzipped(tmp_path: Path, samples: Path) -> None:
    written = []
    for name in ("a.json", "b.json.gz"):
        result = command("recipes", "observe", samples, "-o", tmp_path / name, *TEKKEN)
        assert result.exit_code == 0, result.output
        told = " ".join(result.stdout.split())
        assert "read 20 prompts, 60 samples" in told
        written.append(RecipePack.load(tmp_path / name))
    assert written[0] == written[1]
    assert written[0].task == "records"
    assert f"{len(written[0].observed):,} entries observed" in told
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    packed = tmp_path / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress(samples.read_bytes()))
    named = command("recipes", "observe", packed, "-o", tmp_path / "c.json", *TEKKEN, "--task", "mine")
    assert named.exit_code == 0
    assert RecipePack.load(tmp_path / "c.json").task == "mine"


def test_recipes_report_and_merge(tmp_path: Path, pack: Path, outputs: Path) -> None:
    figures = tmp_path / "r.json"
    result = command("recipes", "report", pack, outputs, *TEKKEN, "--json", figures)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert list(found["tasks"]) == list(found["with_context"]) == ["task 0", "task 1"]
    for task in found["tasks"].values():
        assert list(task) == ["tokens", "drafted", "accepted", "coverage", "accuracy", "tokens_per_step"]
        assert task["coverage"] == task["drafted"] / task["tokens"]
        assert task["accuracy"] == task["accepted"] / task["drafted"] > 0.9
        assert 0.5 < task["coverage"] <= 1
        assert task["tokens_per_step"] > 2
    assert "published" not in result.stdout
    shapes = tmp_path / "shapes.json"
    assert command("recipes", "merge", "--shapes-only", "-o", shapes, pack, "base").exit_code == 0
    assert {entry.is_shape for entry in RecipePack.load(shapes).observed} == {True}


def test_recipes_show(pack: Path) -> None:
    result = command("recipes", "show", pack, "--top", 5, *TEKKEN)
    assert result.exit_code == 0, result.output
    loaded = RecipePack.load(pack)
    assert loaded.content_hash in result.stdout
    assert "records" in result.stdout
    assert "shape" in result.stdout
    assert "#" in command("recipes", "show", pack).stdout  # ids, without a tokenizer
    shipped = command("recipes", "show", "base", "--top", 3)
    assert "95,371 recipes" in shipped.stdout


TEXT = "alpha beta gamma delta\n"


def files(folder: Path, **contents: bytes | str) -> Path:
    """A folder with these files; ``__`` in a name is a slash and ``_`` a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_recipes_learn_makes_a_pack_of_ones_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        files(tmp_path / name, a_py=TEXT * 5, b_txt="epsilon zeta\n" * 5)
    out = tmp_path / "own.json.gz"
    places = tmp_path / "one", tmp_path / "two"
    result = command("recipes", "learn", "--out", out, *places, "--suffix", ".py")
    assert result.exit_code == 0, result.output
    pack = RecipePack.load(out)
    told = " ".join(result.stdout.split())
    assert "read 2 files, 230 bytes, of 2 sources wrote" in told
    assert f"{len(pack.words)} words, {len(pack.recipes)} recipes, {out.stat().st_size:,} bytes" in told
    assert "skipped" not in told
    assert (" beta",) in {recipe.context for recipe in pack.recipes}
    assert " zeta" not in pack.words
    assert set(pack.calibration) == {0.0}
    # Neither where the texts are nor when they were read.
    assert (pack.made_by, str(tmp_path) in str(pack)) == ("gpu-align recipes learn", False)
    before = out.read_bytes()
    assert command("recipes", "learn", "--out", out, *reversed(places), "--suffix", ".py").exit_code == 0
    assert out.read_bytes() == before


def test_recipes_learn_counts_what_is_no_text(tmp_path: Path) -> None:
    files(tmp_path / "a", x=TEXT * 5, y=TEXT * 5, z=b"\xff\xfe\x00", zero=b"a\0b", _hidden=TEXT, _git__x=TEXT)
    os.symlink(tmp_path / "a" / "x", tmp_path / "a" / "link")
    out = tmp_path / "own.json.gz"
    result = command("recipes", "learn", "--out", out, tmp_path / "a")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "read 1 file, 115 bytes, of 1 source; 2 skipped: not UTF-8 text; 1 skipped: the same again" in told
