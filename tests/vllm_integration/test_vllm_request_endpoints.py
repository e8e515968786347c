"""Each endpoint of a real server with a prediction: the answer is the same, and the drafts were used."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
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
