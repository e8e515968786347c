"""Two API servers and one engine: no request fails, and the counters of both are one sum."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from request_server import serve
from usage_harness import WORDS, ask_all, chat, moved, scrape

pytestmark = pytest.mark.vllm

N = 8
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


def test_two_front_ends_count_as_one(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    variables = {"GPU_ALIGN_USAGE_DETAILS": "1", "GPU_ALIGN_BILL_REJECTED": "1", "GPU_ALIGN_DEBUG_DIR": ""}
    flags = ("--api-server-count", "2", "--enable-log-requests")
    program = (str(tmp_path / "serve.py"),)
    with serve(tiny_llama, tmp_path, *flags, environment=variables, program=program) as server:
        seeds = range(40)
        plain = [answer.texts[0] for answer in ask_all(server.url, [chat(seed, N) for seed in seeds])]
        before = scrape(server.url)
        assert before["gpu_align_requests_total"] == 0  # shown before anybody has sent a prediction
        assert before["gpu_align_enabled"] == 1  # in both processes
        draw = random.Random(0)
        bodies, expected = [], []
        for index in range(300):
            seed = draw.choice(seeds)
            hint = None
            if index % 3 == 0:
                words = plain[seed].split()
                words[draw.randrange(N)] = draw.choice(WORDS)
                hint = " ".join(words)
            bodies.append(chat(seed, N, hint, stream=index % 2 == 0))
            expected.append(plain[seed])
        # Whichever process wakes up first takes a connection: new ones for every 20 requests.
        answers = [answer for i in range(0, 300, 20) for answer in ask_all(server.url, bodies[i : i + 20])]
        deltas = moved(before, scrape(server.url))
        log = server.output.read_text()
    assert [answer.texts[0] for answer in answers] == expected
    hinted = answers[::3]
    for index, verdict in enumerate(("accepted", "rejected")):
        total = sum(answer.accepted_rejected[index] for answer in hinted)
        assert deltas[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}'] == total > 30
    assert deltas["gpu_align_requests_total"] == len(hinted)
    assert deltas["gpu_align_steps_total"] == sum(answer.details["gpu_align"]["steps"] for answer in hinted)
    for answer in answers:  # GPU_ALIGN_BILL_REJECTED
        rejected = max(answer.accepted_rejected[1], 0)
        assert answer.written == N + rejected
        assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + N + rejected
    for line in ("gpu_align is off", "without its prediction", "gpu_align did not count", "counts no usage"):
        assert line not in log
    served = re.findall(r"\((ApiServer_\d)\b[^)]*\).*Received request", log)
    assert set(served) == {"ApiServer_0", "ApiServer_1"}
