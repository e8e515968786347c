"""Starts a vLLM server, waits until it is healthy, and always stops it: one process group, one log, one guard."""

from __future__ import annotations

import asyncio
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from gpu_align.bench.errors import BenchError

HOST = "127.0.0.1"
START_TIMEOUT_S = 3600.0  # a model may have to be downloaded first
STOP_GRACE_S = 20.0
_TAIL_LINES = 12
_POLL_S = 0.25

#: `--speculative-config` of each kind of server; None: no drafts.
SPECULATION: Mapping[str, Mapping[str, object] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "gpu-align": {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"},
}


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def command_line(
    model: str, kind: str, port: int, num_draft_tokens: int, extra: Sequence[str], *, gpu: bool
) -> list[str]:
    """Return the command line of a vLLM server.

    Args:
        model: a name or a folder.
        kind: a key of `SPECULATION`.
        port: where it listens.
        num_draft_tokens: the most draft tokens a step.
        extra: options of the user; they come last, so that they win.
        gpu: without one, the server runs in float32 and compiles nothing.
    """
    options = ["--model", model, "--host", HOST, "--port", str(port)]
    speculation = SPECULATION[kind]
    if speculation is not None:
        config = {**speculation, "num_speculative_tokens": num_draft_tokens}
        options += ["--speculative-config", json.dumps(config)]
    if not gpu:
        options += ["--dtype", "float32", "--enforce-eager"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *extra]


def environment(*, gpu: bool) -> dict[str, str]:
    """Return this process's environment with what the server needs."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])  # a checkout that is not installed
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    env["GPU_ALIGN_STRICT"] = "1"  # a server that quietly does not draft would be measured as one that does
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not gpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # One core for the front end, as vLLM does it, but no thread tied to a core that others may be using:
        # a parallel region is as slow as its slowest thread.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = str(max(1, (os.cpu_count() or 1) - 1))
        env.setdefault("OMP_NUM_THREADS", threads)
        # vLLM's n-gram drafter runs in numba. Where its number of threads is not that of torch, OpenMP changes its
        # team twice a step: n-gram drafts would look ten times slower than they are.
        env.setdefault("NUMBA_NUM_THREADS", threads)
    return env


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device."""
    import torch

    return torch.cuda.is_available()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], url: str, log: Path, env: Mapping[str, str], tick: Callable[[float], None]
) -> AsyncIterator[int]:
    """Start a server, wait until it is healthy, give the id of its group, and stop the group at the end.

    The group ends however this block is left, and also if this process is killed: a guard waits for that.

    Args:
        command: what to run.
        url: where ``/health`` is.
        log: the file its output goes to; overwritten.
        env: its environment.
        tick: called with the seconds waited, about four times a second.

    Raises:
        BenchError: it dies at its start, or is not healthy after `START_TIMEOUT_S`; with the end of its log.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
    guard = None
    try:
        guard = _start_guard(process.pid)
        await _healthy(process, url, log, tick)
        yield process.pid
    except BenchError as error:
        if not error.log and process.poll() is not None:  # a dead server explains more than its client
            raise BenchError(
                f"{error} (the server ended with exit code {process.returncode})", log=tail(log)
            ) from error
        raise
    finally:
        _stop(process)
        if guard is not None:
            guard.communicate(b".")


async def _healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, tick: Callable[[float], None]
) -> None:
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        if process.poll() is not None:
            message = (
                f"the server ended with exit code {process.returncode} before it was ready; the end of {log}:"
            )
            raise BenchError(message, log=tail(log))
        if await asyncio.to_thread(_is_healthy, url):
            return
        if waited > START_TIMEOUT_S:
            raise BenchError(
                f"the server is not ready after {waited:.0f} s; the end of {log}:", log=tail(log)
            )
        tick(waited)
        await asyncio.sleep(_POLL_S)


def tail(log: Path) -> str:
    """Return the last lines of a log that are not empty."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C of the terminal is not for it
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: asked first, forced after `STOP_GRACE_S`."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
    finally:  # a second Ctrl-C ends the waiting, not the stopping
        _signal_group(
            process.pid, signal.SIGKILL
        )  # workers that the leader left behind are still in its group
        process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
