"""Values of the `prediction` field, good and bad, and an independent statement of what becomes of them."""

from __future__ import annotations

import json
from typing import Any

GOOD_PART = {"type": "text", "text": "w1 w2 "}
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    7,
    1.5,
    -0.0,
    1e308,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "content",
    "text",
    "w1 w2",
    "\0",
    "\0w1\0",
    "\ufeffw1",
    "\r",
    "\ud800",
    "w1\udfff",
    "\udc00\ud800",
    "\U0001f642",
    "\u202ew1\u200b",
    "\x7f\x1b[31m",
    "w1 " * 20_000,
    [],
    [[]],
    [None],
    ["w1"],
    [{}],
    [GOOD_PART],
    {},
    {"a": 1},
    {"text": "w1"},
    {"type": "text"},
    {"type": "content"},
    GOOD_PART,
)


def predictions() -> list[Any]:
    """Every junk value in every place of the field, places left out, keys added, and sizes."""
    values: list[Any] = list(JUNK)
    for junk in JUNK:
        values += [
            {"type": junk, "content": "w1"},
            {"type": "content", "content": junk},
            {"type": "content", "content": [junk]},
            {"type": "content", "content": [GOOD_PART, {"type": junk, "text": "w1"}]},
            {"type": "content", "content": [{"type": "text", "text": junk}, GOOD_PART]},
            {"type": "content", "content": "w1 w2", "more": junk},
            {"type": "content", "content": [{**GOOD_PART, "more": junk}], "": junk},
        ]
    values += [
        {"content": "w1"},
        {"Type": "content", "Content": "w1"},
        {"type": "content", "contents": "w1"},
        {"type": "content", "content": [GOOD_PART] * 10_000},
        {"type": "content", "content": [[GOOD_PART]]},
        {"type": "content", "content": [{"type": "text", "text": ""}] * 500},
        {"type": "content", "content": [0] * 5_000},
        {"type": "content", "content": "w1", **{f"k{i}": i for i in range(5_000)}},
        {"type": "content", "content": "w1", "more": nested(150)},
        {"type": "content", "content": nested(150)},
        [{"type": "content", "content": "w1"}],
        [{"type": "content", "content": "w1"}] * 2,
    ]
    return values


def nested(depth: int) -> Any:
    """Arrays and objects in turn."""
    value: Any = []
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return value


def is_taken(value: Any, *, plain_text: bool, characters: int, parts: int) -> bool:
    """What the documentation says of a value: served (True) or refused (False)."""
    if value is None:
        return True
    if isinstance(value, str):
        return plain_text and _is_unicode(value[:characters])
    if not isinstance(value, dict) or value.get("type") != "content" or "content" not in value:
        return False
    content = value["content"]
    if isinstance(content, str):
        return _is_unicode(content[:characters])
    if not isinstance(content, list):
        return False
    kept = content[:parts]
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in kept
    ):
        return False
    return _is_unicode("".join(part["text"] for part in kept)[:characters])


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def as_json(body: Any) -> bytes:
    """As JavaScript clients send it: surrogates escaped."""
    return json.dumps(body).encode()


#: Bodies that are no JSON, or not an object, or say something twice: vLLM answers 400 to most before it asks us.
RAW_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "array": b"[]",
    "string": b'"prediction"',
    "number": b"7",
    "cut": b'{"model":"tiny","prediction":{"type":"content","content":"w1',
    "cut-escape": b'{"prediction":"\\ud8',
    "bad-escape": b'{"prediction":"\\x"}',
    "not-utf8": b'{"prediction":"\xff\xfe"}',
    "utf8-surrogate": b'{"prediction":"\xed\xa0\x80"}',
    "raw-nul": b'{"prediction":"\x00"}',
    "raw-newline": b'{"prediction":"a\nb"}',
    "bom": b'\xef\xbb\xbf{"prediction":7}',
    "utf16": '{"prediction":7}'.encode("utf-16"),
    "deep-arrays": b'{"prediction":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "deep-objects": b'{"prediction":' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
    "long-number": b'{"prediction":' + b"9" * 10_000 + b"}",
    "single-quotes": b"{'prediction': 'w1'}",
    "trailing": b'{"prediction":7} 7',
    "comment": b'{"prediction":7 /* seven */}',
}
