"""The OpenAI server on the V2 model runner, as a user starts it, with two engines (data parallel): front end and
engine cores are separate processes, each with the plugin."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from usage_harness import ask_all, chat, moved, scrape, variants
from v2_harness import ENVIRONMENT, SEVERAL_PROCESSES, python_path

from tests.campaign.recount import Logs, of_prediction, recount

pytestmark = pytest.mark.vllm

K = 8


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


def end_requests(url: str) -> None:
    """A worker hears with its engine's next step that a request has ended: let both engines have one."""
    for _ in range(3):
        ask_all(url, [chat(0, 2)] * 4)


def check_many(url: str, steps: Path) -> None:
    """Usage of 24 requests at once, of every kind of prediction, is a recount of their step logs."""
    seeds, n = range(4), 10
    texts = [answer.texts[0] for answer in ask_all(url, [chat(seed, n) for seed in seeds])]
    bodies = []
    for seed, text in zip(seeds, texts, strict=True):
        hints = list(variants(text, seed).values())
        bodies += [chat(seed, n, hint, stream=index % 2 == 0) for index, hint in enumerate(hints)]
    before = scrape(url)
    answers = ask_all(url, bodies)
    deltas = moved(before, scrape(url))
    end_requests(url)
    logs = Logs(steps)
    for index, answer in enumerate(answers):
        assert answer.texts == (texts[index // 6],)
        (log,) = logs.of(answer.id, 1, 30)
        assert answer.accepted_rejected == of_prediction(recount(log, n))
    for index, verdict in enumerate(("accepted", "rejected")):
        total = sum(answer.accepted_rejected[index] for answer in answers)
        assert deltas[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}'] == total > 0


def test_a_chat_request_with_a_prediction(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    speculation = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--num-gpu-blocks-override", "64", "--data-parallel-size", "2"]
    command += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": K})]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **SEVERAL_PROCESSES,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": python_path(tmp_path, "engine_process.speed_up_the_interpreter()\n"),
        "GPU_ALIGN_DEBUG_DIR": str(tmp_path / "steps"),
        "GPU_ALIGN_DEBUG_LIVE": "1",
        "GPU_ALIGN_VERBOSE": "1",
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
        completions = f"{url}/v1/chat/completions"
        text = post(completions, body)["choices"][0]["message"]["content"]
        body["prediction"] = {"type": "content", "content": text}
        with ThreadPoolExecutor(6) as pool:  # enough for both engines
            answers = list(pool.map(lambda _: post(completions, body), range(6)))
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == [text] * 6
        # vLLM refuses these on a server that drafts; this one serves them.
        assert post(completions, {**body, "min_p": 0.1})["choices"][0]["message"]["content"] == text
        biased = post(completions, {**body, "logit_bias": {"5": 100.0}})["choices"][0]["message"]
        assert set(biased["content"].split()) == {"w1"}
        for refused, words in (
            ({"n": 2}, "greedy"),
            ({"use_beam_search": True, "n": 2}, "prediction"),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                post(completions, {**body, **refused})
            assert caught.value.code == 400
            assert words in json.load(caught.value)["error"]["message"]
        del body["prediction"]
        end_requests(url)
        for answer in answers:
            found = list((tmp_path / "steps").glob(f"{answer['id']}-*.yaml"))
            assert len(found) == 1, (answer["id"], os.listdir(tmp_path / "steps"))
            (file,) = found
            usage = yaml.safe_load(file.read_text())["usage"]
            assert (usage["output_tokens"], usage["rejected"]) == (20, 0)
            assert usage["steps"] <= 4  # 1 + 9 + 9 + 1
            worth = answer["usage"]["completion_tokens_details"]
            assert worth["accepted_prediction_tokens"] == usage["accepted"] > 0
            assert worth["rejected_prediction_tokens"] == 0
        check_many(url, tmp_path / "steps")
        with urllib.request.urlopen(f"{url}/gpu_align/status", timeout=60) as response:
            status = json.load(response)
        assert (status["runner"], status["num_draft_tokens"]) == ("V2", K)
        assert status["counters"]["prediction_tokens"]["accepted"] > 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
        served = re.findall(r'request_success_total{engine="\d",finished_reason="length".* (\d+)\.0', metrics)
        assert len(served) == 2
        assert all(map(int, served))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert "Using V2 Model Runner" in log.read_text()
    lines = log.read_text().splitlines()
    (start,) = [line for line in lines if " drafts on vLLM " in line]
    assert f"V2 model runner, K={K}; " in start
    for answer in answers:
        (line,) = [line for line in lines if f"gpu_align: request {answer['id']}-" in line]
        assert "ended: 20 tokens in " in line
    assert "gpu_align is off" not in log.read_text()
