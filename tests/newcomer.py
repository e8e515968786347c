"""A newcomer's first minutes, each step timed: ``python -m tests.newcomer``.

Clones this checkout, and in the clone runs ``gpu-align doctor``, makes the demo's model, starts a vLLM server with
it, and sends the demo's edit with the file as its prediction. Packages are those of the Python that runs it. Exits
with 1 if no draft was accepted, or a step took longer than `LIMITS_S` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds, on two cores.
LIMITS_S = {"doctor": 15.0, "all": 300.0}


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
    print(f"{name:<28} {seconds[name]:6.1f} s", flush=True)


def main() -> int:
    """Run the steps; returns the exit code."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, timed("all", seconds):
        clone = Path(folder) / "gpu-align"
        environment = {**os.environ, "PYTHONPATH": str(clone)}
        with timed("clone", seconds):
            subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        with timed("doctor", seconds):
            doctor = [sys.executable, "-m", "gpu_align", "doctor"]
            subprocess.run(doctor, cwd=clone, env=environment, check=True, stdout=subprocess.DEVNULL)
        request = [sys.executable, "-m", "tests.newcomer", "--request"]
        done = subprocess.run(request, cwd=clone, env=environment, check=False)
        if done.returncode:
            return 1
    over = {name: most for name, most in LIMITS_S.items() if seconds[name] > most}
    late = [f"{name}: {seconds[name]:.1f} s, at most {most:.0f}" for name, most in over.items()]
    print("\n".join(late) or "in time")
    return 1 if late else 0


async def send_request() -> int:
    """In the clone: model, server, one request with a prediction."""
    from openai import OpenAI

    from gpu_align.tools.bench import servers
    from vllm_integration.demo import model, run, task

    seconds: dict[str, float] = {}
    work = Path("newcomer")
    work.mkdir()
    with timed("model", seconds):
        folder = model.make_model(model.ModelSpec(), work / "models", lambda now: None)
    port = servers.free_port()
    options = (*run.SERVER_OPTIONS, "--served-model-name", "tiny")
    command = servers.command_line(str(folder), servers.PLUGIN_DRAFTS, port, 32, options, gpu=False)
    environment = {**servers.environment(gpu=False), "HF_HUB_OFFLINE": "1"}
    url = f"http://{servers.HOST}:{port}"
    log = work / "server.log"
    async with contextlib.AsyncExitStack() as stack:
        with timed("server", seconds):
            server = servers.running(command, url, log, environment, lambda seconds: None, 240.0)
            await stack.enter_async_context(server)
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        with timed("first accelerated response", seconds):
            answer = client.chat.completions.create(
                model="tiny",
                messages=task.MESSAGES,
                max_tokens=1536,
                temperature=0,
                prediction={"type": "content", "content": task.ORIGINAL},
            )
    counts = json.loads(answer.model_dump_json())["usage"]["completion_tokens_details"]
    print(f"accepted {counts['accepted_prediction_tokens']}, rejected {counts['rejected_prediction_tokens']}")
    return 0 if counts["accepted_prediction_tokens"] else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(send_request()) if sys.argv[1:] == ["--request"] else main())
