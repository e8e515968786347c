"""Each endpoint of a real server with a prediction: the answer is the same, and the drafts were used."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from usage_harness import moved, scrape
from vllm_harness import Server, read_steps

pytestmark = pytest.mark.vllm

N = 40
CHAT = [{"role": "user", "content": "w5 w17 w201 w33 w8 w90"}]
OTHER = [{"role": "user", "content": "w9 w2"}]
ENDPOINTS = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": N},
    "/v1/chat/completions/batch": {"messages": [CHAT, OTHER], "max_tokens": N},
    "/v1/completions": {"prompt": ["w5 w6 w7", "w8 w9"], "max_tokens": N},
    "/v1/responses": {"input": CHAT, "max_output_tokens": N},
}


def post(server: Server, path: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "temperature": 0, **ENDPOINTS[path], **more}
    answer = httpx.post(server.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def texts(answer: dict[str, Any]) -> list[str]:
    if "output" in answer:
        return [answer["output"][0]["content"][0]["text"]]
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]
    ]


def ids(text: str) -> list[int]:
    return [int(word[1:]) + 4 for word in text.split()]


def step_log(server: Server, answer_id: str, request: int) -> dict[str, Any]:
    """Of one of the requests that vLLM makes of an HTTP request, in its own ways to number them."""
    separator = "-" if answer_id.startswith("cmpl") else "_"
    return read_steps(server.logs, f"{answer_id}{separator}{request}-")


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/v1/chat/completions"])
def test_the_same_prediction_serves_every_prompt(server: Server, path: str) -> None:
    plain = texts(post(server, path))
    for i, text in enumerate(plain):
        prediction = {"type": "content", "content": text}
        for more in (
            {"prediction": prediction},
            {"vllm_xargs": {"gpu_align_prediction": ids(text)}},
            {"vllm_xargs": {"gpu_align_prediction": text}},
        ):
            answer = post(server, path, **more)
            assert texts(answer) == plain
            logs = [step_log(server, answer["id"], request) for request in range(len(plain))]
            assert [log["prediction_tokens"] for log in logs] == [N] * len(plain)
            assert logs[i]["usage"]["rejected"] == 0


def test_what_openai_forbids_is_allowed(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for more in (
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"max_completion_tokens": 20},
        {"tools": [tool], "tool_choice": "none"},
        {"stop": ["w3"]},
        {"min_tokens": 5, "seed": 3},
    ):
        plain = post(server, "/v1/chat/completions", **more)
        prediction = {"type": "content", "content": texts(plain)[0]}
        answer = post(server, "/v1/chat/completions", **more, prediction=prediction)
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"], more
        assert answer["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]


def test_several_choices(server: Server) -> None:
    """Each choice is a request of its own for the engine, and has the prediction."""
    prediction = {"type": "content", "content": "w1 w2 w3 w4"}
    answer = post(server, "/v1/chat/completions", n=3, temperature=1, prediction=prediction)
    assert len(texts(answer)) == 3
    for i in range(3):
        steps = read_steps(server.logs, f"{i}_{answer['id']}-")
        assert steps["prediction_tokens"] == 4
        assert steps["usage"]["output_tokens"] == N


def message(server: Server, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": N, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)


def streamed(answer: httpx.Response) -> str:
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )


def test_messages_of_anthropic_take_a_prediction(server: Server) -> None:
    plain = message(server).json()["content"][0]["text"]
    assert len(plain.split()) == N
    prediction = {"type": "content", "content": plain}
    for more in (
        {"prediction": prediction},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": plain}]}, "stream": True},
        {"vllm_xargs": {"gpu_align_prediction": ids(plain)}},
    ):
        before = scrape(server.url)
        answer = message(server, **more)
        assert answer.status_code == 200, answer.text
        assert (streamed(answer) if "stream" in more else answer.json()["content"][0]["text"]) == plain
        by = moved(before, scrape(server.url))
        assert by["gpu_align_requests_total"] == 1
        # Each of the few steps adds a token of the model's own.
        assert by['gpu_align_prediction_tokens_total{verdict="accepted"}'] > N - 8
        assert 'gpu_align_prediction_tokens_total{verdict="rejected"}' not in by
        assert by["gpu_align_steps_total"] < 8
    for nothing in (None, {"type": "content", "content": ""}):
        before = scrape(server.url)
        assert message(server, prediction=nothing).json()["content"][0]["text"] == plain
        assert "gpu_align_requests_total" not in moved(before, scrape(server.url))
    assert message(server, system="prediction", metadata={"prediction": 7}).status_code == 200


def test_a_malformed_prediction_of_a_message_is_a_400_that_names_it(server: Server) -> None:
    for more in (
        {"prediction": "w1"},
        {"prediction": {"type": "content", "content": 7}},
        {"prediction": 7, "stream": True},
        {"vllm_xargs": {"gpu_align_prediction": [-1]}},
    ):
        answer = message(server, **more)
        assert answer.status_code == 400
        error = answer.json()
        assert error["type"] == "error"
        assert "prediction" in error["error"]["message"]
    assert message(server, vllm_xargs={"recipes": 7}).status_code == 400
    body = {"messages": CHAT, "input": "w1", "prediction": {"type": "content", "content": "w1"}}
    answer = httpx.post(f"{server.url}/v1/systemone", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"])
def test_beam_search_with_a_prediction_is_a_400(server: Server, path: str) -> None:
    beams = {} if path.endswith("batch") else {"n": 2}
    body = {"model": "tiny", **ENDPOINTS[path], "max_tokens": 3, "use_beam_search": True, **beams}
    hinted = {**body, "prediction": {"type": "content", "content": "w1"}}
    answer = httpx.post(server.url + path, json=hinted, timeout=120)
    assert answer.status_code == 400
    if path.endswith("batch"):
        return  # vLLM refuses beam search there, whatever else the request holds
    assert answer.json()["error"]["param"] == "prediction"
    assert httpx.post(server.url + path, json=body, timeout=120).status_code == 200
