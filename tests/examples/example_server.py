"""A server of OpenAI's chat API that answers as a test tells it, and counts the prediction as gpu-align would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

#: A request's body -> text and finish_reason, or a status code other than 200.
Answers = Callable[[dict[str, Any]], tuple[str, str] | int]


class FakeServer(NamedTuple):
    """bodies: of the requests so far."""

    url: str
    bodies: list[dict[str, Any]]


@contextmanager
def serve(answers: Answers) -> Iterator[FakeServer]:
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            answer = answers(body)
            if isinstance(answer, int):
                self._send(answer, {"error": {"message": "as the test says", "type": "BadRequestError"}})
                return
            text, reason = answer
            words = (body.get("prediction") or {"content": ""})["content"].split()
            accepted = sum(word in words for word in text.split())
            details = (
                {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 1} if words else {}
            )
            usage = {
                "prompt_tokens": 9,
                "completion_tokens": len(text.split()),
                "total_tokens": 9 + len(text.split()),
                "completion_tokens_details": details,
            }
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            more = {"object": "chat.completion", "created": 0, "model": body["model"]}
            self._send(200, {"id": "chatcmpl-1", **more, "choices": [choice], "usage": usage})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield FakeServer(f"http://127.0.0.1:{server.server_port}/v1", bodies)
    finally:
        server.shutdown()
        server.server_close()
