"""A stage's results as one JSON file that is valid at every moment, and the header that each of them carries.

``python -m benchmarks.gpu.result_file`` prints the header of this machine.

A file has ``stage``, ``header``, ``dry_run``, ``pid``, ``status`` and ``rows``. A row has a ``name``, a
``verdict`` and whatever was measured. Each change writes a temporary file beside it and renames it, so that a
process that is killed leaves the file as it was before the change.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.tables import ROOT, write_json

#: Verdicts. A row is written as `STARTED` before its work begins. Only `FAILED` is a fault.
STARTED, PASSED, MEASURED, FAILED = "started", "passed", "measured", "FAILED"
SKIPPED, REFUSED, OUT_OF_TIME, KILLED = "skipped", "refused", "out of time", "killed"
#: Exit code of a stage that has to begin again with the rows that are left.
RESTART = 75
#: In every row of a dry run.
DRY_RUN_NOTE = "dry run: no GPU time"


class SkipError(Exception):
    """A row that cannot be done here; the message says why."""


class RefusedError(Exception):
    """A tool that does not work on this device; the message says how."""


class ResultFile:
    """The result file of one stage; one that exists is continued. dry_run: every row is to say so."""

    def __init__(self, path: Path, stage: str, header: dict[str, Any], dry_run: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        found = read(path)
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in found.get("rows", [])}
        self._fields = {"stage": stage, "header": header, "dry_run": dry_run, "pid": os.getpid()}
        self.set(status="running")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def has(self, name: str) -> bool:
        """Whether the row is finished."""
        return name in self._rows and self._rows[name]["verdict"] != STARTED

    def row(self, name: str, verdict: str, **fields: Any) -> None:
        """Add a row, or put it in place of the one of that name."""
        with self._lock:
            row = {"name": name, "verdict": verdict, **fields}
            if self._fields["dry_run"]:
                row["note"] = DRY_RUN_NOTE
            self._rows[name] = row
            self._write()

    def set(self, **fields: Any) -> None:
        """Change fields of the file itself."""
        with self._lock:
            self._fields |= fields
            self._write()

    def _write(self) -> None:
        write_json(self.path, {**self._fields, "rows": self.rows})


def read(path: Path) -> dict[str, Any]:
    """What a result file holds; nothing if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _output_of(*command: str) -> str:
    """The first line that a command prints, "" if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def _commit() -> str:
    """The commit, with "-dirty" if the tree differs; where git says nothing, a digest of the library's sources."""
    commit = _output_of("git", "rev-parse", "HEAD")
    if commit:
        return commit + ("-dirty" if _output_of("git", "status", "--porcelain", "-uno") else "")
    digest = hashlib.sha256()
    for path in sorted((ROOT / "gpu_align").rglob("*.py")):
        digest.update(path.read_bytes())
    return f"unknown; sources {digest.hexdigest()[:12]}"


@functools.lru_cache(maxsize=1)
def machine_header() -> dict[str, Any]:
    """GPU, driver, versions, commit and date; what ``GPU_CHECK_HEADER`` holds, if it was asked before."""
    if told := os.environ.get("GPU_CHECK_HEADER"):
        found: dict[str, Any] = json.loads(told)
        return found
    import torch

    from benchmarks.alignment.workload import machine

    found = {**machine(), "gpu": "none", "driver": "none", "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {"gpu": torch.cuda.get_device_name(), "driver": driver or "unknown"}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**found, "platform": platform.platform(), "commit": _commit(), "date": now}


if __name__ == "__main__":
    json.dump(machine_header(), sys.stdout)
