"""Start a vLLM server with the plugin, wait until it answers, and always stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gpu_align.bench.servers import environment

HOST = "127.0.0.1"
_TAIL_LINES = 25


class ServerError(RuntimeError):
    """The server did not start, or died. The message holds the end of its log."""


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def plugin_speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Return the `--speculative-config` of a server that drafts from predictions."""
    return {
        "method": "custom_class",
        "model": "vllm_integration.PredictedOutputs",
        "num_speculative_tokens": num_draft_tokens,
    }


def ngram_speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Return the `--speculative-config` of a server with vLLM's own n-gram drafter, its window left as it is."""
    return {"method": "ngram", "num_speculative_tokens": num_draft_tokens}


def vllm_command(
    model: str, port: int, *, name: str, dtype: str, speculation: Mapping[str, Any], max_model_len: int
) -> list[str]:
    """Return the command line of an OpenAI-compatible server."""
    options = {
        "--model": model,
        "--served-model-name": name,
        "--host": HOST,
        "--port": str(port),
        "--dtype": dtype,
        "--max-model-len": str(max_model_len),
        "--max-num-seqs": "4",
        "--speculative-config": json.dumps(speculation),
    }
    flat = [word for pair in options.items() for word in pair]
    # Compiling would take longer than everything else the demo does.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flat, "--enforce-eager"]


def vllm_environment(steps_dir: Path, *, gpu: bool, offline: bool) -> dict[str, str]:
    """Return this process's environment with what the server needs to find and log."""
    env = environment(gpu=gpu)
    env["GPU_ALIGN_DEBUG_DIR"] = str(steps_dir.resolve())
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    return env


class Server:
    """A process with its own group and log file; leaving the `with` block stops all of the group.

    Args:
        command: what to run.
        url: where it answers; `url + "/health"` gives 200 when it is ready.
        log: the file its output goes to; overwritten.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.command = list(command)
        self.url = url
        self.log = log
        self.env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the group's leader."""
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.pid

    def check_alive(self) -> None:
        """Raise ServerError with the end of the log when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerError(f"the server ended with exit code {code}. {self._tail()}")

    def wait_ready(self, timeout_s: float, tick: Callable[[float, str], None]) -> float:
        """Wait until /health answers and return the seconds it took.

        `tick(seconds, last_log_line)` is called about four times a second. Raises ServerError when the
        process ends first or `timeout_s` passes.
        """
        started = time.monotonic()
        while True:
            self.check_alive()
            waited = time.monotonic() - started
            if self._healthy():
                return waited
            if waited > timeout_s:
                raise ServerError(f"the server did not answer within {timeout_s:.0f} s. {self._tail()}")
            tick(waited, self._last_line())
            time.sleep(0.25)

    def stop(self, grace_s: float = 20.0) -> None:
        """End the whole process group: asked first, forced after `grace_s`. May be called again."""
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:  # a second Ctrl-C ends the waiting, not the stopping
            # Workers that the leader left behind are still in its group.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def _last_line(self) -> str:
        return next((line.strip() for line in reversed(self._lines()) if line.strip()), "")

    def _tail(self) -> str:
        lines = self._lines()[-_TAIL_LINES:]
        return "\n".join([f"The end of {self.log}:", *(f"  {line}" for line in lines)])


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
