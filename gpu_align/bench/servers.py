"""The vLLM servers of `--serve`: their command lines and environment, and one that runs while a block does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from gpu_align.bench.errors import BenchError
from gpu_align.bench.process import POLL_S, ServerProcess

HOST = "127.0.0.1"
START_TIMEOUT_S = 3600.0  # a model may have to be downloaded first

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

    Args:
        command, url, log, env: of a `ServerProcess`.
        tick: called with the seconds waited, about four times a second.

    Raises:
        BenchError: it dies at its start, or is not healthy after `START_TIMEOUT_S`; with the end of its log.
    """
    with ServerProcess(command, url, log, env) as process:
        waiting = process.waiting(START_TIMEOUT_S)
        while (waited := await asyncio.to_thread(next, waiting, None)) is not None:
            tick(waited)
            await asyncio.sleep(POLL_S)
        try:
            yield process.pid
        except BenchError as error:
            if not error.log and process.exit_code is not None:  # a dead server explains more than its client
                raise BenchError(
                    f"{error} (the server ended with exit code {process.exit_code})", log=process.tail()
                ) from error
            raise
