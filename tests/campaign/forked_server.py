"""An OpenAI server forked from a process that has imported vLLM; it forks its engine core, as on a GPU."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from v2_harness import ENVIRONMENT, RUNNERS, SEVERAL_PROCESSES, Forked

K = 4
OURS = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": K}


class ForkedServer:
    """Use as a context manager. plugin: False leaves the plugin and its drafter out.

    directory: for its output; logs: of its step logs.
    """

    def __init__(
        self, model: Path, directory: Path, runner: str, logs: Path, *, plugin: bool = True, **variables: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        argv = ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        argv += ["--max-num-seqs", "16", "--num-gpu-blocks-override", "64"]
        argv += ["--speculative-config", json.dumps(OURS)] if plugin else []
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GPU_ALIGN_")},
            **ENVIRONMENT,
            **SEVERAL_PROCESSES,
            **RUNNERS[runner],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "GPU_ALIGN_STRICT": "0",
            "GPU_ALIGN_RECIPES": "off",
            "GPU_ALIGN_MAX_PREDICTION_TOKENS": "128",
            "GPU_ALIGN_DEBUG_DIR": str(logs),
            **({} if plugin else {"VLLM_PLUGINS": ""}),
            **variables,
        }
        self.output = directory / "server.log"
        self._sink = self.output.open("w")
        self._process = Forked({"argv": argv, "before": "fork_workers()"}, environment, self._sink, runner)

    def __enter__(self) -> ForkedServer:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not self.has_ended():
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return self
            time.sleep(0.3)
        self.__exit__()
        raise RuntimeError(f"the server is not there:\n{self.output.read_text()[-16000:]}")

    def __exit__(self, *_: object) -> None:
        children = self.engine_cores()
        self._process.terminate()
        if not self.has_ended(30):
            self._process.kill()
            self.has_ended(10)
        for pid in children:  # a server that is killed does not end them
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._sink.close()

    def has_ended(self, seconds: float = 0) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def engine_cores(self) -> list[int]:
        """Its engine core processes and their workers; empty when it has ended."""
        found = [self._process.pid]
        for pid in found:
            for listed in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, listed.read_text().split())
        return [pid for pid in found[1:] if b"resource_tracker" not in _told(pid, "cmdline")]

    def forks(self) -> bool:
        """Whether its engine cores are forked, not spawned: a spawned one is a new program with new variables."""
        cores = self.engine_cores()
        return bool(cores) and not any(b"MULTIPROC_METHOD=spawn" in _told(pid, "environ") for pid in cores)

    def chat(self, body: dict[str, Any], seconds: float = 120) -> tuple[int, dict[str, Any]]:
        """Status and answer; 0 where the connection broke."""
        return chat(self.url, body, seconds=seconds)


def _told(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def chat(
    url: str, body: dict[str, Any], http_id: str = "", seconds: float = 120
) -> tuple[int, dict[str, Any]]:
    """Status and answer of `/v1/chat/completions`; 0 where the connection broke."""
    headers = {"Content-Type": "application/json"}
    if http_id:
        headers["X-Request-Id"] = http_id
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return 200, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
    except (OSError, ValueError, http.client.HTTPException):
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
