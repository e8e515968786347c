"""The OpenAI server on the V2 model runner, with two API servers and two engines (data parallel): separate
processes, each with the plugin; what the two front ends count is one sum."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from gpu_align.tools.bench.servers import PLUGIN_DRAFTS
from tests.vllm.clients import Logs, ask_all, chat, moved, of_prediction, recount, scrape, variants
from tests.vllm.engines import serve

pytestmark = pytest.mark.vllm

K = 8
# What `vllm serve --api-server-count` runs; the command itself needs metadata that the CPU build does not have.
SERVE = """
from vllm.entrypoints.cli.serve import run_multi_api_server
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

cli_env_setup()
args = make_arg_parser(FlexibleArgumentParser()).parse_args()
validate_parsed_serve_args(args)
run_multi_api_server(args)
"""


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
    for _ in range(3):  # a worker hears with its engine's next step that a request has ended
        ask_all(url, [chat(0, 2)] * 4)
    logs = Logs(steps)
    for index, answer in enumerate(answers):
        assert answer.texts == (texts[index // 6],)
        (log,) = logs.of(answer.id, 1, 30)
        assert answer.accepted_rejected == of_prediction(recount(log, n))
    for index, verdict in enumerate(("accepted", "rejected")):
        total = sum(answer.accepted_rejected[index] for answer in answers)
        assert deltas[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}'] == total > 0


def test_a_chat_request_with_a_prediction(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--max-model-len", "256", "--max-num-seqs", "4", "--data-parallel-size", "2"]
    flags += ["--api-server-count", "2", "--enable-log-requests"]
    flags += ["--speculative-config", json.dumps({**PLUGIN_DRAFTS, "num_speculative_tokens": K})]
    with serve(tiny_model, tmp_path, *flags, runner="V2", program=SERVE) as server:
        before = scrape(server.url)
        assert before["gpu_align_requests_total"] == 0  # shown before anybody has sent a prediction
        assert before["gpu_align_enabled"] == 1  # in both processes
        check_many(server.url, server.logs)
        metrics = httpx.get(f"{server.url}/metrics", timeout=60)
        accepted = scrape(server.url)['gpu_align_prediction_tokens_total{verdict="accepted"}']
        assert accepted > 0
        served = re.findall(
            r'request_success_total{engine="\d",finished_reason="length".* (\d+)\.0', metrics.text
        )
        assert len(served) == 2
        assert all(map(int, served))
    lines = server.output.read_text().splitlines()
    assert any("Using V2 Model Runner" in line for line in lines)
    starts = [line for line in lines if " drafts on vLLM " in line]
    assert [f"V2 model runner, K={K}; " in start for start in starts] == [True, True]
    served = re.findall(r"\((ApiServer_\d)\b[^)]*\).*Received request", "\n".join(lines))
    assert set(served) == {"ApiServer_0", "ApiServer_1"}
    for lost in ("gpu_align is off", "without its prediction", "gpu_align did not count", "counts no usage"):
        assert not any(lost in line for line in lines)
