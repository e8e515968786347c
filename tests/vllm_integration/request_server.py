"""A server as a user starts it, with the flags and variables of one test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from vllm_harness import ENVIRONMENT, MAX_MODEL_LEN, K, Server


@contextmanager
def serve(
    model: Path,
    directory: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server"),
) -> Iterator[Server]:
    """The OpenAI server in its own process, stopped at the end; its output and step logs in `directory`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculation = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
    command = [sys.executable, *program, "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    command += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": K}), *flags]
    server = Server(f"http://127.0.0.1:{port}", directory / "steps", directory / "server.log")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ALIGN_")}
    variables = {**inherited, **ENVIRONMENT, "GPU_ALIGN_DEBUG_DIR": str(server.logs), **(environment or {})}
    with server.output.open("w") as sink:
        process = subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, server)
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server is not there:\n{server.output.read_text()[-4000:]}")
