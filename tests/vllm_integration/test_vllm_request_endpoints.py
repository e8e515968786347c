"""Each endpoint of a real server with what a request says to us, and its start. (Step logs: `tests/campaign`.)"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.vllm.clients import Answer, ask_all, events_of, moved, question, scrape, written
from tests.vllm.engines import SERVER_K as K
from tests.vllm.engines import Server

pytestmark = pytest.mark.vllm

N = 40
CHAT = "/v1/chat/completions"
ENDPOINTS = {
    CHAT: {"messages": question(7), "max_tokens": N},
    "/v1/chat/completions/batch": {"messages": [question(7), question(8)], "max_tokens": N},
    "/v1/completions": {"prompt": ["w5 w6 w7", "w8 w9"], "max_tokens": N},
    "/v1/responses": {"input": question(7), "max_output_tokens": N},
}


def ask(server: Server, path: str, *bodies: dict[str, Any]) -> list[Answer]:
    return ask_all(server.url, [{"temperature": 0, **ENDPOINTS[path], **body} for body in bodies], path)


def content(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def ids(text: str) -> dict[str, Any]:
    return {"vllm_xargs": {"gpu_align_prediction": [int(word[1:]) + 4 for word in text.split()]}}


def test_a_view_is_drafted_from_and_counted_as_the_prediction(server: Server) -> None:
    """The tokens of the raw text, with a number at each word, are none that the model writes."""
    for path in (CHAT, "/v1/responses", "/v1/completions"):
        (plain,) = ask(server, path, {})
        words = plain.texts[0].split()
        listing = "".join(f"{n}:{word}\n" for n, word in enumerate(words, 1))
        raw, viewed = (
            ask(server, path, {"prediction": {"type": "content", "content": listing, "views": views}})[0]
            for views in ([], ["json", "unnumbered"])
        )
        assert raw.texts == viewed.texts == plain.texts
        assert raw.accepted_rejected[0] == 0
        assert viewed.accepted_rejected[0] > N // 2
    bad = {"prediction": {"type": "content", "content": "w5", "views": ["xml"]}}
    answer = httpx.post(f"{server.url}{CHAT}", json={"model": "tiny", **ENDPOINTS[CHAT], **bad})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")
    assert "json, json_ascii" in answer.text


def test_an_empty_prediction_is_none_and_the_request_log_shows_none(server: Server) -> None:
    (plain,) = ask(server, CHAT, {})
    for nothing in ({"prediction": None}, content(""), content([])):
        (answer,) = ask(server, CHAT, nothing)
        assert (answer.texts, answer.accepted_rejected) == (plain.texts, (-1, -1))
        assert not list(server.logs.glob(f"{answer.id}-*"))
    (answer,) = ask(server, CHAT, content(plain.texts[0].replace(" ", "\r\n")))
    (line,) = [line for line in server.output.read_text().splitlines() if f"request {answer.id}:" in line]
    assert "prediction" not in line
    assert plain.texts[0].split()[3] not in line


def message(server: Server, **more: Any) -> httpx.Response:
    body = {"model": "tiny", **ENDPOINTS[CHAT], "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)


def text_of(answer: httpx.Response) -> str:
    return "".join(written(events_of(answer.content)))


def test_messages_of_anthropic_take_a_prediction(server: Server) -> None:
    first = message(server)
    plain = text_of(first)
    assert len(plain.split()) == N
    parts = content([{"type": "text", "text": plain}])
    for more in (content(plain), {**parts, "stream": True}, ids(plain)):
        before = scrape(server.url)
        answer = message(server, **more)
        assert answer.status_code == 200, answer.text
        assert text_of(answer) == plain
        assert more.get("stream") or answer.json()["usage"] == first.json()["usage"]
        by = moved(before, scrape(server.url))
        assert by["gpu_align_requests_total"] == 1
        # Each of the few steps adds a token of the model's own.
        assert by['gpu_align_prediction_tokens_total{verdict="accepted"}'] > N - 8
        assert 'gpu_align_prediction_tokens_total{verdict="rejected"}' not in by
        assert by["gpu_align_steps_total"] < 8
    for nothing in ({"prediction": None}, content("")):
        before = scrape(server.url)
        assert text_of(message(server, **nothing)) == plain
        assert "gpu_align_requests_total" not in moved(before, scrape(server.url))
    assert message(server, system="prediction", metadata={"prediction": 7}).status_code == 200
    malformed = {"gpu_align_prediction": [-1]}
    for more in (
        {"prediction": "w1"},
        content(7),
        {"prediction": 7, "stream": True},
        {"vllm_xargs": malformed},
    ):
        answer = message(server, **more)
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert "prediction" in answer.json()["error"]["message"]
    assert message(server, vllm_xargs={"recipes": 7}).status_code == 400
    body = {"messages": question(7), "input": "w1", **content("w1")}
    answer = httpx.post(f"{server.url}/v1/systemone", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


def with_call(arguments: dict[str, str]) -> list[dict[str, Any]]:
    """A conversation with a tool call, whose arguments this model's template leaves out: it never sees them."""
    function = {"name": "write", "arguments": json.dumps(arguments)}
    call = {"id": "1", "type": "function", "function": function}
    return [*question(7), {"role": "assistant", "content": "w1", "tool_calls": [call]}, *question(8)]


def test_a_conversation_is_drafted_from_and_changes_no_answer(server: Server) -> None:
    on = {"vllm_xargs": {"conversation": 1}}
    (plain,) = ask(server, CHAT, {"messages": with_call({})})
    written = with_call({"content": plain.texts[0].replace(" ", "\n")})
    for body in (on, {**on, "stream": True, "stream_options": {"include_usage": True}}):
        before = scrape(server.url)
        (answer,) = ask(server, CHAT, {"messages": written, **body})
        assert (answer.texts, answer.accepted_rejected) == (plain.texts, (-1, -1))
        by = moved(before, scrape(server.url))
        assert by['gpu_align_draft_tokens_total{source="memory",verdict="accepted"}'] > N - 15
        assert "gpu_align_requests_total" not in by, "nobody sent a prediction"
    before = scrape(server.url)
    (off,) = ask(server, CHAT, {"messages": written})
    assert (off.texts, moved(before, scrape(server.url))) == (plain.texts, {})


@pytest.mark.parametrize("path", ENDPOINTS)
def test_off_for_one_request_is_as_without_a_prediction(server: Server, path: str) -> None:
    (plain,) = ask(server, path, {})
    hint, before = content(plain.texts[0]), scrape(server.url)
    (off,) = ask(server, path, {**hint, "vllm_xargs": {"gpu_align": "off"}})
    assert (off.texts, off.accepted_rejected) == (plain.texts, (-1, -1))
    body = {"model": "tiny", "temperature": 0, **ENDPOINTS[path], **hint}
    for value, status in (("off", 200), ("maybe", 400)):
        answer = httpx.post(f"{server.url}{path}", json=body, headers={"X-GPU-Align": value}, timeout=120)
        assert answer.status_code == status, answer.text
    assert moved(before, scrape(server.url)) == {}


def test_on_for_one_request_drafts_from_its_context(server: Server) -> None:
    before = scrape(server.url)
    asked = {"messages": [{"role": "user", "content": "w5 w6 w7 " * 20}], "max_tokens": 60}
    (plain,) = ask(server, CHAT, asked)
    (on,) = ask(server, CHAT, {**asked, "vllm_xargs": {"gpu_align": "on"}})
    assert (on.texts, on.accepted_rejected) == (plain.texts, (-1, -1))
    assert moved(before, scrape(server.url))["gpu_align_steps_total"] > 0


def test_the_server_says_what_it_is(server: Server) -> None:
    (line,) = [line for line in server.output.read_text().splitlines() if " drafts on vLLM " in line]
    endpoints = ["chat/completions", "chat/completions/batch", "completions", "responses", "messages"]
    assert " INFO " in line
    assert f"V1 model runner, K={K}; `prediction` on " in line
    assert "".join(f"/v1/{name}, " for name in endpoints)[:-2] + "; recipes: off; no response memory" in line
