"""Requests that are wrong on the wire or as JSON, byte for byte, with the statuses that may answer them: values of
the `prediction` field, good and bad, and an independent statement of what becomes of them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.campaign.http_client import request_head

GOOD_PART = {"type": "text", "text": "w1 w2 "}
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 1.5, -0.0, 1e308, 10**30, float("nan"), float("inf")),
    *("", "x", "content", "text", "w1 w2", "\0", "\0w1\0", "\ufeffw1", "\r"),
    *("\ud800", "w1\udfff", "\udc00\ud800"),
    *("\U0001f642", "\u202ew1\u200b", "\x7f\x1b[31m", "w1 " * 20_000),
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

#: A request to each endpoint that takes a prediction.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "w5"}]], "max_tokens": 2},
    "/v1/completions": {"prompt": "w5", "max_tokens": 2},
    "/v1/responses": {"input": "w5", "max_output_tokens": 2},
    "/invocations": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2},
}
REFUSED = frozenset(range(400, 500))
SERVED = frozenset({200})
#: The connection may also be closed without a response: what came is no request.
CLOSED = frozenset({0})


class Wrong(NamedTuple):
    """message: all bytes of a request. statuses: that may answer it. ends: the client closes its side then."""

    name: str
    path: str
    message: bytes
    statuses: frozenset[int] = REFUSED
    ends: bool = False


def good(path: str, value: Any = "missing") -> dict[str, Any]:
    """A request that is served, or would be but for this prediction."""
    hint = {"type": "content", "content": "w1 w2"} if value == "missing" else value
    return {"model": "tiny", "temperature": 0, **ENDPOINTS[path], "prediction": hint}


def posted(path: str, body: bytes, more: bytes = b"content-type: application/json\r\n") -> bytes:
    return request_head("POST", path, len(body), more) + body


def values(path: str, characters: int) -> Iterator[Wrong]:
    """Every junk value in every place of the field."""
    for value in predictions():
        taken = is_taken(value, plain_text=path == "/v1/completions", characters=characters, parts=1000)
        body = as_json(good(path, value))
        yield Wrong(f"value {str(value)[:60]}", path, posted(path, body), SERVED if taken else REFUSED)
    for value in (None, 7, 1.5, {}, [None], [[1]], ["1"], [1.5], [-1], [2**31], [2**63], [10**30], "\ud800"):
        body = as_json({**good(path, None), "vllm_xargs": {"gpu_align_prediction": value}})
        yield Wrong(f"ids {value}", path, posted(path, body))


def documents(path: str) -> Iterator[Wrong]:
    """What is no JSON, or too much of it, or says something twice."""
    for name, raw in RAW_BODIES.items():
        yield Wrong(name, path, posted(path, raw))
    bad = good(path, 7)
    text = json.dumps(bad)
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        yield Wrong(encoding, path, posted(path, text.encode(encoding)))
    yield Wrong("odd UTF-16", path, posted(path, text.encode("utf-16")[:-1]))
    for depth in (200, 1_000, 5_000, 30_000, 200_000):
        for opening, inner, closing in ((b"[", b"", b"]"), (b'{"a":', b"1", b"}")):
            deep = opening * depth + inner + closing * depth
            yield Wrong(f"{depth} levels of {opening!r}", path, posted(path, _with(path, deep)))
    keys = json.dumps({f"k{i}": i for i in range(100_000)}).encode()
    yield Wrong("100,000 keys", path, posted(path, _with(path, keys)))
    yield Wrong("100,000 arrays", path, posted(path, _with(path, b"[" + b"[]," * 100_000 + b"[]]")))
    yield Wrong("100,000 nested", path, posted(path, _with(path, as_json([nested(10)] * 10_000))))
    long = b'{"type":"content","content":"' + b"w1 " * 1_500_000 + b'"}'
    for key in (b'"prediction":', rb'"\u0070rediction":', rb'"predictio\u006E" :'):
        yield Wrong(f"{key!r}, 4.5 MB", path, posted(path, _with(path, long, key)))
        yield Wrong(f"{key!r}, 7", path, posted(path, _with(path, b"7", key)))
    for number in (
        b"9" * 5_000,
        b"-" + b"9" * 20_000,
        b"1e400",
        b"-1e99999",
        b"1e-99999",
        b"0." + b"1" * 9_999,
    ):
        yield Wrong(f"number {number[:9]!r}", path, posted(path, _with(path, number)))
        inside = b'{"type":"content","content":%s}' % number
        yield Wrong(f"content {number[:9]!r}", path, posted(path, _with(path, inside)))
    for number in (b"NaN", b"Infinity", b"01", b"+1", b"1.", b".5", b"0x10", b"1_000"):
        yield Wrong(f"number {number!r}", path, posted(path, _with(path, number)))
    twice = _with(path, b'{"type":"content","content":"w1"}')[:-1] + b',"prediction":7}'
    yield Wrong("twice", path, posted(path, twice))
    inside = b'{"type":"content","content":"w1","type":"text","content":7}'
    yield Wrong("twice inside", path, posted(path, _with(path, inside)))


def transfers(path: str) -> Iterator[Wrong]:
    """What is wrong with the request around the body."""
    body, bad = as_json(good(path)), as_json(good(path, 7))
    kind = b"content-type: application/json\r\n"
    zipped = gzip.compress(body)
    for name, sent in (("gzip", zipped), ("cut gzip", zipped[: len(zipped) // 2]), ("no gzip", bad)):
        yield Wrong(name, path, posted(path, sent, kind + b"content-encoding: gzip\r\n"))
    for other in (
        b"",
        b"text/plain",
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=x",
    ):
        says = b"content-type: " + other + b"\r\n" if other else b""
        yield Wrong(f"content-type {other!r}", path, posted(path, bad, says))
    for length in (b"-1", b"x", b"1e3", b"99999999999999999999999", b"12\r\ncontent-length: 13"):
        message = request_head("POST", path, None, kind + b"content-length: " + length + b"\r\n") + body
        yield Wrong(f"content-length {length!r}", path, message, REFUSED | CLOSED, ends=True)
    short = request_head("POST", path, len(body) - 20) + body
    yield Wrong("content-length too short", path, short)
    for beyond in (1, 100_000):
        long = request_head("POST", path, len(body) + beyond) + body
        yield Wrong("content-length too long", path, long, CLOSED, ends=True)
    chunked = request_head("POST", path, None, kind + b"transfer-encoding: chunked\r\n")
    for size in (1, 7, 1_000):
        pieces = [bad[i : i + size] for i in range(0, len(bad), size)]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        yield Wrong(f"chunks of {size}", path, chunked + sent + b"0\r\n\r\n")
        yield Wrong(f"chunks of {size}, no last", path, chunked + sent, CLOSED, True)
    for chunk in (b"zz\r\nabc\r\n", b"-1\r\nabc\r\n", b"ffffffffffffffffff\r\nabc\r\n", b"3\r\nabcdef\r\n"):
        yield Wrong(f"chunk {chunk!r}", path, chunked + chunk + b"0\r\n\r\n", REFUSED | CLOSED, True)
    both = (
        request_head("POST", path, 5, kind + b"transfer-encoding: chunked\r\n") + b'5\r\n{"a":\r\n0\r\n\r\n'
    )
    yield Wrong("length and chunks", path, both, REFUSED | CLOSED, True)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        yield Wrong(method, path, request_head(method, path, len(bad)) + bad)


def mutations(path: str, draw: random.Random, amount: int) -> Iterator[Wrong]:
    """Good bodies cut anywhere, and with bytes changed: some are still JSON."""
    body = as_json(good(path, {"type": "content", "content": [{"type": "text", "text": "w1 w\u00e9\u4e2d"}]}))
    for _ in range(amount):
        cut = body[: draw.randrange(len(body))]
        yield Wrong(f"cut at {len(cut)}", path, posted(path, cut))
        changed = bytearray(body)
        for _ in range(draw.randrange(1, 6)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield Wrong("changed", path, posted(path, bytes(changed)), REFUSED | SERVED)


def _with(path: str, value: bytes, key: bytes = b'"prediction":') -> bytes:
    """A body whose prediction is written so."""
    rest = as_json({"model": "tiny", **ENDPOINTS[path]})
    return rest[:-1] + b"," + key + value + b"}"
