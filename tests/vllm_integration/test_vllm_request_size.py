"""Bodies that are refused before they are parsed, too large or out of place, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tests.vllm_integration.fakes import ENDPOINTS, Engine, Serving, make_app, refused, send
from vllm_integration.frontend import middleware
from vllm_integration.frontend.prediction import UNSUPPORTED_ENDPOINTS
from vllm_integration.seams import install as compat

pytestmark = pytest.mark.vllm

CHUNK = 65536  # what uvicorn reads at once
GOOD = {"model": "tiny", **ENDPOINTS["/v1/completions"]}
SERVED = (200, b'{"error":{"message":"served","type":"served","param":null,"code":200}}')
GONE: tuple[dict[str, Any], ...] = ({"type": "http.disconnect"},)


def chunked(body: bytes, size: int = CHUNK) -> list[bytes]:
    return [body[i : i + size] for i in range(0, len(body), size)]


def with_prediction(content: Any = "w1", **fields: Any) -> dict[str, Any]:
    return {**GOOD, "prediction": {"type": "content", "content": content, **fields}}


def long_body(characters: int) -> bytes:
    """A request whose prediction is that long, of text as code is: every 40th character is escaped."""
    line = "    return self.read(path, encoding=7)" + "\n"
    return json.dumps(with_prediction((line * (characters // len(line) + 1))[:characters])).encode()


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "2000")


def post(app: Any, chunks: list[bytes], path: str = "/v1/completions", **how: Any) -> tuple[int, bytes, int]:
    return asyncio.run(send(app, path, chunks, **how))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("says_length", [False, True])
def test_a_long_body_with_a_prediction_is_refused(
    request_app: Any, small_limit: None, path: str, says_length: bool
) -> None:
    before = refused("bytes")
    body = json.dumps({"model": "tiny", **ENDPOINTS[path], "prediction": "w1 " * 2000}).encode()
    chunks = chunked(body, 500)
    status, answer, read = post(request_app, chunks, path, length=len(body) if says_length else None)
    assert status == 413
    assert json.loads(answer) == {
        "error": {
            "message": "prediction: expected a request body of at most 2000 bytes (GPU_ALIGN_MAX_BODY_BYTES), "
            f"got {len(body)}",
            "type": "BadRequestError",
            "param": "prediction",
            "code": 413,
        }
    }
    assert read == len(chunks)  # a client that sends before it listens must be able to finish
    assert refused("bytes") == before + 1


#: Keys that JSON reads as `prediction`.
KEYS = (
    b'"prediction"  \n :',
    b'"prediction"' + b" \n" * 300 + b":",
    rb'"\u0070rediction":',
    rb'"pr\u0065dict\u0069on" :',
    rb'"predicti\u006Fn":',
    rb'"predicti\u006fn":',
    b'"' + b"".join(rb"\u%04x" % letter for letter in b"prediction") + b'":',
)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")


def test_the_key_is_found_however_it_is_written(request_app: Any, small_limit: None) -> None:
    text = json.dumps({**GOOD, "suffix": "\u2222" * 2000, "prediction": "w1"}, ensure_ascii=False)
    bodies = [text.encode().replace(b'"prediction":', key) for key in KEYS]
    bodies += [text.encode(encoding) for encoding in ENCODINGS]
    for body in bodies:
        assert json.loads(body)["prediction"] == "w1"
    bodies.append(
        json.dumps({**GOOD, "user": "x" * 2000, "vllm_xargs": {"gpu_align_prediction": [1]}}).encode()
    )
    for body in bodies:
        assert post(request_app, chunked(body, 1000))[0] == 413, body[-50:]


def test_other_bodies_reach_vllm_whole(
    request_app: Any, small_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prediction, or the word in a text: then it is no key. And what is as long as is allowed."""
    for text in ("x" * 3000, '"prediction": ' * 300, '"\\u0070rediction": ' * 300, "prediction" * 300):
        body = json.dumps({**GOOD, "user": text}).encode()
        assert post(request_app, chunked(body, 100))[:2] == SERVED
    body = long_body(3000)
    assert post(request_app, chunked(body), path="/v1/embeddings")[0] == 404
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", str(limit))
        for length in (None, len(body)):
            assert post(request_app, chunked(body, 10), length=length)[0] == status
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    for scope in ({"type": "websocket", "path": "/v1/completions"}, {"type": "lifespan"}):
        asyncio.run(middleware.PredictionMiddleware(app)(scope, receive=None, send=None))  # type: ignore[arg-type]
    assert len(seen) == 2


def test_with_the_plugin_off_and_without_a_client_it_is_vllms_business(
    request_app: Any, small_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = refused("bytes")
    with_us = post(request_app, chunked(long_body(5000), 500), more=GONE)
    assert refused("bytes") == before
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    assert with_us == post(request_app, chunked(long_body(5000), 500), more=GONE)
    assert post(request_app, chunked(long_body(5000)))[0] == 200


def test_other_requests_do_not_wait_for_a_body_that_does_not_end(request_app: Any) -> None:
    begun, more = b'{"prediction": "w1 ', {"type": "http.request", "body": b"w2", "more_body": True}

    async def both() -> tuple[int, bytes, int]:
        slow = asyncio.create_task(send(request_app, "/v1/completions", [begun], more=(more,)))
        await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(send(request_app, "/v1/completions", [json.dumps(GOOD).encode()]), 10)
        assert not slow.done()
        slow.cancel()
        return answer

    assert asyncio.run(both())[:2] == SERVED


def test_structure_counts_outside_of_strings_only() -> None:
    """By a parser: keys, arrays, objects, and every comma between them."""

    def count(value: Any) -> tuple[int, int]:
        children = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        inside = [count(child) for child in children]
        own = (len(value) if isinstance(value, dict) else 0) + isinstance(value, (dict, list))
        commas = max(len(inside) - 1, 0)
        return own + sum(n for n, _ in inside), commas + sum(n for _, n in inside)

    generator = random.Random(14)

    def text() -> str:
        return "".join(generator.choices('{}[]:,"\\\n\u0101 ab', k=generator.randrange(9)))

    def value(depth: int) -> Any:
        if not depth or generator.random() < 0.3:
            return generator.choice([text(), 7, None, True, 1.5])
        parts = [value(depth - 1) for _ in range(generator.randrange(5))]
        return parts if generator.random() < 0.5 else {text(): part for part in parts}

    for _ in range(300):
        document = {"prediction": value(5)}
        for ascii_only in (True, False):
            body = json.dumps(document, ensure_ascii=ascii_only, indent=generator.choice([None, 1])).encode()
            structures, commas = count(document)
            assert middleware.scan(body, 0) == (True, True, structures + commas // 4), body
            assert middleware.scan(body, len(body)) == (True, True, 0)


# A prediction where nothing would read it.


async def told(request: Any) -> Any:
    """How much of a body a route got."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture(scope="module")
def app_with_more(request_app: Any) -> Any:
    """vLLM's application with a route for each endpoint that has no place for a prediction, and two others."""
    for path in (*UNSUPPORTED_ENDPOINTS, "/v1/messages", "/v1/other"):
        request_app.add_route(path, told, methods=["POST"])
    return request_app


def ask(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    return post(app, chunked(body, max(1, len(body) // 3)), path, length=len(body))[:2]


@pytest.mark.parametrize("path", UNSUPPORTED_ENDPOINTS)
def test_a_prediction_out_of_place_is_a_400_that_names_the_field(app_with_more: Any, path: str) -> None:
    before = refused("unsupported")
    for prediction in ('{"type": "content", "content": "secret"}', '"secret"', "7", "false", "[]"):
        for key in ('"prediction"', '"\\u0070rediction"'):
            status, answer = ask(app_with_more, path, f'{{"model": "m", {key} : {prediction}}}'.encode())
            assert status == 400
            error = json.loads(answer)["error"]
            assert error["param"] == "prediction"
            assert error["message"] == f"prediction: {path} does not take a prediction"
    assert refused("unsupported") == before + 10


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"",
        b'{"prediction": null}',
        b'{"messages": [{"prediction": 7}], "x": "prediction"}',
        b'["prediction", {"prediction": 7}]',
        b'{"prediction": 7',
        b"[" * 100_000 + b'{"prediction":1',
        b'\xff{"prediction": 7}',
    ],
)
def test_a_body_without_a_prediction_passes_whole(app_with_more: Any, body: bytes) -> None:
    for path in UNSUPPORTED_ENDPOINTS[:2]:
        assert ask(app_with_more, path, body) == (200, str(len(body)).encode())


def test_predictions_are_looked_for_on_our_endpoints_alone(
    app_with_more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.requests import ClientDisconnect

    body, path = b'{"prediction": 7}', UNSUPPORTED_ENDPOINTS[0]
    status, answer = ask(app_with_more, "/v1/messages", body)
    assert (status, json.loads(answer)["type"]) == (400, "error")
    assert ask(app_with_more, "/v1/messages", b'{"system": "prediction"}') == (200, b"24")
    assert ask(app_with_more, "/v1/other", body) == (200, b"17")
    other = Serving(Engine("ngram"))
    ngram = make_app(other)
    ngram.add_route(path, told, methods=["POST"])
    assert ask(ngram, path, body) == (200, b"17")
    with pytest.raises(ClientDisconnect):  # of whoever reads the body behind us
        asyncio.run(asyncio.wait_for(send(app_with_more, path, [b'{"prediction"'], more=GONE), 10))


# A fault of ours: the body goes to vLLM as it is, with one line in the log.


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected\nfault")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (middleware, "drafts_predictions"),
        (middleware.Settings, "here"),
        (middleware, "_to_be_read"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize(("path", "refusal"), [("/v1/other", 413), (UNSUPPORTED_ENDPOINTS[0], 400)])
def test_a_body_that_cannot_be_read_goes_to_vllm(
    app_with_more: Any,
    path: str,
    refusal: int,
    owner: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
) -> None:
    monkeypatch.setattr(middleware, "ENDPOINTS", ("/v1/other",))
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "20")
    body = b'{"prediction": "w1 w2", "n": 1}'
    assert ask(app_with_more, path, body)[0] == refusal
    monkeypatch.setattr(owner, name, broken)
    for _ in range(2):
        assert ask(app_with_more, path, body) == (200, str(len(body)).encode())
    (line,) = plugin_log
    assert line.startswith("gpu_align does not look at a request in this step: RuntimeError at ")
    assert "injected" not in line
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(RuntimeError, match="injected"):
        ask(app_with_more, path, body)


def test_a_scan_that_fails_costs_the_limit_alone(
    request_app: Any, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(middleware, "scan", broken)
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "20")
    for path, status in (("/v1/completions", 200), (UNSUPPORTED_ENDPOINTS[0], 400)):
        assert ask(request_app, path, json.dumps(with_prediction()).encode())[0] == status
    (line,) = plugin_log
    assert line.startswith("gpu_align does not limit request bodies in this step: RuntimeError at ")
