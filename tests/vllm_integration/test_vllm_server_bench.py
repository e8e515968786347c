"""`gpu-align bench` with a real server: its figures are those of `/metrics`, all answers are the same, and Ctrl-C
leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gpu_align.tools.bench.client import Counts
from tests.vllm.engines import SERVER_ENVIRONMENT as ENVIRONMENT

pytestmark = pytest.mark.vllm

MAX_TOKENS = 40


def counts(url: str) -> Counts:
    return Counts.read(httpx.get(f"{url}/metrics").text) or Counts()


def write_pairs(path: Path) -> None:
    texts = [[f"w{(start + 7 * i) % 400}" for i in range(60)] for start in (3, 50)]
    edits = ((" ".join(words), " ".join([*words[:9], "w1", *words[10:]])) for words in texts)
    pairs = [{"id": n, "instruction": "w9", "before": a, "after": b} for n, (a, b) in enumerate(edits)]
    path.write_text("\n".join(map(json.dumps, pairs)))


REQUESTS = 16  # a turn
#: Tokens of the first run, the warm-up and the first turn.
FIRST_TURN = 2 * MAX_TOKENS + 8 * min(32, MAX_TOKENS) + REQUESTS * MAX_TOKENS


def address_of(bench: subprocess.Popen[str]) -> str | None:
    """Of vLLM's server, once it has been started."""
    for process in psutil.Process(bench.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--port" in words:
                return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    return None


def generated(url: str) -> int:
    try:
        return counts(url).generated
    except httpx.TransportError:
        return 0


def test_ctrl_c_while_it_measures_writes_the_turns_that_have_ended(tiny_llama: Path, tmp_path: Path) -> None:
    """As a user starts it, in a process group of its own: Ctrl-C of a terminal reaches the whole group."""
    out, page = tmp_path / "bench.json", tmp_path / "bench.html"
    write_pairs(tmp_path / "pairs.jsonl")
    flags: list[Any] = ["--serve", tiny_llama, "--vllm-args", "--max-model-len 512 --max-num-seqs 8"]
    flags += ["--modes", "none,prediction", "pairs.jsonl", "--max-tokens", MAX_TOKENS]
    flags += ["--concurrency", "4,2", "--requests", REQUESTS, "--json", out, "--html", page]
    # Not in pytest's folder: vLLM's sockets are there, too, and a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory() as logs:
        bench = subprocess.Popen(
            [sys.executable, "-m", "gpu_align", "bench", *map(str, flags)],
            cwd=tmp_path, env={**os.environ, **ENVIRONMENT, "TMPDIR": logs},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            deadline, url = time.monotonic() + 240, None
            while url is None or generated(url) <= FIRST_TURN:
                assert bench.poll() is None, bench.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.1)
                url = url or address_of(bench)
            running = psutil.Process(bench.pid).children(recursive=True)
            os.killpg(bench.pid, signal.SIGINT)
            told, _ = bench.communicate(timeout=60)
        finally:
            bench.kill()  # the guard then ends the server, where the test has failed
        assert (bench.returncode, "no process is left" in told, "Traceback" in told) == (130, True, False), (
            told
        )
        assert len(running) >= 3, "the server, its engine, the guard"
        _, alive = psutil.wait_procs(running, timeout=1)
        states = {process.pid: process.info["status"] for process in psutil.process_iter(["status"])}
        assert {states.get(process.pid, psutil.STATUS_ZOMBIE) for process in alive} <= {psutil.STATUS_ZOMBIE}
        assert list(Path(logs).glob("gpu-align-bench-*")) == []
    found = json.loads(out.read_text())
    assert found["complete"] is False
    (only,) = found["runs"]
    assert (only["mode"], only["concurrency"], only["requests"]) == ("none", 4, REQUESTS)
    assert only["output_tokens"] == only["steps"] == REQUESTS * MAX_TOKENS
    assert only["tokens_per_s"] > 0
    assert "<figure>" in page.read_text()
