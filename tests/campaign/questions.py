"""Questions to servers, whose answers are known, and step logs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml


def chat(url: str, body: dict[str, Any], http_id: str = "") -> tuple[int, dict[str, Any]]:
    """Status and answer of `/v1/chat/completions`; 0 where the connection broke."""
    headers = {"X-Request-Id": http_id} if http_id else {}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        return answer.status_code, answer.json()
    except (httpx.HTTPError, ValueError):
        return 0, {}


def text_of(status: int, answer: dict[str, Any]) -> str | None:
    """Of what `chat` returns, without space around it; None where it is no answer."""
    return str(answer["choices"][0]["message"]["content"]).strip() if status == 200 else None


@dataclass(frozen=True)
class Question:
    """A conversation of one message, and what the model answers to it, as words and as tokens."""

    body: dict[str, Any]
    token_ids: list[int]

    @property
    def text(self) -> str:
        return words(self.token_ids)

    def predicted(self, token_ids: list[int]) -> dict[str, Any]:
        return {**self.body, "prediction": {"type": "content", "content": words(token_ids)}}


def ask(greedy: Callable[[list[int], int], list[int]], prompt: list[int], num_tokens: int) -> Question:
    """greedy: the model's answers, by `transformers`."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": words(prompt)}],
        "temperature": 0,
        "max_tokens": num_tokens,
    }
    return Question(body, greedy([*prompt, 3], num_tokens))  # 3: <assistant>


def words(token_ids: list[int]) -> str:
    return " ".join(f"w{token - 4}" for token in token_ids)


def is_whole(path: Path, text: str | None = None) -> bool:
    """A file of the step log that reads to its last line; `text`: of this answer."""
    if path.suffix != ".yaml":
        return False
    told = yaml.safe_load(path.read_text())
    new = [token for step in told["steps"] for token in step["new"]]
    return len(new) == told["usage"]["output_tokens"] > 0 and (text is None or words(new) == text)
