"""What a running server tells beside the usage of its answers: step logs, lines, metrics and the status.

Usage and counters themselves are recounted by `tests/campaign/test_counts.py`.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.vllm.clients import Answer, Logs, ask_all, chat, variants
from tests.vllm.engines import SERVER_K as K
from tests.vllm.engines import Server

pytestmark = pytest.mark.vllm

N = 24


@pytest.fixture(scope="module")
def traffic(server: Server) -> list[tuple[Answer, dict[str, Any]]]:
    """Requests with every kind of prediction, each with its step log."""
    seeds = range(1000, 1008)
    plain = [answer.texts[0] for answer in ask_all(server.url, [chat(seed, N) for seed in seeds])]
    hints = [(seed, hint) for seed in seeds for hint in variants(plain[seed - 1000], seed).values()]
    answers = ask_all(server.url, [chat(seed, N, hint) for seed, hint in hints])
    assert [answer.texts[0] for answer in answers] == [plain[seed - 1000] for seed, _ in hints]
    ask_all(server.url, [chat(0, 2)])  # one more step writes the logs
    logs = Logs(server.logs)
    return [(answer, *logs.of(answer.id, 1, 30)) for answer in answers]


def test_the_log_tells_texts_cursors_and_why(traffic: list[tuple[Answer, dict[str, Any]]]) -> None:
    """The tiny model's words have no newlines: one line, which is not complete."""
    candidates = 0
    for answer, log in traffic:
        steps, text = log["steps"], answer.texts[0].strip()
        assert "".join(s["accepted_text"] + s["own_text"] for s in steps).strip() == text
        assert [s["cursor_before"] for s in steps[1:]] == [s["cursor_after"] for s in steps[:-1]]
        assert all(s["cursor_after"] <= log["prediction_tokens"] for s in steps)
        for s in steps:
            assert (s["candidate"] is None) == (not s["proposed"])
            if s["candidate"]:
                candidates += 1
                assert s["candidate"]["source"] == s["source"]
                words = [f"w{token - 4}" if token > 3 else "<assistant>" for token in s["proposed"]]
                assert s["proposed_text"].split() == words
        (line,) = log["prediction_lines"]
        assert len(line["tokens"]) == log["prediction_tokens"]
        assert steps[-1]["prefix"]["tokens"] == [token for step in steps for token in step["new"]]
        assert steps[-1]["prefix"]["text"].strip() == text
        assert all(step["new_lines"] == [] for step in steps)
    assert candidates > 100


def test_the_server_says_what_it_is(server: Server) -> None:
    (line,) = [line for line in server.output.read_text().splitlines() if " drafts on vLLM " in line]
    endpoints = ["chat/completions", "chat/completions/batch", "completions", "responses", "messages"]
    assert " INFO " in line
    assert f"V1 model runner, K={K}; `prediction` on " in line
    assert "".join(f"/v1/{name}, " for name in endpoints)[:-2] + "; recipes: off; no response memory" in line
    found = httpx.get(f"{server.url}/gpu_align/status", timeout=60).json()
    assert (found["on"], found["runner"], found["num_draft_tokens"]) == (True, "V1", K)
    assert found["endpoints"] == [f"/v1/{name}" for name in endpoints]
    assert found["settings"]["GPU_ALIGN_VERBOSE"] == 1
