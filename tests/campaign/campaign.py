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
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("CAMPAIGN_DIR", ".cache/campaign"))
#: Cases that a program keeps; it goes on counting.
MOST_FAILURES = 20


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
    """One program's run. `quick`: the counts of `make test`."""

    program: str
    quick: bool
    seed: int
    rng: random.Random = field(init=False)
    _kept: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.program} {self.seed}")

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def tally(self, what: str, at_least: int, quick: int) -> Tally:
        return Tally(self, what, self.size(at_least, quick))

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
        path.write_text(json.dumps(told, indent=1, default=str) + "\n")
        print(f"  FAILED {what}: {path}", file=sys.stderr, flush=True)


def main(run: Callable[[Campaign], Iterator[Row]]) -> None:
    """Run a program, print its rows and write them to `FOLDER`. Exit code 1 if a row failed."""
    program = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaign.{program}")
    parser.add_argument("--quick", action="store_true", help="the counts of make test")
    parser.add_argument("--seed", type=int, default=0, help="of everything random; 0 unless told")
    arguments = parser.parse_args()
    campaign = Campaign(program, arguments.quick, arguments.seed)
    print(f"{program}: seed {campaign.seed}{', quick' if campaign.quick else ''}", flush=True)
    rows: list[Row] = []
    begun = time.monotonic()
    try:
        for row in run(campaign):
            row.seconds = row.seconds or time.monotonic() - begun
            rows.append(row)
            print(
                f"{row.what} | {row.count:,} of at least {row.at_least:,} | {row.verdict} | {row.seconds:.0f} s",
                flush=True,
            )
            _write(campaign, rows)
    except Exception:
        error = traceback.format_exc()
        print(error, file=sys.stderr, flush=True)
        campaign.keep(f"{program} itself", error)
        rows.append(Row(f"{program}, to its end", 0, 1, error.strip().splitlines()[-1][:200], failures=1))
        _write(campaign, rows)
    if not all(row.passed or row.not_run for row in rows):
        sys.exit(1)


def _write(campaign: Campaign, rows: list[Row]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    told = {"seed": campaign.seed, "quick": campaign.quick, "rows": [asdict(row) for row in rows]}
    (FOLDER / f"{campaign.program}.json").write_text(json.dumps(told, indent=1) + "\n")
