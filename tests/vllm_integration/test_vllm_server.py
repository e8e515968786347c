"""The OpenAI server as a user starts it: the `prediction` field over HTTP, with the official client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from vllm_harness import K, Server, read_steps

pytestmark = pytest.mark.vllm

QUESTION = [{"role": "user", "content": "w5 w17 w201 w33 w8 w90"}]
N = 80


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        temperature=0,
        max_tokens=N,
        **more,  # type: ignore[call-overload]
    )


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> str:
    """The answer without a prediction."""
    text = ask(client).choices[0].message.content
    assert text
    return str(text)


def test_a_prediction_changes_the_steps_and_not_the_answer(
    client: openai.OpenAI, server: Server, plain: str
) -> None:
    words = plain.split()
    some = [*words[:20], "w1", "w2", *words[22:50], *words[53:]]
    bodies = {
        "string": plain,
        "windows": plain.replace(" ", "\r\n"),
        "parts": [{"type": "text", "text": part} for part in (plain[:41], plain[41:])],
        "edited": " ".join(some),
        "unrelated": " ".join(f"w{(7 * i) % 400}" for i in range(90)),
    }
    usage = {}
    for name, content in bodies.items():
        answer = ask(client, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == plain, name
        log = read_steps(server.logs, f"{answer.id}-")
        assert log["usage"]["output_tokens"] == answer.usage.completion_tokens == N
        usage[name] = log["usage"]
    fewest = 1 + math.ceil((N - 1) / (K + 1))
    assert [usage[name]["steps"] for name in ("string", "windows", "parts")] == [fewest] * 3
    assert fewest < usage["edited"]["steps"] < N / 3
    assert usage["unrelated"]["steps"] > N / 2


@pytest.mark.parametrize(
    "nothing",
    [None, {"type": "content", "content": ""}, {"type": "content", "content": []}],
    ids=["null", "empty-string", "no-parts"],
)
def test_an_empty_prediction_is_none(client: openai.OpenAI, server: Server, plain: str, nothing: Any) -> None:
    answer = ask(client, extra_body={"prediction": nothing})
    assert answer.choices[0].message.content == plain
    assert not list(server.logs.glob(f"{answer.id}-*"))


def test_the_official_client_sees_a_bad_request_and_the_server_goes_on(
    client: openai.OpenAI, plain: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        ask(client, prediction={"type": "content", "content": 7})
    assert ask(client, prediction={"type": "content", "content": plain}).choices[0].message.content == plain


def test_odd_but_valid_text_is_served(client: openai.OpenAI, plain: str) -> None:
    for text in ("\0\0", "\ufeffw1\r\r\n", "é" * 50_000, "w1 " * 5_000, "日本語 🙂 w9"):
        answer = ask(client, prediction={"type": "content", "content": text})
        assert answer.choices[0].message.content == plain


def test_token_ids_by_vllm_xargs(client: openai.OpenAI, server: Server, plain: str) -> None:
    """For clients behind a front end that drops unknown fields."""
    ids = [int(word[1:]) + 4 for word in plain.split()]
    answer = ask(client, extra_body={"vllm_xargs": {"gpu_align_prediction": ids}})
    assert answer.choices[0].message.content == plain
    assert read_steps(server.logs, f"{answer.id}-")["usage"]["rejected"] == 0


def test_the_request_log_shows_no_prediction(client: openai.OpenAI, server: Server, plain: str) -> None:
    answer = ask(client, prediction={"type": "content", "content": plain})
    (line,) = [line for line in server.output.read_text().splitlines() if f"request {answer.id}:" in line]
    assert "Prediction(80 tokens)" in line
    assert plain.split()[3] not in line
