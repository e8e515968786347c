"""Nothing that a client chooses breaks a log line: request ids and messages of errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_integration.seams.guard import shown_error, shown_id
from vllm_integration.wire import request as wire
from vllm_integration.worker.request_drafter import RequestDrafter
from vllm_integration.worker.requests import open_request, take_refusals

HOSTILE = {
    "chatcmpl-8f-1a2b3c4d": "chatcmpl-8f-1a2b3c4d",
    "grüße-字": "grüße-字",
    "a\nERROR all is lost": r"a\nERROR all is lost",
    "a\r\x1b[31mred": r"a\r\x1b[31mred",
    "a\x00\x7f\x85": r"a\x00\x7f\x85",
    "\u2028\u202eabc\ud800": r"\u2028\u202eabc\ud800",
    r"a\n": r"a\\n",
    "x" * 100: "x" * 100,
    "x" * 5000: "x" * 100 + "… of 5000 characters",
}


@pytest.mark.parametrize("req_id", HOSTILE)
def test_an_id_is_one_line_of_bounded_length(req_id: str) -> None:
    assert shown_id(req_id) == HOSTILE[req_id]
    assert shown_id(req_id).isprintable()


def test_a_message_is_one_line_and_may_fail() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert shown_error(RuntimeError("CUDA error\nat line 7")) == r"RuntimeError: CUDA error\nat line 7"
    assert shown_error(ValueError("y" * 1000)) == "ValueError: " + "y" * 400 + "… of 1000 characters"
    assert shown_error(SilentError()) == "SilentError: "


@pytest.mark.parametrize("req_id", HOSTILE)
def test_log_lines_about_requests(req_id: str, plugin_log: list[str]) -> None:
    for value, capacity in (({"x": 1}, 9), ([1, 2, 3], 2)):
        params = SimpleNamespace(extra_args={wire.KEY: value})
        open_request(req_id, params, vocab_size=9, capacity=capacity)
    no_room = SimpleNamespace(drafter=SimpleNamespace(add=lambda *_, **__: False))
    RequestDrafter.add(cast(Any, no_room), 0, req_id, wire.RequestContent(), 0)
    assert take_refusals() == {req_id: "room"}  # the last one
    assert len(plugin_log) == 3
    assert all(HOSTILE[req_id] in line and line.isprintable() and len(line) < 400 for line in plugin_log)
