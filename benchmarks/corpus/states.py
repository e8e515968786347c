"""Documents of state, and their next versions: what an agent rewrites when one thing in its world has changed.

A state is a list of records with nested fields, printed as JSON or YAML. The next version changes a few values,
appends an item or two, now and then removes one: everything else is as it was, in the same order.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_NAMES = [
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll",
    "lagoon", "meadow", "north", "oasis", "prairie",
]  # fmt: skip
_STATUS = ("queued", "running", "blocked", "in_review", "done", "failed", "cancelled")
_VERBS = [
    "collect", "verify", "index", "publish", "migrate", "archive", "compress", "translate", "reconcile",
    "summarise", "annotate", "deploy",
]  # fmt: skip
_THINGS = [
    "invoices", "thumbnails", "customers", "backups", "metrics", "sessions", "manifests", "shipments",
    "contracts", "snapshots",
]  # fmt: skip


def state_pair(form: str, rng: random.Random) -> tuple[str, str]:
    """``(before, after)`` of one document: "json" (indented by 2), "json_compact" (one line), or "yaml"."""
    before = _state(rng)
    after = _update(before, rng)
    return _write(form, before), _write(form, after)


def _state(rng: random.Random) -> dict[str, Any]:
    return {
        "version": rng.randint(3, 400),
        "updated_at": _time(rng),
        "owner": rng.choice(_NAMES),
        "settings": {
            "retries": rng.randint(0, 8),
            "timeout_s": rng.choice((10, 30, 60, 120)),
            "regions": rng.sample(_NAMES, 3),
            "dry_run": rng.random() < 0.3,
        },
        "tasks": [_task(i, rng) for i in range(rng.randint(8, 28))],
    }


def _task(number: int, rng: random.Random) -> dict[str, Any]:
    task: dict[str, Any] = {
        "id": f"task-{1000 + number * 7 + rng.randint(0, 6)}",
        "title": f"{rng.choice(_VERBS)} {rng.choice(_THINGS)}",
        "status": rng.choice(_STATUS),
        "priority": rng.randint(1, 5),
        "assignee": rng.choice([*_NAMES, None]),
        "progress": round(rng.random(), 2),
        "depends_on": [f"task-{1000 + rng.randint(0, 200)}" for _ in range(rng.randint(0, 3))],
        "tags": rng.sample(_THINGS, rng.randint(0, 3)),
        "updated_at": _time(rng),
    }
    if rng.random() < 0.4:
        task["note"] = f"{rng.choice(_VERBS)} the {rng.choice(_THINGS)} before the {rng.choice(_THINGS)}"
    return task


def _time(rng: random.Random) -> str:
    month, day, hour, minute = (rng.randint(*r) for r in ((1, 12), (1, 28), (0, 23), (0, 59)))
    return f"2024-{month:02}-{day:02}T{hour:02}:{minute:02}:00Z"


def _update(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    after = copy.deepcopy(state)
    after["version"] += 1
    after["updated_at"] = _time(rng)
    tasks = after["tasks"]
    for _ in range(rng.randint(1, 5)):
        task = rng.choice(tasks)
        task["status"] = rng.choice(_STATUS)
        task["progress"] = round(rng.random(), 2)
        task["updated_at"] = _time(rng)
        if rng.random() < 0.3:
            task["assignee"] = rng.choice(_NAMES)
        if rng.random() < 0.2:
            task["note"] = f"{rng.choice(_VERBS)} {rng.choice(_THINGS)} again"
    if rng.random() < 0.5:
        tasks.append(_task(len(tasks), rng))
    if rng.random() < 0.25:
        del tasks[rng.randrange(len(tasks))]
    if rng.random() < 0.2:
        after["settings"]["retries"] += 1
    return after


def _write(form: str, state: dict[str, Any]) -> str:
    if form == "json":
        return json.dumps(state, indent=2) + "\n"
    if form == "json_compact":
        return json.dumps(state, separators=(",", ":")) + "\n"
    if form == "yaml":
        return "\n".join(_yaml(state, 0)) + "\n"
    raise ValueError(f"form: expected 'json', 'json_compact' or 'yaml', found {form!r}")


def _yaml(value: Any, depth: int) -> list[str]:
    """Block style; scalars as JSON writes them, which YAML reads the same, but plain words without quotes."""
    pad = "  " * depth
    if isinstance(value, dict):
        lines = []
        for key, inner in value.items():
            nested = isinstance(inner, (dict, list)) and inner
            lines += (
                [f"{pad}{key}:", *_yaml(inner, depth + 1)] if nested else [f"{pad}{key}: {_scalar(inner)}"]
            )
        return lines
    lines = []
    for item in value:
        if isinstance(item, dict):
            first, *rest = _yaml(item, depth + 1)
            lines += [f"{pad}- {first.lstrip()}", *rest]
        else:
            lines.append(f"{pad}- {_scalar(item)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str) and value.replace("_", "").replace("-", "").replace(" ", "").isalnum():
        return value
    return json.dumps(value)
