"""The one validator of files: what each kind allows, and the place that a refusal names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pytest

from gpu_align.files import MAX_COUNT, MAX_TOKEN, Count, Domain, Natural, Text, TokenId, checked

Offset = Annotated[float, Domain("a number from -1 to 1", lambda offset: -1 <= offset <= 1)]


class Row(NamedTuple):
    name: Text
    times: Count


@dataclass
class Sheet:
    rows: list[Row]
    ids: list[TokenId] = field(default_factory=list)
    offset: Offset | None = None
    more: dict[str, Any] | None = None
    nested: list[list[int]] | None = None


GOOD = {"rows": [["a", 1]], "ids": [0, MAX_TOKEN - 1], "offset": 1, "more": {"x": [1]}, "nested": [[1], []]}
#: Kind, value, and the place that is refused; None where it is allowed.
CASES: list[tuple[Any, Any, str | None]] = [
    (Natural, 0, None), (Natural, MAX_COUNT, None), (Natural, -1, ""), (Natural, MAX_COUNT + 1, ""),
    (Count, 1, None), (Count, 0, ""), (Count, True, ""), (Count, 1.0, ""), (Count, "1", ""), (Count, 10**4000, ""),
    (TokenId, 0, None), (TokenId, MAX_TOKEN, ""), (Offset, -1, None), (Offset, 0.5, None), (Offset, 1.1, ""),
    (Offset, float("nan"), ""), (Text, "", None), (Text, "\ud800", ""), (Text, b"a", ""), (dict, {}, None),
    (dict, [], ""), (list[int], [1, 2], None), (list[int], [1, "2"], "[1]"), (list[int], (1,), ""),
    (list[int], None, ""),
    (Sheet, GOOD, None), (Sheet, {"rows": []}, None), (Sheet, {**GOOD, "ids": None, "unknown": 1}, None),
    (Sheet, [], ""), (Sheet, {}, "rows"), (Sheet, {"rows": None}, "rows"),
    (Sheet, {**GOOD, "rows": [["a"]]}, "rows[0]"),
    (Sheet, {**GOOD, "rows": [["a", 1], ["b", 0]]}, "rows[1]"), (Sheet, {**GOOD, "rows": ["a1"]}, "rows[0]"),
    (Sheet, {**GOOD, "ids": [1, -1]}, "ids[1]"), (Sheet, {**GOOD, "offset": "1"}, "offset"),
    (Sheet, {**GOOD, "more": [1]}, "more"), (Sheet, {**GOOD, "nested": [[1], [1.5]]}, "nested[1][0]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "place"), CASES, ids=range(len(CASES)))
def test_a_value_is_allowed_or_its_place_is_named(kind: Any, value: Any, place: str | None) -> None:
    if place is None:
        found = checked(kind, value, "" if kind is Sheet else "here")
        assert found == value or (kind is Sheet and isinstance(found, Sheet))
        return
    where = place if kind is Sheet else f"here{place}"
    with pytest.raises(ValueError, match=r"expected [^\n]*, found [^\n]*$") as refused:
        checked(kind, value, "" if kind is Sheet else "here")
    assert str(refused.value).startswith(f"{where}: " if where else "expected an object")
    assert len(str(refused.value)) < 300


def test_a_sheet_is_what_its_file_says() -> None:
    found = checked(Sheet, json.loads(json.dumps(GOOD)))
    assert found == Sheet([Row("a", 1)], [0, MAX_TOKEN - 1], 1, {"x": [1]}, [[1], []])
    assert checked(Sheet, {"rows": []}) == Sheet([])
