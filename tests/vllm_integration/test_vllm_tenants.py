"""State that threads, tenants and engines of one process could share: each tenant's drafts and counts are those
that it gets alone."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.vllm_integration.fakes import Engine, Renderer, Step
from tests.vllm_integration.test_usage_ledger import FrontEnd
from vllm_integration.config import settings
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import conversation
from vllm_integration.frontend.inputs import process_inputs
from vllm_integration.frontend.middleware import PredictionMiddleware
from vllm_integration.wire.request import KEY

SALTS = (None, "a", "b", "c")
#: In which each tenant answers JSON, in turn.
SPELLINGS = {None: '{"a": 1}', "a": '{"a":1}', "b": '{\n  "a": 1\n}', "c": '{"a":'}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
#: What the two engines of a process were started with; the second one last.
SETTINGS = (
    Settings(recipes="base", conversation=True, usage_details=True, memory_tokens=100),
    Settings(recipes="off", draft_without_prediction=True, bill_rejected=True),
)


class Shifted(Renderer):
    """Another tokenizer, and more than one thread."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self._by, self._executor = by, ThreadPoolExecutor(2)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [each + self._by for each in super().encode(text, add_special_tokens)]


class Server:
    """An engine behind our middleware and wrappers: it verifies some of each draft, and answers JSON."""

    def __init__(self, number: int) -> None:
        self.client, self.front = Engine(limit=4000), FrontEnd()
        self.client.renderer = Shifted(number)
        SETTINGS[number].travel_with(self.client.vllm_config)
        self.app = PredictionMiddleware(self._vllm)
        self._processor = SimpleNamespace(vllm_config=self.client.vllm_config, renderer=self.client.renderer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=self.client))
        await self.app(scope, receive, send)

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        number, salt = body["user"], body["cache_salt"]
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"), max_tokens=9)
        made = process_inputs(lambda *given: given[-1], self._processor, "r", "prompt", params)
        req_id = f"{SALTS.index(salt)}-{number}"  # the same at both engines
        self.front.add_request(SimpleNamespace(request_id=req_id, sampling_params=made))
        await asyncio.sleep(0)
        verified = 1 + (number + len(salt or "")) % 5
        for step in (Step(0, 0, 0, 0), Step(1, 8, verified, verified // 2)):
            if step.verified:  # with its last output
                del self.front.request_states[req_id]
            self.front.output(req_id, step)
            await asyncio.sleep(0)
        given = (made.extra_args or {}).get(KEY)
        drafted = None if given is None else [(given.token_ids or b"").hex(), int(given.kind), given.recipes]
        reason = "length" if salt == "c" else "stop"
        choice = {"finish_reason": reason, "text": SPELLINGS[salt] if number % 3 else "prose"}
        usage = {"completion_tokens": verified, "total_tokens": verified}
        answer = {"usage": usage, "choices": [choice], "drafted": drafted}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer, separators=(",", ":")).encode()})


def request_of(number: int, salt: str | None) -> dict[str, Any]:
    """All tenants send the same texts."""
    listing = "".join(f"{n}: line {n + number % 7}\n" for n in range(1, 9))
    more: tuple[dict[str, Any], ...] = (
        JSON,
        {},
        {"prediction": {"type": "content", "content": listing}},
        {"vllm_xargs": {"recipes": ["base"]}},
        {**JSON, "vllm_xargs": {"gpu_align": "on"}},
        {"vllm_xargs": {"gpu_align": "off"}},
    )
    messages = [{"role": "user", "content": listing}, {"role": "user", "content": f"Edit {number % 5}."}]
    return {"messages": messages, "cache_salt": salt, "user": number, **more[number % len(more)]}


async def answers_to(servers: list[Server], salt: str | None, count: int) -> list[Any]:
    """Ask each server as one tenant, one request after the other."""
    clients = [
        httpx.AsyncClient(transport=httpx.ASGITransport(each), base_url="http://t", verify=False)
        for each in servers
    ]
    got = []
    for number in range(count):
        for client in clients:
            answer = await client.post("/v1/chat/completions", json=request_of(number, salt))
            got.append(answer.json())
    return got


def served(salts: tuple[str | None, ...], threads: int, count: int) -> dict[str | None, list[Any]]:
    """Ask two new engines as all tenants; each thread serves some tenants at once."""
    servers = [Server(number) for number in range(2)]
    found: dict[str | None, list[Any]] = {}

    async def all_of(mine: tuple[str | None, ...]) -> None:
        got = await asyncio.gather(*(answers_to(servers, salt, count) for salt in mine))
        found.update(zip(mine, got, strict=True))

    running = [
        threading.Thread(target=asyncio.run, args=(all_of(salts[n::threads]),)) for n in range(threads)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not any(len(usage.requests) for usage in _collectors(servers))
    return found


def _collectors(servers: list[Server]) -> list[Any]:
    from vllm_integration.frontend.usage import collectors

    return [collectors[server.front] for server in servers]


@pytest.fixture
def quick_switches() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("count", [30])
def test_each_tenant_gets_what_it_gets_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """250 instead of 30: 2,000 requests."""
    monkeypatch.setenv("GPU_ALIGN_STRICT", "1")
    monkeypatch.setattr(settings, "_pack", lambda entry, registry: (entry, "sha256:0", True))  # unread
    together = served(SALTS, 2, count)
    for salt in SALTS:
        alone = served((salt,), 1, count)[salt]
        assert len(alone) == 2 * count
        assert together[salt] == alone
    refused = [place for place, answer in enumerate(together["a"]) if "error" in answer]
    assert refused == [*range(7, 2 * count, 12)]  # a pack that the second engine does not have
    assert len({json.dumps(answer.get("drafted")) for answer in together["a"]}) > 12


@pytest.mark.usefixtures("quick_switches")
def test_views_are_read_and_written_by_two_threads() -> None:
    views, errors, keys = (
        conversation.Views(max_bytes=3000),
        list[BaseException](),
        [bytes([n]) * 32 for n in range(40)],
    )
    end = time.monotonic() + 0.5

    def work(step: int) -> None:
        try:
            for number in range(10**9):
                if views.get(key := keys[number * step % 40]) is None:
                    views.put(key, b"x" * (90 + step))
                if time.monotonic() > end:
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert views.num_bytes == sum(conversation._size(*each) for each in views._kept.items()) <= 3000
