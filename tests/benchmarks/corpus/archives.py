"""Archives of packages, made for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def tarball(path: Path, files: Mapping[str, str], top: str = "") -> Path:
    """A .tar.gz of these texts, all below folder `top`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    return path
