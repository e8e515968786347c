"""Two API servers, 64 clients, 1,000 requests: nothing fails, nothing leaks, the counters are exact."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from usage_harness import WORDS, ask_all, chat, moved, scrape
from vllm_harness import ENVIRONMENT

pytestmark = pytest.mark.vllm

N = 8
CLIENTS = 64
# What `vllm serve --api-server-count` runs; the command itself needs metadata that the CPU build does not have.
SERVE = """
from vllm.entrypoints.cli.serve import run_multi_api_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    run_multi_api_server(args)
"""


class TwoServers:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def memory(self) -> float:
        """Resident memory of all processes of the server, in MiB."""
        root = psutil.Process(self.process.pid)
        total = 0
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return float(total) / 2**20


@pytest.fixture(scope="module")
def servers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServers]:
    directory = tmp_path_factory.mktemp("two")
    (directory / "serve.py").write_text(SERVE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    speculation = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
    command = [sys.executable, str(directory / "serve.py"), "--model", str(tiny_llama)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--api-server-count", "2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    command += ["--enable-log-requests", "--max-num-seqs", "16", "--num-gpu-blocks-override", "128"]
    command += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": 8})]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "GPU_ALIGN_USAGE_DETAILS": "1",
        "GPU_ALIGN_BILL_REJECTED": "1",
    }
    environment.pop("GPU_ALIGN_DEBUG_DIR", None)
    log = directory / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"{url}/health", log)
        yield TwoServers(url, process, log)
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


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the servers are not there:\n{log.read_text()[-4000:]}")


def test_a_thousand_requests_of_64_clients(servers: TwoServers) -> None:
    seeds = range(40)
    plain = [answer.texts[0] for answer in ask_all(servers.url, [chat(seed, N) for seed in seeds])]
    before = scrape(servers.url)
    assert before["gpu_align_requests_total"] == 0  # shown before anybody has sent a prediction
    assert before["gpu_align_enabled"] == 1  # in both processes
    draw = random.Random(0)
    bodies, expected = [], []
    for index in range(1000):
        seed = draw.randrange(len(seeds))
        hint = None
        if index % 3 == 0:
            words = plain[seed].split()
            words[draw.randrange(N)] = draw.choice(WORDS)
            hint = " ".join(words)
        bodies.append(chat(seed, N, hint, stream=index % 2 == 0))
        expected.append(plain[seed])
    answers, memory = [], []
    for start in range(0, 1000, 250):
        answers += ask_all(servers.url, bodies[start : start + 250], CLIENTS)
        memory.append(servers.memory())
    assert [answer.texts[0] for answer in answers] == expected
    hinted = [answer for answer in answers if "prediction" in answer.body]
    assert len(hinted) == 334
    deltas = moved(before, scrape(servers.url))
    for index, verdict in enumerate(("accepted", "rejected")):
        total = sum(answer.accepted_rejected[index] for answer in hinted)
        assert deltas[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}'] == total > 100
    assert deltas["gpu_align_requests_total"] == len(hinted)
    assert deltas["gpu_align_steps_total"] == sum(
        answer.usage["completion_tokens_details"]["gpu_align"]["steps"] for answer in hinted
    )
    for answer in answers:  # GPU_ALIGN_BILL_REJECTED
        rejected = answer.accepted_rejected[1] if "prediction" in answer.body else 0
        assert answer.usage["completion_tokens"] == N + rejected
        assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + N + rejected
    print("memory after each 250 requests, MiB:", [round(m) for m in memory])
    # Measured: 31 MiB of 3.2 GiB. Over 5,600 requests it slowed down, with and without predictions, but did
    # not quite stop. This bound finds a leak of 120 KiB a request; test_usage_ledger counts our own entries.
    assert memory[3] - memory[1] < 60
    log = servers.log.read_text()
    for line in ("gpu_align is off", "without its prediction", "gpu_align did not count", "counts no usage"):
        assert line not in log
    served = re.findall(r"\((ApiServer_\d)\b[^)]*\).*Received request", log)
    assert set(served) == {"ApiServer_0", "ApiServer_1"}
