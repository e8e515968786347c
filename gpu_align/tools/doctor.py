"""``gpu-align doctor``: what an examination of this machine finds, and the verdict on all of it.

What is found of an engine comes from its plugin, through the entry points of the group ``gpu_align.doctor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlparse
from urllib.request import url2pathname

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from .console import ROOT, check_outputs, counted, option, plugins, server_url, write


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str  #: the thing that was examined
    found: str  #: what was found, in words
    #: True: works; False: drafting does not work because of it; None: says nothing of it
    ok: bool | None = None
    fix: str = ""  #: the command that mends it; of a finding that is not False, what would be better
    detail: bool = False  #: shown with ``-v`` only
    proves: str = ""  #: what works here if no finding is False, for the verdict
    start: str = ""  #: the command that starts it, shown below that verdict
    caveat: str = ""  #: why nothing is proven if no finding is False: it stands in the verdict instead


def verdict(findings: Sequence[Finding]) -> tuple[str, list[Finding]]:
    """In one line whether drafting works here, and the findings that say no; details only where all are."""
    failed = [finding for finding in findings if finding.ok is False]
    if problems := [finding for finding in failed if not finding.detail] or failed:
        return f"not usable: {counted(len(problems), 'problem')}", problems
    if caveat := next(filter(None, (finding.caveat for finding in findings)), ""):
        return caveat, []
    return f"usable: {next(filter(None, (f.proves for f in findings)), 'the library drafts here')}", []


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(arguments: str) -> str:
    """A command line of pip for this interpreter."""
    found = shutil.which("pip")
    ours = found is not None and Path(found).parent.resolve() == Path(sys.prefix, "bin").resolve()
    return f"{'pip' if ours else shlex.quote(sys.executable) + ' -m pip'} {arguments}"


def install_extra(extra: str = "", options: str = "") -> str:
    """The command that installs gpu-align with an extra, from where this one was installed or runs."""
    folder, editable, extras = "", False, f"[{extra}]" if extra else ""
    try:
        text = importlib.metadata.distribution("gpu-align").read_text("direct_url.json")
        source = json.loads(text) if text else {}
        address = urlparse(source.get("url", ""))
        if address.scheme == "file" and "dir_info" in source:
            folder, editable = url2pathname(address.path), source["dir_info"].get("editable")
    except importlib.metadata.PackageNotFoundError:
        if (ROOT / "pyproject.toml").is_file():
            folder, editable = str(ROOT), True
    target = shlex.quote(f"{folder}{extras}") if folder else f'"gpu-align{extras}"' if extra else "gpu-align"
    return pip(f"install {'-e ' if editable else ''}{target}{' ' + options if options else ''}")


@functools.cache
def required(package: str) -> str:
    """The range that gpu-align requires of a package, ``">=2.9,<3"``; empty where it is not known."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("gpu-align") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return ""
    found = (requirement.specifier for requirement in map(Requirement, lines) if requirement.name == package)
    return ",".join(sorted(map(str, next(found, ())), reverse=True))


def fits(package: str, version: str) -> bool:
    """Whether `version` is in the range that gpu-align requires; True where the range is not known."""
    if not (wanted := required(package)):
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def install_package(package: str) -> str:
    return pip(f"install {shlex.quote(package + required(package))}")


#: Seconds; kernels are compiled on a GPU's first use.
_TIME_LIMIT = {"cpu": 60, "cuda": 300}


def draft_for_a_prediction(device: str) -> Finding:
    """Draft for a perfect prediction, in this process: the draft must be its continuation."""
    what = f"drafting on {device}"
    try:
        from ..predictors import PredictedOutputTokenPredictor, PredictorOptions

        prediction = list(range(10, 30))
        drafter = PredictedOutputTokenPredictor(prediction, device=device)
        drafter.reset([1], PredictorOptions(num_draft_tokens=8))
        drafter.push_tokens(prediction[:2])
        drafted = drafter.predict_tokens()
    except Exception as error:  # every failure here is a finding
        return Finding(what, one_line(error), ok=False)
    expected = prediction[2:10]
    if not drafted or drafted != expected[: len(drafted)]:
        return Finding(what, f"expected a draft of {expected}, found {drafted}", ok=False)
    return Finding(what, f"{len(drafted)} of {len(expected)} tokens of a test prediction", ok=True)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def checked(device: str) -> Finding:
    """Run `draft_for_a_prediction` in a process of its own; its finding, or how the process ended."""
    what, limit = f"drafting on {device}", _TIME_LIMIT[device]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", __name__, device]
    try:
        # In a folder of ours: `-m` looks for modules in the current one first, and may find a random.py there.
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, timeout=limit, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return Finding(what, f"no draft within {limit} s", ok=False)
    state, _, found = done.stdout.strip().rpartition("\n")[2].partition("\t")
    if state not in ("ok", "FAIL"):
        last = done.stderr.strip().rpartition("\n")[2]
        return Finding(what, f"exit code {done.returncode}: {last}", ok=False)
    return Finding(what, found, ok=state == "ok")


def examine() -> Iterator[Finding]:
    """Look at everything, and give each finding as soon as it is made."""
    with ThreadPoolExecutor(1) as pool:
        on_cpu = pool.submit(checked, "cpu")
        yield Finding("python", platform.python_version(), detail=True)
        yield Finding("gpu-align", version_of("gpu-align") or f"not installed, runs from {ROOT}")
        core = []
        for name in ("torch", "numpy", "triton"):
            core.append(_core(name, needed=name != "triton" or has_gpu()))
            yield core[-1]
            if name != "torch" and any(finding.ok is False for finding in core):
                return
        yield _gpu()
        yield _kernels()
        yield _references()
        yield from misfits()
        yield from _engines()
        if importlib.util.find_spec("yaml") is None:
            found = "PyYAML is not installed: report reads none"
            yield Finding("step logs", found, fix=install_extra("cli"))
        else:
            yield Finding("step logs", f"PyYAML {version_of('PyYAML')}", ok=True, detail=True)
        yield on_cpu.result()
        if has_gpu():
            yield checked("cuda")


def _core(name: str, needed: bool) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken install fails in many ways; each is a finding
        if isinstance(error, ModuleNotFoundError) and not needed:
            return Finding(name, "not installed; kernels need it, drafting on the CPU does not")
        return Finding(name, one_line(error), ok=False, fix=install_package(name))
    version = str(getattr(module, "__version__", "installed"))
    fit = fits(name, version)
    found = version if fit else f"{version}, expected {required(name)}"
    return Finding(name, found, ok=fit, fix="" if fit else install_package(name))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu() -> Finding:
    import torch

    if has_gpu():
        count = torch.cuda.device_count()
        major, minor = torch.cuda.get_device_capability(0)
        name = torch.cuda.get_device_name(0)
        return Finding("GPU", f"{count} × {name}, compute capability {major}.{minor}", ok=True)
    if not glob.glob("/dev/nvidia[0-9]*"):
        return Finding("GPU", "none")
    if torch.version.cuda is None:
        base = torch.__version__.partition("+")[0]
        torch_fix = pip(f"install --force-reinstall torch=={base}")
        return Finding("GPU", f"torch {torch.__version__} is a CPU build and does not use it", fix=torch_fix)
    return Finding("GPU", f"there is one, and torch {torch.__version__} cannot use it: see nvidia-smi")


def _kernels() -> Finding:
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        found = "interpreted (TRITON_INTERPRET=1): exact, and slow; for tests"
        return Finding("kernels", found, fix="unset TRITON_INTERPRET" if has_gpu() else "")
    if has_gpu():
        return Finding("kernels", "native", ok=True)
    return Finding("kernels", 'not run without a GPU; Drafter(device="cpu") uses the references')


def _references() -> Finding:
    """Whether Numba compiles here: one line of Python, not the references, which take half a minute once."""
    fix = install_extra("numba")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return Finding("references", "plain Python (NUMBA_DISABLE_JIT): exact, and slow")
    try:
        numba = importlib.import_module("numba")
    except ModuleNotFoundError:
        return Finding("references", "plain Python: exact, and slow; Numba compiles them", fix=fix)
    except Exception as error:
        return Finding("references", f"Numba does not start: {one_line(error)}", ok=False, fix=fix)
    try:
        works = numba.njit(lambda x: x + 1)(1) == 2
    except Exception as error:
        return Finding("references", f"Numba does not compile: {one_line(error)}", ok=False, fix=fix)
    return Finding("references", f"compiled by Numba {numba.__version__} when first used", ok=works)


def misfits() -> Iterator[Finding]:
    """Optional parts of transformers and vLLM: one that is built for another torch fails at import, and text
    models with it."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            import torch

            found = f"does not fit torch {torch.__version__}, and text models need none ({one_line(error)})"
            yield Finding(name, found, ok=False, fix=pip(f"uninstall -y {name}"))
        else:
            yield Finding(name, str(getattr(module, "__version__", "installed")), ok=True, detail=True)


def _engines() -> Iterator[Finding]:
    """The findings of each engine's plugin."""
    found = plugins("gpu_align.doctor")
    if not found:
        extra = "vllm" if has_gpu() else "cpu"
        yield Finding("vllm", "not installed; the library works without it", fix=install_extra(extra))
    for plugin in found:
        try:
            of_engine = plugin.load()
        except ModuleNotFoundError as error:
            fix = install_extra(options="--no-deps --force-reinstall")
            yield Finding(f"{plugin.name} plugin", one_line(error), ok=False, fix=fix)
        else:
            yield from of_engine(has_gpu())


def examine_server(url: str, model: str | None, api_key: str | None) -> Iterator[Finding]:
    """Whether the server at `url` gets the `prediction` of a request: a gateway may drop fields that it does
    not know. One small request where it does, two where not."""
    from .bench.client import BenchError, Client, RequestRefusedError

    what, messages = "prediction", [{"role": "user", "content": "Write these words:\n\none two three four"}]
    proves = "the server gets predictions"

    async def ask() -> Finding:
        async with contextlib.aclosing(Client(url, api_key, _TIME_LIMIT["cpu"])) as client:
            await client.choose_model(model)
            answer = await client.stream(messages, 8, "one two three four")
            if answer.accepted is not None:
                found = f"arrives: {answer.accepted} tokens of a test accepted, {answer.rejected} rejected"
                return Finding(what, found, ok=True, proves=proves)
            try:
                await client.stream(messages, 8, {"type": "none"})
            except RequestRefusedError as error:
                if what in str(error):
                    return Finding(what, "arrives; its usage does not come back", ok=True, proves=proves)
                raise
        found = "does not arrive: the server does not draft from it, or a gateway in between drops the field"
        return Finding(what, found, ok=False, fix="gpu-align doctor --base-url http://THE_SERVER_ITSELF/v1")

    try:
        yield asyncio.run(ask())
    except BenchError as error:
        yield Finding(what, str(error), ok=False)


_MARKS = {True: ("ok", "green"), False: ("FAIL", "red"), None: ("", "")}
#: Fields of a `Finding` in the JSON.
_WRITTEN = ("what", "found", "ok", "fix", "detail")


def show(findings: Iterable[Finding], console: Console, verbose: bool = False) -> list[Finding]:
    """Print each finding when it comes, then the verdict and the commands."""
    seen = []
    # On a terminal, a line below the findings says that the examination goes on.
    with console.status("examining …") if console.is_terminal else contextlib.nullcontext():
        for finding in findings:
            seen.append(finding)
            if verbose or not finding.detail:
                mark, style = _MARKS[finding.ok]
                name = f" {finding.what:17} "
                console.print(Text.assemble((f"{mark:4}", style), name, finding.found), soft_wrap=True)
    line, problems = verdict(seen)
    console.print(Text(f"\n{line}", style="bold red" if problems else "bold green"))
    for start in [] if problems else filter(None, (finding.start for finding in seen)):
        console.print(Text(f"  start:\n    {start}"), soft_wrap=True)
    advice = [finding for finding in seen if finding.ok is not False and finding.fix]
    for title, told in (("mend", problems), ("optional", advice)):
        for fix in dict.fromkeys(finding.fix for finding in told):
            names = ", ".join(finding.what for finding in told if finding.fix == fix)
            console.print(
                Text(f"  {title}: {names}\n    {fix}" if fix else f"  {title}: {names}"), soft_wrap=True
            )
    return seen


def doctor_command(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="every line: each private name of vLLM, too")
    ] = False,
    json_out: Annotated[Path | None, option("OUT", "write the findings as JSON", "--json")] = None,
    base_url: Annotated[
        str | None,
        option("URL", "instead: whether predictions arrive at a server, through what is in between"),
    ] = None,
    model: Annotated[str | None, option("NAME", "needed where the server has several")] = None,
    api_key: Annotated[str | None, option("KEY", "of the server", envvar="OPENAI_API_KEY")] = None,
) -> None:
    """Examine this machine: what is installed, whether drafting works, and the command that mends what does not.

    Exit code 0: usable. 1: not usable.
    """
    check_outputs({"--json": json_out}, [])
    if base_url is None:
        examined = examine()
    else:
        examined = examine_server(server_url("--base-url", base_url), model, api_key)
    findings = show(examined, Console(), verbose)
    line, problems = verdict(findings)
    written = [{name: getattr(finding, name) for name in _WRITTEN} for finding in findings]
    fixes = [fix for fix in dict.fromkeys(finding.fix for finding in problems) if fix]
    about = {"version": __version__, "usable": not problems, "verdict": line, "fixes": fixes}
    write(json_out, lambda: {**about, "findings": written})
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    result = draft_for_a_prediction(sys.argv[1])
    print("ok" if result.ok else "FAIL", result.found, sep="\t")
