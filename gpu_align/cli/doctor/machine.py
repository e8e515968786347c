"""The examination: the machine and the library here, vLLM in `vllm`."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import platform
from collections.abc import Iterator

from gpu_align.cli.doctor import fixes
from gpu_align.cli.doctor.finding import Finding
from gpu_align.cli.doctor.self_check import SelfCheck, one_line
from gpu_align.cli.doctor.vllm import vllm_findings

#: Optional parts of transformers and vLLM. One that does not fit torch fails at import, and text models with it.
_MUST_FIT_TORCH = ("torchvision", "torchaudio", "torchcodec")


def examine(deep: bool = False) -> Iterator[Finding]:
    """Look at everything, and give each finding as soon as it is made.

    deep: import vLLM, too, and look its names up there instead of in its sources.
    """
    on_cpu = SelfCheck("cpu")
    try:
        yield Finding("python", platform.python_version(), detail=True)
        yield _gpu_align()
        core = []
        for name in ("torch", "triton", "numpy"):
            core.append(_core(name))
            yield core[-1]
        if any(finding.ok is False for finding in core):
            return
        yield _gpu()
        yield _kernels()
        yield _references()
        yield from filter(None, map(_misfit, _MUST_FIT_TORCH))
        yield from vllm_findings(_has_gpu(), deep)
        yield _step_logs()
        yield on_cpu.finding()
        if _has_gpu():
            yield SelfCheck("cuda").finding()
    finally:
        on_cpu.stop()


def _gpu_align() -> Finding:
    version = fixes.version_of("gpu-align")
    if version is None:
        return Finding("gpu-align", f"not installed, runs from {fixes.ROOT}")
    return Finding("gpu-align", version)


def _core(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken install fails in many ways; each is a finding
        return Finding(name, one_line(error), ok=False, fix=fixes.install_package(name))
    version = str(getattr(module, "__version__", "installed"))
    if not fixes.fits(name, version):
        found = f"{version}, expected {fixes.required(name)}"
        return Finding(name, found, ok=False, fix=fixes.install_package(name))
    return Finding(name, version, ok=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu() -> Finding:
    import torch

    if _has_gpu():
        count = torch.cuda.device_count()
        major, minor = torch.cuda.get_device_capability(0)
        name = torch.cuda.get_device_name(0)
        return Finding("GPU", f"{count} × {name}, compute capability {major}.{minor}", ok=True)
    if not glob.glob("/dev/nvidia[0-9]*"):
        return Finding("GPU", "none")
    if torch.version.cuda is None:
        base = torch.__version__.partition("+")[0]
        torch_fix = fixes.pip(f"install --force-reinstall torch=={base}")
        return Finding("GPU", f"torch {torch.__version__} is a CPU build and does not use it", fix=torch_fix)
    return Finding("GPU", f"there is one, and torch {torch.__version__} cannot use it: see nvidia-smi")


def _kernels() -> Finding:
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        found = "interpreted (TRITON_INTERPRET=1): exact, and slow; for tests"
        return Finding("kernels", found, fix="unset TRITON_INTERPRET" if _has_gpu() else "")
    if _has_gpu():
        return Finding("kernels", "native", ok=True)
    return Finding("kernels", 'not run without a GPU; Drafter(device="cpu") uses the references')


def _references() -> Finding:
    """Whether Numba compiles here: one line of Python, not the references, which take half a minute once."""
    fix = fixes.install_extra("numba")
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


def _misfit(name: str) -> Finding | None:
    """A part of transformers and vLLM that is built for another torch; None where it fits or is not there."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        module = importlib.import_module(name)
    except Exception as error:
        import torch

        found = f"does not fit torch {torch.__version__}, and text models need none ({one_line(error)})"
        return Finding(name, found, ok=False, fix=fixes.pip(f"uninstall -y {name}"))
    return Finding(name, str(getattr(module, "__version__", "installed")), ok=True, detail=True)


def _step_logs() -> Finding:
    if importlib.util.find_spec("yaml") is None:
        return Finding(
            "step logs", "PyYAML is not installed: report reads none", fix=fixes.install_extra("cli")
        )
    return Finding("step logs", f"PyYAML {fixes.version_of('PyYAML')}", ok=True, detail=True)
