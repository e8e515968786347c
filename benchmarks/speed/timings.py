"""Timings of a ``--benchmark-json`` file: what `compare` and `plot` read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Timing:
    """One contestant at one size, microseconds. `iqr`: interquartile range of its rounds. `device`: GPU time."""

    group: str
    contestant: str
    median: float
    iqr: float
    device: bool


def read_timings(path: Path) -> tuple[dict[str, Any], dict[str, Timing]]:
    """``(machine, {test name: timing})`` of a file that pytest-benchmark wrote; device time where there is one.

    Raises:
        ValueError: no such file.
    """
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
