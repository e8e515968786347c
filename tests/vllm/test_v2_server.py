"""The OpenAI server on the V2 model runner, as a user starts it: front end, engine core and worker are separate
processes, each with the plugin."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from usage_harness import ask_all, chat, moved, read_logs, replay, scrape, variants
from v2_harness import ENVIRONMENT

pytestmark = pytest.mark.vllm

K = 8
ROOT = Path(__file__).parents[2]
# Runs at the start of every Python process below; see `engine_process` for what it is good for.
SITE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import engine_process
engine_process.pretend_triton_has_a_cpu_backend()
"""


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


def wait_until_ready(process: subprocess.Popen[Any], url: str, log: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server is not there:\n{log.read_text()[-4000:]}")


def check_many(url: str, steps: Path) -> None:
    """Usage of 24 requests in one batch, of every kind of prediction, is a recount of their step logs."""
    seeds, n = range(4), 10
    texts = [answer.texts[0] for answer in ask_all(url, [chat(seed, n) for seed in seeds])]
    bodies = []
    for seed, text in zip(seeds, texts, strict=True):
        hints = list(variants(text, seed).values())
        bodies += [chat(seed, n, hint, stream=index % 2 == 0) for index, hint in enumerate(hints)]
    before = scrape(url)
    answers = ask_all(url, bodies)
    deltas = moved(before, scrape(url))
    ask_all(url, [chat(0, 2)])  # one more step tells the worker that the last ones have ended
    logs = read_logs(steps, [answer.id for answer in answers])
    for index, answer in enumerate(answers):
        assert answer.texts == [texts[index // 6]]
        (log,) = logs[answer.id]
        assert answer.accepted_rejected == replay(log["steps"], n).prediction
    for index, verdict in enumerate(("accepted", "rejected")):
        total = sum(answer.accepted_rejected[index] for answer in answers)
        assert deltas[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}'] == total > 0


def test_a_chat_request_with_a_prediction(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    speculation = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--num-gpu-blocks-override", "64"]
    command += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": K})]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "GPU_ALIGN_DEBUG_DIR": str(tmp_path / "steps"),
    }
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(process, f"{url}/health", log)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "w1 w2 w3"}],
            "temperature": 0,
            "max_tokens": 20,
        }
        plain = post(f"{url}/v1/chat/completions", body)
        text = plain["choices"][0]["message"]["content"]
        hinted = post(
            f"{url}/v1/chat/completions", {**body, "prediction": {"type": "content", "content": text}}
        )
        assert hinted["choices"][0]["message"]["content"] == text
        worth = hinted["usage"]["completion_tokens_details"]
        post(f"{url}/v1/chat/completions", body)  # one more step tells the worker that the request has ended
        (file,) = (tmp_path / "steps").glob(f"{hinted['id']}-*.yaml")
        usage = yaml.safe_load(file.read_text())["usage"]
        assert (usage["output_tokens"], usage["rejected"]) == (20, 0)
        assert usage["steps"] <= 4  # 1 + 9 + 9 + 1
        assert worth["accepted_prediction_tokens"] == usage["accepted"] > 0
        assert worth["rejected_prediction_tokens"] == 0
        check_many(url, tmp_path / "steps")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert "Using V2 Model Runner" in log.read_text()
    assert "gpu_align is off" not in log.read_text()
