"""A server with the flags and variables of one test: as a user starts it, or forked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import v2_harness
from vllm_harness import ENVIRONMENT, MAX_MODEL_LEN, K, Server


@contextmanager
def serve(
    model: Path,
    directory: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    runner: str = "",
    before: str = "",
    program: str = "",
    plugin: bool = True,
) -> Iterator[Server]:
    """The OpenAI server in its own process, stopped at the end; its output and step logs in `directory`.

    runner: "V1" or "V2" of a server that is forked from a process that has imported vLLM, and forks its engine
    core, as on a GPU; before: code that it runs first, program: code instead of the server's. plugin: False leaves
    the plugin and its drafter out.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculation = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
    argv = ["--model", str(model)]
    argv += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
    argv += ["--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    if plugin:
        argv += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": K})]
    argv += flags
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ALIGN_")}
    variables |= {} if plugin else {"VLLM_PLUGINS": ""}
    if runner:
        variables |= {**v2_harness.ENVIRONMENT, **v2_harness.SEVERAL_PROCESSES, **v2_harness.RUNNERS[runner]}
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        before = f"fork_workers()\n{before}"
    logs, output = directory / "steps", directory / "server.log"
    variables |= {**ENVIRONMENT, "GPU_ALIGN_DEBUG_DIR": str(logs), **(environment or {})}
    process: subprocess.Popen[bytes] | v2_harness.Forked
    with output.open("w") as sink:
        if runner:
            settings = {"argv": argv, "before": before, "program": program}
            process = v2_harness.Forked(settings, variables, sink, runner)
        else:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *argv]
            process = subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", logs, output, process.pid)
    children: list[psutil.Process] = []
    try:
        _wait_until_ready(server)
        children = server.engine_processes()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:  # a server that is killed does not end them
            child.kill()


def _wait_until_ready(server: Server, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not server.has_ended():
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the server is not there:\n{server.output.read_text()[-4000:]}")
