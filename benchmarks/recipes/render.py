"""Records as the JSON text that a model writes, with a little noise."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.recipes.groups import choice, happens, number_of

#: Shares of records with two keys swapped, and with other whitespace.
REORDERED, RESPACED = 0.03, 0.03


def rendered(record: dict[str, Any], *key: object) -> str:
    """`record` with two spaces of indentation; a few, by their key, with swapped keys or other whitespace."""
    if happens(REORDERED, "reorder", key):
        record = _swapped(record, *key)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    if happens(RESPACED, "respace", key):
        text = _respaced(record, text, *key)
    return text + "\n"


def _swapped(record: dict[str, Any], *key: object) -> dict[str, Any]:
    """Two neighbouring keys in the other order, at the top or one level below."""
    inner = [name for name, value in record.items() if isinstance(value, dict) and len(value) > 1]
    if inner and happens(0.5, "level", key):
        name = choice(inner, "object", key)
        return {**record, name: _swapped_here(record[name], *key)}
    return _swapped_here(record, *key)


def _swapped_here(record: dict[str, Any], *key: object) -> dict[str, Any]:
    names = list(record)
    at = number_of("swap", key) % (len(names) - 1)
    names[at], names[at + 1] = names[at + 1], names[at]
    return {name: record[name] for name in names}


def _respaced(record: dict[str, Any], text: str, *key: object) -> str:
    style = number_of("style", key) % 3
    if style == 0:
        return json.dumps(record, indent=4, ensure_ascii=False)
    if style == 1:
        return json.dumps(record, ensure_ascii=False)
    lines = text.split("\n")
    at = 1 + number_of("line", key) % max(len(lines) - 2, 1)
    return "\n".join([*lines[:at], "", *lines[at:]])
