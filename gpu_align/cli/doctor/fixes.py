"""The commands that `doctor` recommends, exact for this environment, and what gpu-align requires."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

#: The folder that holds the package: a checkout, or site-packages.
ROOT = Path(__file__).resolve().parents[3]


def version_of(distribution: str) -> str | None:
    """The installed version, None if there is none."""
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
    """The command that installs gpu-align with an extra, from where this one was installed."""
    extras = f"[{extra}]" if extra else ""
    folder, editable = _local_source()
    target = shlex.quote(f"{folder}{extras}") if folder else f'"gpu-align{extras}"' if extra else "gpu-align"
    return pip(f"install {'-e ' if editable else ''}{target}{' ' + options if options else ''}")


def _local_source() -> tuple[str, bool]:
    """The folder that gpu-align was installed from or runs from, empty for a package index; whether editable."""
    try:
        text = importlib.metadata.distribution("gpu-align").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return (str(ROOT), True) if (ROOT / "pyproject.toml").is_file() else ("", False)
    source = json.loads(text) if text else {}
    address = urlparse(source.get("url", ""))
    if address.scheme != "file" or "dir_info" not in source:
        return "", False
    return url2pathname(address.path), bool(source["dir_info"].get("editable"))


@functools.cache
def required(package: str) -> str:
    """The range that gpu-align requires of a package, ``">=2.9,<3"``; empty where it is not known."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("gpu-align") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return ""
    for requirement in map(Requirement, lines):
        if requirement.name == package:
            return ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
    return ""


def fits(package: str, version: str) -> bool:
    """Whether `version` is in the range that gpu-align requires; True where the range is not known."""
    wanted = required(package)
    if not wanted:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def install_package(package: str) -> str:
    """The command that installs a package in the range that gpu-align requires."""
    return pip(f"install {shlex.quote(package + required(package))}")
