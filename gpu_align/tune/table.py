"""The file of a table: what it holds, and how it is written. `gpu_align.ops.draft.tables` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_align.ops.constants import LENGTH_EDGES, MARGIN_EDGES, SURVIVAL_ONE
from gpu_align.ops.draft.tables import FORMAT, KNOTS, content_hash


def make_table(
    survival: npt.NDArray[np.int64],
    calibration: list[float],
    seen: npt.NDArray[Any],
    num_records: int,
    made_by: str,
    settings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What a file holds. No texts and no tokens: counts of what looks alike, and what is told of them.

    Args:
        survival: [NUM_CLASSES, len(KNOTS)] in units of 1/`SURVIVAL_ONE`.
        calibration: [NUM_BINS].
        seen: [NUM_CLASSES]: candidates that it was learned from.
        num_records: requests.
        made_by: a command.
        settings: fields of `DrafterConfig` that go with it.
    """
    table: dict[str, Any] = {
        "format": FORMAT,
        "made_by": made_by,
        "records": num_records,
        "length_edges": list(LENGTH_EDGES),
        "margin_edges": list(MARGIN_EDGES),
        "knots": list(KNOTS),
        "unit": SURVIVAL_ONE,
        "seen": np.asarray(seen).astype(int).tolist(),
        "calibration": calibration,
    }
    if settings:
        table["settings"] = dict(settings)
    table["survival"] = np.asarray(survival).astype(int).tolist()
    return {"sha256": content_hash(table), **table}


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write one class a line: a new table reads as a diff."""
    text = (
        json.dumps(table, separators=(",", ":"))
        .replace('"survival":[[', '"survival":[\n[')
        .replace("],[", "],\n[")
    )
    path.write_text(text.replace("]]}", "]\n]}") + "\n", encoding="utf-8")
