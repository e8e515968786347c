"""No log line at INFO or above holds text or token ids of a prediction, however logging is configured."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.vllm_integration.fakes import ENDPOINTS, Serving, make_app, post
from vllm_integration.seams import install as compat

TEXT = "CANARY-7f3a9e"
IDS = [31, 62, 93, 17, 48, 79]
FOUND = re.compile(
    rf"{TEXT}|{TEXT[:9]}|31\D{{1,9}}62\D{{1,9}}93|{re.escape(repr(bytes([31, 0, 0, 0])))[2:-1]}"
)


def bodies(path: str) -> Iterator[dict[str, Any]]:
    """Good and bad requests that all bring the canary."""
    good = {"model": "tiny", **ENDPOINTS[path]}
    part = {"type": "text", "text": TEXT}
    for prediction in (
        {"type": "content", "content": TEXT},
        {"type": "content", "content": [part] * 3},
        {"type": "content", "content": [part] * 2000},  # over limits: cut, with a warning
        {"type": "content", "content": TEXT * 5000},
        {"type": "content", "content": TEXT, "more": [[[[[[[[[[TEXT]]]]]]]]]]},
        TEXT,  # a string on an endpoint that does not take one
        [TEXT],
        {"type": TEXT, "content": TEXT},
        {"type": "content", "content": {"text": TEXT}},
        {"type": "content", "content": [part, {"type": TEXT, "text": TEXT}]},
        {"type": "content", "content": TEXT + "\ud800"},
    ):
        yield {**good, "prediction": prediction}
    prediction = {"type": "content", "content": TEXT}
    yield {**good, "prediction": prediction, "use_beam_search": True}
    for ids in (IDS, [*IDS, 10**6], [*IDS, -1], [*IDS, 0.5], [*IDS, "a"], [*IDS, [1]], TEXT, {TEXT: IDS}):
        yield {**good, "vllm_xargs": {"gpu_align_prediction": ids}}
    yield {**good, "prediction": prediction, "vllm_xargs": {"gpu_align_prediction": IDS}}
    # Refused by vLLM's own validation, which may repeat the whole body.
    yield {**good, "prediction": prediction, "temperature": TEXT[:3]}
    yield {**good, "prediction": prediction, "stream_options": {"include_usage": True}}
    yield {**good, "prediction": prediction, "response_format": {"type": "json_schema"}, "n": 2}
    yield {**good, "vllm_xargs": {"gpu_align_prediction": IDS}, "stream_options": {"include_usage": True}}


class Logging(Serving):
    """Logs a request as vLLM does: its body, then its sampling parameters."""

    max_log_len: int | None = None

    async def serve(self, request: Any, raw_request: Any = None) -> Any:
        from vllm.entrypoints.serve.utils.request_logger import RequestLogger

        logger = RequestLogger(max_log_len=self.max_log_len)
        logger.log_request_body(request)
        if hasattr(request, "to_chat_completion_request"):
            request = request.to_chat_completion_request(request.messages[0])
        params = request.to_sampling_params(8, {})
        logger.log_inputs("r", "the prompt", [1], None, params, None)
        return await super().serve(request)

    create_chat_completion = create_responses = create_completion = create_batch_chat_completion = serve


class Everything(logging.Formatter):
    """All that a record holds, as structured loggers write it."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({**vars(record), "text": super().format(record)}, default=repr)


class Logged(NamedTuple):
    """How a server logs: the format, `--max-log-len`, `--log-error-stack`, VLLM_DEBUG_LOG_API_SERVER_RESPONSE, and
    the level of vLLM's logger, which at DEBUG writes each request's body as JSON."""

    formatter: str
    max_log_len: int | None = None
    error_stack: bool = False
    responses: bool = False
    level: int = logging.INFO


CONFIGURATIONS = [
    Logged("structured", None, True, True),
    Logged("structured", 0, False, True, logging.DEBUG),
    Logged("structured", 100_000, True, False),
    Logged("vllm", 100_000, True, True),
]


@pytest.mark.parametrize("how", CONFIGURATIONS)
def test_no_log_line_shows_a_prediction(how: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _log_of_all_requests(how, monkeypatch)
    assert sum("Received request" in line for line in lines) >= 4 * 6
    assert any("Traceback" in line for line in lines) is how.error_stack
    assert [line for line in lines if FOUND.search(line)] == []


def test_the_search_would_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plugin off, vLLM prints the ids of `vllm_xargs` as they are."""
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    assert [line for line in _log_of_all_requests(Logged("vllm"), monkeypatch) if FOUND.search(line)] != []


def _log_of_all_requests(how: Logged, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from vllm.entrypoints.serve.middleware.log_response import log_response
    from vllm.logging_utils import NewLineFormatter

    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    is_vllms = how.formatter == "vllm"
    handler.setFormatter(NewLineFormatter("%(levelname)s %(message)s") if is_vllms else Everything())
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    app = make_app(Logging())
    monkeypatch.setattr(Logging, "max_log_len", how.max_log_len)
    app.state.args = SimpleNamespace(log_error_stack=how.error_stack)
    if how.responses:
        app.middleware("http")(log_response)
    loggers = [logging.getLogger(name) for name in ("", "vllm", "uvicorn")]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    monkeypatch.setattr(loggers[1], "level", how.level)
    for path in ENDPOINTS:
        for body in bodies(path):
            status, answer = post(app, path, json.dumps(body).encode())
            assert status in (200, 400), (body, answer)
    return lines
