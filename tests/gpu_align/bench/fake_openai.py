"""An OpenAI-compatible server that counts as vLLM with the plugin does: known answers, known steps.

An answer is the text after the last blank line of the prompt, in upper case, or what `answer` says, one token a
word. A request without a prediction gets one token a step. With one whose words are those of the answer it gets
`K` + 1 a step, with another one token a step and `WASTED` rejected draft tokens. With `ngram` every request gets
two tokens a step.

Run as a program, ``python fake_openai.py --port N``, it is a server to start; it has a child, as vLLM has, whose
process it adds to the file `FAKE_CHILDREN`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

K = 3
WASTED = 2
WORDS = [f"W{i}" for i in range(41)]
#: Edits whose answers have 30, 31 and 32 tokens.
PAIRS = [
    {"id": str(n), "instruction": "edit", "before": (text := " ".join(WORDS[: 30 + n])), "after": f"{text} x"}
    for n in range(3)
]


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended may still be there until its parent looks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `true` is so within `seconds`."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def last_paragraph(body: dict[str, Any]) -> str:
    text: str = body["messages"][0]["content"]
    return text.rpartition("\n\n")[2].upper()


@dataclass
class Fake:
    """Settings of the server, and a record of its requests."""

    plugin: bool = True  # whether `/metrics` has its counters
    ngram: bool = False  # and vLLM's of its own drafts
    metrics: bool = True  # whether there is a `/metrics`
    vllm: bool = True  # whether it says it is vLLM, and sends usage with every piece
    models: tuple[str, ...] = ("tiny",)
    key: str | None = None  # the API key it wants
    twist: str | None = None  # a word of answers to requests with a prediction that becomes "TWISTED"
    refuse: str | None = None  # a word in a prompt that gets HTTP 400
    others: int = 0  # output tokens of other clients, added to each request's
    drops: tuple[str, ...] = ()  # fields of requests that a gateway in front drops; "usage": of answers
    answer: Callable[[dict[str, Any]], str] = last_paragraph
    max_num_seqs: int | None = None  # a label of `gpu_align_info`
    port: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # requests that it has answered
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Fake:
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def page(self) -> str:
        """`/metrics`, of two engines. vLLM also counts draft slots, and drafts beyond an end."""
        counts = self.counts
        rows = {
            'vllm:generation_tokens{engine="0"}': counts["tokens"] // 3,
            'vllm:generation_tokens{engine="1"}': counts["tokens"] - counts["tokens"] // 3,
            "vllm:request_success": counts["requests"],
        }
        if self.plugin or self.ngram:
            beyond = counts["drafts"] * self.plugin
            rows |= {
                "vllm:spec_decode_num_drafts": counts["drafts"],
                "vllm:spec_decode_num_draft_tokens": counts["accepted"] + counts["rejected"] + 5 * beyond,
                "vllm:spec_decode_num_accepted_tokens": counts["accepted"] + beyond,
            }
        if self.plugin:
            drafts = 'gpu_align_draft_tokens{{source="{}",verdict="{}"}}'
            rows |= {
                "gpu_align_steps": counts["steps"],
                drafts.format("prediction", "accepted"): counts["accepted"],
                drafts.format("context", "rejected"): counts["rejected"],
            }
        lines = []
        for name, value in rows.items():
            name, _, labels = name.partition("{")
            lines += [f"# TYPE {name} counter", f"{name}_total{'{' if labels else ''}{labels} {value}"]
        if self.plugin:
            more = f',max_num_seqs="{self.max_num_seqs}",drafter="mtp, 3 tokens"' if self.max_num_seqs else ""
            lines += ["# TYPE gpu_align_acceptance_ratio summary", "gpu_align_acceptance_ratio_sum NaN"]
            lines.append(f'gpu_align_info{{version="0.1.0",k="3"{more}}} 1')
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    fake: Fake
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/metrics" and fake.metrics:
            self._send(200, fake.page())
        elif self.path == "/version":
            self._send(200, '{"version": "0.32.0"}')
        elif self.path == "/v1/models":
            refused = fake.key is not None and self.headers["Authorization"] != f"Bearer {fake.key}"
            owner = "vllm" if fake.vllm else "someone"
            models = [{"id": m, "root": f"/models/{m}", "owned_by": owner} for m in fake.models]
            self._send(401 if refused else 200, json.dumps({"data": models}))
        else:
            self._send(200 if self.path == "/health" else 404, "{}")

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = {name: value for name, value in body.items() if name not in fake.drops}
        prompt, prediction = body["messages"][0]["content"], body.get("prediction") or {}
        tokens = re.findall(r"\S+\s*", fake.answer(body))[: body.get("max_tokens")]
        if fake.refuse is not None and fake.refuse in prompt:
            self._send(400, '{"error": {"message": "the prompt is too long"}}')
        elif fake.plugin and prediction.get("type", "content") != "content":
            self._send(400, '{"error": {"message": "prediction.type: expected content"}}')
        else:
            self._answer(body, tokens, prediction.get("content"))

    def _answer(self, body: dict[str, Any], tokens: list[str], prediction: str | None) -> None:
        fake = self.fake
        known = {token.strip().upper() for token in tokens} & set((prediction or "").upper().split())
        follows = len(known) * 2 > len(tokens)
        a_step = 2 if fake.ngram else K + 1 if follows and fake.plugin else 1
        if prediction is not None and fake.twist is not None:
            tokens = ["TWISTED " if token.strip() == fake.twist else token for token in tokens]
        pieces = [tokens[i : i + a_step] for i in range(0, len(tokens), a_step)]
        wasted = WASTED if prediction and fake.plugin and not follows else int(fake.ngram)
        accepted, rejected = len(tokens) - len(pieces), wasted * len(pieces)
        with fake.lock:
            fake.bodies.append(body)
            fake.counts["tokens"] += len(tokens) + fake.others
            fake.counts["requests"] += 1
            if prediction is not None or fake.ngram:
                fake.counts["steps"] += len(pieces)
                fake.counts["drafts"] += len(pieces) - 1  # none in the prefill
                fake.counts["accepted"] += accepted
                fake.counts["rejected"] += rejected
        shown = fake.plugin and "usage" not in fake.drops
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        usage = {
            "completion_tokens": len(tokens),
            "completion_tokens_details": details if prediction and shown else {},
        }
        if body.get("stream"):
            self._stream(body, pieces, usage)
        else:
            message = {"role": "assistant", "content": "".join(tokens)}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            self._send(200, json.dumps({"id": "chatcmpl-1", "choices": choices, "usage": usage}))

    def _stream(self, body: dict[str, Any], pieces: list[list[str]], usage: dict[str, Any]) -> None:
        fake, sent = self.fake, 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            sent += len(piece)
            event: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "".join(piece)}}]}
            if fake.vllm and body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = {"completion_tokens": sent}
            self._chunk(f"data: {json.dumps(event)}\n\n")
        self._chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: str) -> None:
        self.wfile.write(f"{len(data):x}\r\n{data}\r\n".encode())
        self.wfile.flush()

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def _main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if "--stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    with open(os.environ["FAKE_CHILDREN"], "a") as children:
        print(child.pid, file=children)
    method = json.loads(options.get("--speculative-config", "{}")).get("method")
    with Fake(plugin=method == "custom_class", ngram=method == "ngram", port=int(options["--port"])):
        time.sleep(600)


if __name__ == "__main__":
    _main()
