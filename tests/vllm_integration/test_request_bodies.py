"""Bodies to vLLM's own HTTP application with the plugin: wrong as JSON or as a prediction, too large, misplaced.

Every junk value stands in every place of the field, and documents that are no JSON, or too much of it, or say
something twice. What is to become of them is stated here again, by the documentation alone: served, or an answer
of 4xx.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_integration.fakes import ENDPOINTS, Engine, post, refused
from vllm_integration.frontend import middleware
from vllm_integration.frontend.middleware import LongBody, PredictionMiddleware
from vllm_integration.frontend.prediction import UNSUPPORTED_ENDPOINTS
from vllm_integration.seams.guard import Guard

#: Characters of a prediction that are read; what lies beyond them is cut.
CHARACTERS = 16 * 512
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


def is_taken(value: Any, *, plain_text: bool, characters: int) -> bool:
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
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return False
    return _is_unicode("".join(part["text"] for part in content)[:characters])


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def as_json(body: Any) -> bytes:
    """As JavaScript clients send it: surrogates escaped."""
    return json.dumps(body).encode()


#: Bodies that are no JSON, or not an object, or say something twice: vLLM answers 400 to most before it asks us.
RAW_BODIES: tuple[bytes, ...] = (
    b"", b"null", b"[]", b'"prediction"', b"7",
    b'{"model":"tiny","prediction":{"type":"content","content":"w1', b'{"prediction":"\\ud8',
    b'{"prediction":"\\x"}', b'{"prediction":"\xff\xfe"}', b'{"prediction":"\xed\xa0\x80"}',
    b'{"prediction":"\x00"}', b'{"prediction":"a\nb"}', b'\xef\xbb\xbf{"prediction":7}',
    '{"prediction":7}'.encode("utf-16"), b"{'prediction': 'w1'}", b'{"prediction":7} 7',
    b'{"prediction":7 /* seven */}',
)  # fmt: skip


def good(path: str, value: Any) -> dict[str, Any]:
    """A request that is served, or would be but for this prediction."""
    return {"model": "tiny", **ENDPOINTS[path], "prediction": value}


def with_raw(path: str, value: bytes, key: bytes = b'"prediction":') -> bytes:
    """A body whose prediction is written so."""
    return as_json({"model": "tiny", **ENDPOINTS[path]})[:-1] + b"," + key + value + b"}"


def documents(path: str) -> Iterator[bytes]:
    """Bodies that no endpoint serves."""
    yield from RAW_BODIES
    text = json.dumps(good(path, 7))
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        yield text.encode(encoding)
    yield text.encode("utf-16")[:-1]
    for depth in (200, 1_000, 30_000, 200_000):
        yield with_raw(path, b"[" * depth + b"]" * depth)
        yield with_raw(path, b'{"a":' * depth + b"1" + b"}" * depth)
    yield with_raw(path, as_json({f"k{i}": i for i in range(100_000)}))
    yield with_raw(path, b"[" + b"[]," * 100_000 + b"[]]")
    for key in (b'"prediction":', rb'"\u0070rediction":', rb'"predictio\u006E" :'):
        yield with_raw(path, b'{"type":"content","content":"' + b"w1 " * 1_500_000 + b'"}', key)
        yield with_raw(path, b"7", key)
    for number in (b"9" * 5_000, b"1e400", b"-1e99999", b"NaN", b"01", b"1.", b"0x10"):
        yield with_raw(path, number)
        yield with_raw(path, b'{"type":"content","content":%s}' % number)
    yield with_raw(path, b'{"type":"content","content":"w1"}')[:-1] + b',"prediction":7}'
    yield with_raw(path, b'{"type":"content","content":"w1","type":"text","content":7}')
    for value in (
        None,
        7,
        1.5,
        {},
        [None],
        [[1], 2],
        [["1"]],
        ["1", 2],
        [1.5],
        [-1],
        [2**31],
        [2**63],
        [10**30],
        "\ud800",
    ):
        yield as_json({**good(path, None), "vllm_xargs": {"gpu_align_prediction": value}})


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_value_is_served_or_refused_as_documented(
    path: str, request_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ALIGN_MAX_PREDICTION_CHARS", str(CHARACTERS))
    for value in predictions():
        taken = is_taken(value, plain_text=path == "/v1/completions", characters=CHARACTERS)
        status, _ = post(request_app, path, as_json(good(path, value)))
        assert status == 200 if taken else 400 <= status < 500, (str(value)[:200], status)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_other_document_is_served(path: str, request_app: Any) -> None:
    for body in documents(path):
        status, _ = post(request_app, path, body)
        assert 400 <= status < 500, (body[:200], status)


# --- limits of a body ---

GOOD = {"model": "tiny", **ENDPOINTS["/v1/completions"]}


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "2000")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_long_body_with_a_prediction_is_refused(request_app: Any, small_limit: None, path: str) -> None:
    """When it has been read: a client that sends before it listens must be able to finish."""
    before, body = refused("bytes"), as_json({"model": "tiny", **ENDPOINTS[path], "prediction": "w1 " * 2000})
    left = [body[i : i + 500] for i in range(0, len(body), 500)]

    async def parts() -> AsyncIterator[bytes]:
        while left:
            yield left.pop(0)

    status, answer = post(request_app, path, parts())
    assert (status, left, refused("bytes")) == (413, [], before + 1)
    error = json.loads(answer)["error"]
    assert (error["param"], error["code"]) == ("prediction", 413)
    assert f"at most 2000 bytes (GPU_ALIGN_MAX_BODY_BYTES), got {len(body)}" in error["message"]


def test_a_body_is_served_up_to_its_limits(request_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = as_json(good("/v1/completions", {"type": "content", "content": "w1\n" * 2000}))
    for limit, expected in ((len(body), 200), (len(body) - 1, 413)):
        monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", str(limit))
        assert post(request_app, "/v1/completions", body)[0] == expected


def test_the_key_is_found_however_it_is_written(request_app: Any, small_limit: None) -> None:
    text = json.dumps({**GOOD, "suffix": "\u2222" * 2000, "prediction": "w1"}, ensure_ascii=False)
    keys = b'"prediction"' + b" \n" * 300 + b":", rb'"\u0070rediction":', rb'"pr\u0065dict\u0069on" :'
    bodies = [text.encode().replace(b'"prediction":', key) for key in keys]
    bodies += [text.encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-32-be")]
    assert {json.loads(body)["prediction"] for body in bodies} == {"w1"}
    bodies.append(as_json({**GOOD, "user": "x" * 2000, "vllm_xargs": {"gpu_align_prediction": [1]}}))
    for body in bodies:
        assert post(request_app, "/v1/completions", body)[0] == 413, body[-50:]
    # The word in a text is no key.
    for said in ("x" * 3000, '"prediction": ' * 300, '"\\u0070rediction": ' * 300, "prediction" * 300):
        assert post(request_app, "/v1/completions", as_json({**GOOD, "user": said}))[0] == 200


KEY = "gpu_align_prediction"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"prediction": {}}}}}
BIG = {**GOOD, "user": "x" * 3000}
OFF = {"gpu_align": "off"}
#: Bodies over the limit, headers, and what they get.
OVER: dict[str, tuple[Any, dict[str, str], int]] = {
    "a nested key": ({**BIG, "tools": [TOOL], "x": {"prediction": "a", "y": [{"prediction": 1}]}}, {}, 200),
    "null": ({**BIG, "prediction": None}, {}, 200),
    "nothing is as empty as a prediction": ({"prediction": "", **BIG}, {}, 413),
    "a number": ({"prediction": 0, **BIG}, {}, 413),
    "a long one": ({"prediction": {"type": "content", "content": 'w1 "\\' * 2000}, **GOOD}, {}, 413),
    "twice, the last one null": (b'{"prediction":"a",' + as_json({**BIG, "prediction": None})[1:], {}, 200),
    "twice, the first one null": (b'{"prediction":null,' + as_json({**BIG, "prediction": "a"})[1:], {}, 413),
    "ids": ({**BIG, "vllm_xargs": {"x": "a", KEY: [1]}}, {}, 413),
    "ids elsewhere": ({**BIG, "x": {"vllm_xargs": {KEY: [1]}}, KEY: [1]}, {}, 200),
    "off by a header": ({**BIG, "prediction": "a"}, {"x-gpu-align": "off"}, 200),
    "on by a header": ({**BIG, "prediction": "a"}, {"x-gpu-align": "on"}, 413),
    "off, then a prediction": ({"vllm_xargs": OFF, **BIG, "prediction": "a"}, {}, 200),
    "a prediction, then off": ({"prediction": "w1 " * 2000, **BIG, "vllm_xargs": OFF}, {}, 200),
    "ids and off": ({**BIG, "vllm_xargs": {KEY: [1], "gpu_align": 0, "x": 1}}, {}, 200),
    "on and off": ({**BIG, "prediction": "a", "vllm_xargs": {"gpu_align": "on"}}, {"x-gpu-align": "off"}, 413),
    "a bad switch": ({**BIG, "prediction": "a", "vllm_xargs": {"gpu_align": "no"}}, {}, 400),
    "a bad header": (BIG, {"x-gpu-align": "no"}, 400),
    "a conversation": ({**BIG, "vllm_xargs": {"conversation": 1}}, {}, 200),
    "no JSON": (as_json({**BIG, "prediction": None})[:-1], {}, 400),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 13, 10**6])
@pytest.mark.parametrize("name", OVER)
def test_only_a_body_that_predicts_is_refused(
    request_app: Any, small_limit: None, name: str, size: int
) -> None:
    given, headers, expected = OVER[name]
    body = given if isinstance(given, bytes) else as_json(given)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    assert post(request_app, "/v1/completions", parts(), **headers)[0] == expected


@pytest.mark.parametrize("seed", range(30))
def test_a_long_body_tells_whether_it_predicts(seed: int) -> None:
    """However it is cut and encoded, and whatever is in it."""
    draw = random.Random(seed)
    texts = [
        "",
        "a",
        '"',
        "\\",
        '\\"',
        ' "prediction": ',
        "é\n\u2222",
        "prediction",
        "vllm_xargs",
        "gpu_align",
        "off",
        "x" * 126,
        "x" * 127,
        '\\"' * 90,
    ]

    def value(depth: int) -> Any:
        kind = draw.randrange(7 if depth < 4 else 4)
        if kind == 4:
            return [value(depth + 1) for _ in range(3)]
        if kind > 4:
            return {draw.choice([*texts, KEY]): value(depth + 1) for _ in range(draw.randrange(4))}
        return [draw.choice(texts), None, draw.random(), True][kind]

    for _ in range(30):
        document = {
            name: value(0) for name in draw.sample(["a", "b", "prediction", "é"], draw.randrange(1, 5))
        }
        if draw.random() < 0.5:
            document["vllm_xargs"] = {
                "x": value(1),
                "gpu_align": draw.choice(["off", False, 1]),
                KEY: value(1),
            }
        indent, ascii_ = draw.choice([None, 2]), draw.random() < 0.5
        encoding = draw.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
        body = json.dumps(document, indent=indent, ensure_ascii=ascii_).encode(encoding)
        cuts = sorted(draw.sample(range(4, len(body)), min(len(body) - 4, draw.randrange(9))))
        found = LongBody()
        for start, end in pairwise([0, *cuts, len(body)]):
            found.feed(body[start:end])
        assert found.num_bytes == len(body)
        assert found.document() == outer(document, ascii_)


def outer(document: dict[str, Any], ensure_ascii: bool) -> dict[str, Any]:
    """The two levels of it that are kept."""

    def short(value: Any, levels: int) -> Any:
        if isinstance(value, dict) and levels:
            return {short(key, 0): short(each, levels - 1) for key, each in value.items()}
        if isinstance(value, (dict, list)):
            return 0
        is_long = isinstance(value, str) and len(json.dumps(value, ensure_ascii=ensure_ascii)) > 128
        return "" if is_long else value

    return dict(short(document, 2))


def test_a_long_body_is_neither_kept_nor_stops_other_requests() -> None:
    """64 MB of a prediction in one piece; processor time between two turns of the event loop."""
    text, most, turns = b"word \\n" * 2**23, 0.0, 0
    pieces = [b'{"model":"m","prediction":"', text, b'"}']

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            sizes.append(len(message["body"]))

    async def watch(task: Any) -> None:
        nonlocal most, turns
        while not task.done():
            begun = time.thread_time()
            await asyncio.sleep(0)
            most, turns = max(most, time.thread_time() - begun), turns + 1

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=Engine()))
        task = asyncio.create_task(PredictionMiddleware(vllm)(scope, receive, send))
        await watch(task)
        await task

    async def send(message: Any) -> None:
        answers.append(message)

    sizes, answers = list[int](), list[Any]()
    tracemalloc.start()
    asyncio.run(run())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answers[0]["status"] == 413
    assert sizes == [27, len(text)]  # and its end never
    assert peak < 2**20
    assert turns > len(text) / 2**15
    assert most < 0.05


def test_a_fault_that_looks_at_a_long_body_lets_it_pass(
    request_app: Any, small_limit: None, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    guard = Guard("body limit", "does not limit request bodies", core=True)
    monkeypatch.setattr(middleware, "_limiting", guard)
    monkeypatch.setattr(LongBody, "feed", lambda *_: 1 / 0)
    assert post(request_app, "/v1/completions", as_json({**BIG, "prediction": "a"}))[0] == 200
    assert ["ZeroDivisionError" in line for line in plugin_log] == [True]


# --- a prediction where nothing would read it ---


async def told(request: Any) -> Any:
    """How much of a body a route got."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture(scope="module")
def app_with_more(request_app: Any) -> Any:
    """vLLM's application with a route for each endpoint that has no place for a prediction."""
    for path in UNSUPPORTED_ENDPOINTS:
        request_app.add_route(path, told, methods=["POST"])
    return request_app


@pytest.mark.parametrize("path", UNSUPPORTED_ENDPOINTS)
def test_a_prediction_out_of_place_is_a_400_that_names_the_field(app_with_more: Any, path: str) -> None:
    before = refused("unsupported")
    for prediction in (b'{"type": "content", "content": "secret"}', b'"secret"', b"7", b"false", b"[]"):
        for key in (b'"prediction"', rb'"\u0070rediction"'):
            status, answer = post(app_with_more, path, b'{"model": "m", %s : %s}' % (key, prediction))
            error = json.loads(answer)["error"]
            assert (status, error["param"]) == (400, "prediction")
            assert path in error["message"]
            assert "secret" not in error["message"]
    assert refused("unsupported") == before + 10


def test_a_body_without_a_prediction_passes_whole(app_with_more: Any) -> None:
    for body in (
        b"{}",
        b"",
        b'{"prediction": null}',
        b'{"messages": [{"prediction": 7}], "x": "prediction"}',
        b'["prediction", {"prediction": 7}]',
        b'{"prediction": 7',
        b"[" * 100_000 + b'{"prediction":1',
        b'\xff{"prediction": 7}',
    ):
        assert post(app_with_more, UNSUPPORTED_ENDPOINTS[0], body) == (200, str(len(body)).encode())
