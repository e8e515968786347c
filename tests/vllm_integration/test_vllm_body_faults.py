"""A fault of ours while a request body is read: the body goes to vLLM as it is, with one line in the log."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_integration.frontend import body as body_limit
from vllm_integration.frontend import prediction as faults

pytestmark = pytest.mark.usefixtures("plugin_on")


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.guard, "ended", set())
    monkeypatch.setattr(body_limit, "drafts_predictions", lambda _: True)
    monkeypatch.setenv("GPU_ALIGN_MAX_BODY_BYTES", "20")
    monkeypatch.delenv("GPU_ALIGN_STRICT", raising=False)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected\nfault")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (body_limit, "in_use"),
        (body_limit.Settings, "from_env"),
        (body_limit, "_to_be_read"),
        (body_limit, "BodyScan"),
        (body_limit.BodyScan, "feed"),
        (body_limit.BodyScan, "_look_for_key"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_body_that_cannot_be_read_goes_to_vllm(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    chunks = [b'{"prediction": ', b'"w1 w2", ', b'"n": 1}']
    assert asyncio.run(_through_the_limit(chunks))[0] == 413
    monkeypatch.setattr(owner, name, broken)
    for _ in range(2):
        assert asyncio.run(_through_the_limit(chunks)) == (200, b"".join(chunks))
    assert plugin_log == [
        r"gpu_align could not check a request body (told once): RuntimeError: injected\nfault"
    ]
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(_through_the_limit(chunks))


def test_a_body_that_was_over_the_limit_before_the_fault_is_refused(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    """Of what had arrived by then nothing was kept, and vLLM must not get the rest."""
    feed = body_limit.BodyScan.feed
    monkeypatch.setattr(
        body_limit.BodyScan, "feed", lambda self, part: broken() if b"n" in part else feed(self, part)
    )
    status, body = asyncio.run(_through_the_limit([b'{"p": [9, 9, ', b"9, 9, 9], ", b'"n": 1}']))
    assert (status, body) == (200, b'{"p": [9, 9, 9, 9, 9], "n": 1}')
    chunks = [b'{"\\u0070redictio\\u006e": ', b'"w1 w2", ', b'"n": 1}']
    assert asyncio.run(_through_the_limit(chunks))[0] == 413
    assert len(plugin_log) == 1


async def _through_the_limit(chunks: list[bytes]) -> tuple[int, bytes]:
    """Status and what the application got of a body in chunks."""
    got: list[bytes] = []
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            got.append(message["body"])
            if not message["more_body"]:
                return await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=None))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await body_limit.BodyLimit(app)(scope | {"app": SimpleNamespace(state=state)}, receive, send)
    return sent[0]["status"], b"".join(got)
