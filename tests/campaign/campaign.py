"""What all programs of the campaign share: rows, seeds, kept failures, the command line of a program.

def run(c: Campaign) -> Iterator[Row]:
    tally = c.tally("what", at_least=100_000, quick=500)
    while tally.goes_on():
        ...
        tally.check(ours == theirs, case={"seed": seed, "ours": ours, "theirs": theirs})
    yield tally.row("details in a few words")

if __name__ == "__main__":
    main(run)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("CAMPAIGN_DIR", ".cache/campaign"))
#: What a row speaks of: it is of no commit while one of these has changes.
CODE = ("gpu_align", "vllm_integration", "tests/campaign")
#: Cases that a program keeps; it goes on counting.
MOST_FAILURES = 20


def git(*arguments: str) -> str:
    """Empty where there is no repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of_code() -> tuple[str, str]:
    """The commit that this tree is, and "", or "" and why it is none."""
    if changed := git("status", "--porcelain", "--", *CODE):
        names = [line.split()[-1] for line in changed.splitlines()]
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        return "", f"expected committed code, found changes in {', '.join(names[:3])}{more}"
    commit = git("rev-parse", "HEAD")
    return commit, "" if commit else "expected a git repository, found none"


@dataclass
class Row:
    """One line of the table. `result` is what was found, in words; `failures` counts what did not hold.

    not_run: why it was not run; empty where it was.
    """

    what: str
    count: int
    at_least: int
    result: str = ""
    failures: int = 0
    not_run: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.not_run and self.failures == 0 and self.count >= self.at_least

    @property
    def verdict(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        if self.failures:
            return f"FAILED {self.failures}: {self.result}"
        if self.count < self.at_least:
            return f"FAILED, {self.count:,} of {self.at_least:,}: {self.result}"
        return f"passed: {self.result}" if self.result else "passed"


@dataclass
class Tally:
    """Counts what is checked for one row."""

    campaign: Campaign
    what: str
    at_least: int
    count: int = 0
    failures: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _shown: float = field(default_factory=time.monotonic)

    def goes_on(self) -> bool:
        """Whether fewer than `at_least` were checked. Shows every 10 s how far it is."""
        if time.monotonic() - self._shown > 10:
            self._shown = time.monotonic()
            print(f"  {self.what}: {self.count:,} of {self.at_least:,}", file=sys.stderr, flush=True)
        return self.count < self.at_least

    def check(self, holds: bool, case: Any = None, count: int = 1) -> bool:
        """Count `count` checks. A case that does not hold is kept: JSON, or a function that makes it."""
        self.count += count
        if not holds:
            self.failures += 1
            self.campaign.keep(self.what, case() if callable(case) else case)
        return holds

    def row(self, result: str = "") -> Row:
        seconds = time.monotonic() - self._begun
        return Row(self.what, self.count, self.at_least, result, self.failures, "", seconds)


@dataclass
class Campaign:
    """One program's run. `quick`: the counts of `make test`; `share`: of the counts otherwise."""

    program: str
    quick: bool
    seed: int
    share: float = 1.0
    rng: random.Random = field(init=False)
    _kept: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.program} {self.seed}")

    def size(self, full: int, quick: int) -> int:
        """Of a part that every run has whole."""
        return quick if self.quick else full

    def count(self, full: int, quick: int) -> int:
        """Of what is checked."""
        return quick if self.quick else max(quick, round(full * self.share))

    def tally(self, what: str, at_least: int, quick: int) -> Tally:
        return Tally(self, what, self.count(at_least, quick))

    def not_run(self, what: str, at_least: int, why: str) -> Row:
        return Row(what, 0, at_least, not_run=why)

    def keep(self, what: str, case: Any) -> None:
        """Write a failure down, so that it can be run again."""
        self._kept += 1
        if self._kept > MOST_FAILURES:
            return
        path = FOLDER / "failures" / f"{self.program}-{self._kept}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"what": what, "program": self.program, "seed": self.seed, "quick": self.quick, "case": case}
        path.write_text(json.dumps(_with_names(told), indent=1, default=str) + "\n")
        print(f"  FAILED {what}: {path}", file=sys.stderr, flush=True)


def _with_names(value: Any) -> Any:
    """The keys of all its dicts as JSON can have them."""
    if isinstance(value, dict):
        return {str(key): _with_names(each) for key, each in value.items()}
    return [_with_names(each) for each in value] if isinstance(value, list | tuple) else value


def main(run: Callable[[Campaign], Iterator[Row]]) -> None:
    """Run a program, print its rows and write them to `FOLDER`. Exit code 1 if a row failed."""
    program = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaign.{program}")
    add_arguments(parser)
    given = parser.parse_args()
    campaign = Campaign(program, given.quick, given.seed, given.share)
    commit, why_not = commit_of_code()
    print(f"{program}: seed {given.seed}{', quick' * given.quick}, {commit[:10] or why_not}", flush=True)
    rows: list[Row] = []
    begun = time.monotonic()

    def take(row: Row) -> None:
        row.seconds = row.seconds or time.monotonic() - begun
        counts = f"{row.count:,} of at least {row.at_least:,}"
        print(f"{row.what} | {counts} | {row.verdict} | {row.seconds:.0f} s", flush=True)
        rows.append(row)
        found = commit_of_code()
        same = "" if found == (commit, "") else why_not or f"expected {commit[:10]} to the end, found another"
        told = {**vars(given), "commit": commit * (not same), "why no commit": same, "rows": rows}
        FOLDER.mkdir(parents=True, exist_ok=True)
        told["date"] = date.today().isoformat()
        (FOLDER / f"{program}.json").write_text(json.dumps(told, indent=1, default=asdict) + "\n")

    try:
        for row in run(campaign):
            take(row)
    except Exception:
        error = traceback.format_exc()
        print(error, file=sys.stderr, flush=True)
        campaign.keep(f"{program} itself", error)
        take(Row(f"{program}, to its end", 0, 1, error.strip().splitlines()[-1][:200], failures=1))
    if not all(row.passed or row.not_run for row in rows):
        sys.exit(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the counts of make test, which no page takes")
    parser.add_argument("--seed", type=int, default=0, help="of everything random; 0 unless told")
    parser.add_argument("--share", type=float, default=1.0, help="of the counts, 0 to 1; the page says so")
