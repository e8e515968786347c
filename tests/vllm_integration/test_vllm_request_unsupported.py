"""Endpoints that have no place for a prediction refuse one, and pass everything else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from request_app import Serving, make_app, send
from starlette.requests import ClientDisconnect
from usage_harness import refused

from vllm_integration.frontend import body as unsupported
from vllm_integration.frontend import prediction as faults
from vllm_integration.frontend.body import UNSUPPORTED_ENDPOINTS as ENDPOINTS
from vllm_integration.seams import install as compat

pytest.importorskip("vllm")


@pytest.fixture
def app(request_app: Any) -> Any:
    """vLLM's application with a route for each of them, which tells how much of a body it got."""
    for path in ENDPOINTS:
        if not any(getattr(route, "path", None) == path for route in request_app.routes):
            request_app.add_route(path, told, methods=["POST"])
    return request_app


async def told(request: Any) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(str(len(await request.body())))


def ask(app: Any, path: str, body: bytes, pieces: int = 3) -> tuple[int, bytes]:
    size = max(1, len(body) // pieces)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    status, answer, _ = asyncio.run(send(app, path, chunks, length=len(body)))
    return status, answer


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_prediction_is_a_400_that_names_the_field(app: Any, path: str) -> None:
    before = refused("unsupported")
    for prediction in ('{"type": "content", "content": "secret"}', '"secret"', "7", "false", "[]"):
        for key in ('"prediction"', '"\\u0070rediction"'):
            status, answer = ask(app, path, f'{{"model": "m", {key} : {prediction}}}'.encode())
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
def test_what_brings_none_passes_whole(app: Any, body: bytes) -> None:
    for path in ENDPOINTS[:2]:
        assert ask(app, path, body) == (200, str(len(body)).encode())


def test_messages_refuse_one_where_vllm_has_changed_so_that_it_cannot_be_read(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add_route("/v1/messages", told, methods=["POST"])
    for installed, status in (({"messages"}, 200), (set(), 400)):
        monkeypatch.setattr(compat, "_installed", installed)
        assert ask(app, "/v1/messages", b'{"prediction": 7}')[0] == status


def test_other_paths_methods_and_engines_pass(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prediction": 7}'
    app.add_route("/v1/other", told, methods=["POST"])
    assert ask(app, "/v1/other", body) == (200, b"17")
    other = Serving()
    other.engine_client.vllm_config.speculative_config.method = "ngram"
    ngram = make_app(other)
    ngram.add_route(ENDPOINTS[0], told, methods=["POST"])
    assert ask(ngram, ENDPOINTS[0], body) == (200, b"17")


def test_a_client_that_goes_away_is_not_waited_for(app: Any) -> None:
    gone: tuple[dict[str, Any], ...] = ({"type": "http.disconnect"},)
    with pytest.raises(ClientDisconnect):  # of whoever reads the body behind us
        asyncio.run(asyncio.wait_for(send(app, ENDPOINTS[0], [b'{"prediction"'], more=gone), 10))


def test_a_fault_costs_no_answer(app: Any, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]) -> None:
    monkeypatch.setattr(faults.guard, "ended", set())
    monkeypatch.setattr(unsupported, "BodyScan", lambda: 1 / 0)
    for _ in range(2):
        assert ask(app, ENDPOINTS[0], b'{"prediction": 7}') == (200, b"17")
    (line,) = plugin_log
    assert line.startswith("gpu_align could not check a request body (told once): ZeroDiv")
