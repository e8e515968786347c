"""compute-sanitizer on random cases: `memcheck` (addresses), `initcheck` (global memory that is read before it is
written), `racecheck` (races in *shared* memory; it does not look at global memory) and `synccheck`.

``python -m benchmarks.gpu.sanitizer PROGRAM`` runs one of `PROGRAMS`, on a GPU if there is one.

PyTorch's caching allocator cuts its tensors out of large blocks, where an overrun ends in another tensor and shows
nowhere. ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives each tensor an allocation of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.result_file import RefusedError, SkipError

#: Name → a case of `machine_code`, or none: a step behind a preparation.
PROGRAMS = {
    "index": ("index", 1), "LCS, panels": ("lcs", 1), "step, K 16": ("step", 0), "step, K 256": ("step", 5),
    "prepare": None,
}  # fmt: skip
TOOLS = {
    "memcheck": tuple(PROGRAMS), "initcheck": tuple(PROGRAMS), "racecheck": ("LCS, panels", "step, K 256"),
    "synccheck": ("LCS, panels", "step, K 256"),
}  # fmt: skip
#: For one tool.
SECONDS = 60
#: Exit code of compute-sanitizer where it found something.
FOUND = 99

_FINDING = re.compile(
    r"Invalid (__\w+__ )?(read|write)|Misaligned|out of bounds|[Rr]ace (reported|condition)|[Hh]azard"
    r"|Barrier error|Divergent thread"
)
_REFUSAL = re.compile(
    r"not supported|Internal Sanitizer Error|[Uu]nable to|[Ff]ailed to (initialize|attach|connect|open)|permission"
    r"|No attachable process|Error: "
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


class FoundError(AssertionError):
    """What the tool found, or what the program itself reported."""


def read_output(code: int, output: str) -> tuple[str, str]:
    """``("passed" | "found" | "refused", remark)`` of one run.

    code: what compute-sanitizer returned, `FOUND` where it counted errors. A tool that does not work here is
    "refused": it printed no summary, or says that it does not support the device, and no finding.
    """
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if _FINDING.search(line) and not _SUMMARY.search(line):
            return "found", line
    summary = _SUMMARY.search(output)
    if code == 0 and summary is not None and summary[1] == "0":
        return "passed", summary[0]
    for line in output.splitlines():
        if line.startswith("=====") and _REFUSAL.search(line):
            return "refused", line.removeprefix("=========").strip()
    if summary is None:
        return "refused", lines[-1] if lines else "it printed nothing"
    return "found", f"exit code {code}, {summary[0]}: {lines[-1]}"


def rows(device: str, dry_run: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and check of each row."""
    for tool, programs in TOOLS.items():
        for name in programs:
            yield f"{tool}: {name}", partial(check, tool, name, dry_run)


def check(tool: str, name: str, dry_run: bool) -> dict[str, Any]:
    """One row; in a dry run the program by itself, on the CPU."""
    smoke = [sys.executable, "-m", "benchmarks.gpu.sanitizer", name]
    if dry_run:
        if (tool, name) != ("memcheck", "index"):
            raise SkipError("dry run")
        command = smoke
    else:
        program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(program).exists():
            raise SkipError("not installed: compute-sanitizer")
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [program, "--tool", tool, *quiet, "--error-exitcode", str(FOUND), *smoke]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            text=True,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise SkipError(f"more than {SECONDS} s") from error
    if dry_run:
        if done.returncode:
            raise FoundError(done.stdout[-1000:])
        return {"remark": "on the CPU, without compute-sanitizer"}
    verdict, remark = read_output(done.returncode, done.stdout)
    if verdict == "refused":
        raise RefusedError(remark)
    if verdict == "found":
        raise FoundError(f"{remark}\n{done.stdout[-1500:]}")
    return {"remark": remark}


def main() -> None:
    import random

    from benchmarks.compiled.machine_code import CASES
    from tests.gpu_align.step_batch import StepBatch

    if (case := PROGRAMS[sys.argv[1]]) is None:
        batch = StepBatch.draw(random.Random(0), K=16, capacity=2500)
        batch.prepare(range(batch.max_slots))
        assert not any(row.wrong for row in batch.random_step())
    else:
        for turn in range(2):
            CASES[case[0]][case[1]](random.Random(f"{turn}"))
    print("all is the reference's")


if __name__ == "__main__":
    main()
