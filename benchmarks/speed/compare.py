"""Two runs of the benchmark suite: ``python -m benchmarks.speed.compare OLD.json NEW.json``.

A contestant has become slower where its median rose by more than the noise of both runs together, and by more
than a tenth of the old one::

    new.median - old.median > max(0.1 * old.median, old.iqr + new.iqr)

Exit code 1: something became slower. 2: the files cannot be compared: no benchmark in common, or other machines
(`--any-machine` compares all the same; what differs is printed).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import command


class Timing(NamedTuple):
    """One contestant at one size, microseconds. `iqr`: interquartile range of its rounds. `device`: GPU time."""

    group: str
    contestant: str
    median: float
    iqr: float
    device: bool


def read_timings(path: Path) -> tuple[dict[str, Any], dict[str, Timing]]:
    """``(machine, {test name: timing})`` of a file that pytest-benchmark wrote; device time where there is one."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = {}
        for row in fields["benchmarks"]:
            device = row.get("extra_info", {}).get("device_us")
            stats = row["stats"]
            wall = stats["median"] * 1e6, stats["iqr"] * 1e6
            median, iqr = (device["median"], device["iqr"]) if device else wall
            contestant = row["params"].get("name") or row["name"].partition("[")[0].removeprefix("test_")
            found[row["fullname"]] = Timing(row["group"], contestant, float(median), float(iqr), bool(device))
        return fields["machine_info"].get("gpu_align", {}), found
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: expected what pytest --benchmark-json writes, found {type(error).__name__}: {error}"
        ) from error


TOLERANCE = 0.1


class Change(NamedTuple):
    """One contestant at one size: what it was and is. verdict: 0 noise, 1 slower, -1 faster."""

    name: str
    old: Timing
    new: Timing
    verdict: int

    @property
    def ratio(self) -> float:
        return self.new.median / self.old.median

    def __str__(self) -> str:
        says = {0: "same", 1: "SLOWER", -1: "faster"}[self.verdict]
        noise = (self.old.iqr + self.new.iqr) / self.old.median
        return (
            f"{says:>6} {self.ratio:6.2f}x  {self.old.median:12.1f} → {self.new.median:12.1f} µs  "
            f"noise {noise:5.0%}  {self.old.group}: {self.old.contestant}"
        )


def changes(old: Mapping[str, Timing], new: Mapping[str, Timing]) -> list[Change]:
    """Every benchmark that both have, in the order of `old`."""
    found = []
    for name in old:
        if name not in new:
            continue
        a, b = old[name], new[name]
        if a.device != b.device:
            raise ValueError(f"{name}: expected device time in both or in neither")
        limit = max(TOLERANCE * a.median, a.iqr + b.iqr)
        found.append(Change(name, a, b, (b.median - a.median > limit) - (a.median - b.median > limit)))
    return found


def other_machine(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What would make times differ whatever the code: the hardware."""
    return [
        f"{key}: {old.get(key)} → {new.get(key)}" for key in ("gpu", "cpu") if old.get(key) != new.get(key)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = command("benchmarks.speed.compare", __doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--any-machine", action="store_true", help="compare times of different machines")
    options = parser.parse_args(argv)
    try:
        (old_machine, old), (new_machine, new) = read_timings(options.old), read_timings(options.new)
        found = changes(old, new)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in (different := other_machine(old_machine, new_machine)):
        print(line)
    if different and not options.any_machine:
        print("error: other machines; --any-machine compares all the same", file=sys.stderr)
        return 2
    if not found:
        print("error: no benchmark in common", file=sys.stderr)
        return 2
    for change in sorted(found, key=lambda c: (-c.verdict, -c.ratio)):
        print(change)
    for label, names in (("only in OLD", old.keys() - new.keys()), ("only in NEW", new.keys() - old.keys())):
        for name in sorted(names):
            print(f"{label}: {name}")
    slower = sum(change.verdict == 1 for change in found)
    print(f"{len(found)} compared, {slower} slower, {sum(c.verdict == -1 for c in found)} faster")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
