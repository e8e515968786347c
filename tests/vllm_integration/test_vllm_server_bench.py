"""`gpu-align bench` with a real server: its figures are those of `/metrics`, all answers are the same, and Ctrl-C
leaves neither a process nor a port behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner
from vllm_harness import ENVIRONMENT, K, Server

from gpu_align.tools.bench.client import Counts
from gpu_align.tools.cli import app

pytestmark = pytest.mark.vllm

MAX_TOKENS = 40


def counts(url: str) -> Counts:
    return Counts.read(httpx.get(f"{url}/metrics").text) or Counts()


def write_pairs(path: Path) -> None:
    texts = [[f"w{(start + 7 * i) % 400}" for i in range(60)] for start in (3, 50)]
    pairs = [
        {
            "id": n,
            "instruction": "w9",
            "before": " ".join(words),
            "after": " ".join([*words[:9], "w1", *words[10:]]),
        }
        for n, words in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, pairs)))


def test_the_figures_of_a_real_server(server: Server, tmp_path: Path) -> None:
    data, out, page = (tmp_path / name for name in ("pairs.jsonl", "bench.json", "bench.html"))
    write_pairs(data)
    before = counts(server.url)
    flags = [
        "--base-url",
        f"{server.url}/v1",
        "--model",
        "tiny",
        "--dataset",
        data,
        "--json",
        out,
        "--html",
        page,
    ]
    flags += ["--concurrency", "1,4", "--rounds", 1, "--max-tokens", MAX_TOKENS]
    done = CliRunner().invoke(app, ["bench", *map(str, flags)], env={"OPENAI_API_KEY": None})
    assert done.exit_code == 0, done.output
    counted = counts(server.url).since(before)

    found = json.loads(out.read_text())
    runs = {(run["mode"], run["concurrency"]): run for run in found["runs"]}
    assert [run["requests"] for run in found["runs"]] == [2, 2, 2, 8, 8, 8]
    for (mode, _), run in runs.items():
        assert run["output_tokens"] == run["requests"] * MAX_TOKENS  # this model writes no end token
        assert run["steps"] + run["accepted"] == run["output_tokens"]
        assert run["identical"] in ("yes", "near-tie"), mode
        assert (run["accepted"], run["rejected"]) == (0, 0) or mode != "none"
    for streams in (1, 4):
        # The prediction is the first run's answer with an edit.
        assert runs["prediction", streams]["accepted"] > runs["prediction", streams]["output_tokens"] / 2
        assert runs["prediction", streams]["steps"] < runs["unrelated", streams]["steps"]
    assert found["predictions"] == {"pairs": 2, "before": 0, "output": 2}
    assert not any("also served others" in note for note in found["notes"])
    # The rest of what the server counted are the first run and the warm-ups.
    drafted = [sum(run[verdict] for run in found["runs"]) for verdict in ("accepted", "rejected")]
    assert counted.accepted >= drafted[0] > 0
    assert drafted[1] <= counted.rejected <= drafted[1] + 16 * K * MAX_TOKENS
    warm_up = 3 * 8 * min(32, MAX_TOKENS)
    assert counted.generated == sum(run["output_tokens"] for run in found["runs"]) + 2 * MAX_TOKENS + warm_up
    assert "<figure>" in page.read_text()


REQUESTS = 16  # a turn
#: Tokens of the first run, the warm-up and the first turn.
FIRST_TURN = 2 * MAX_TOKENS + 8 * min(32, MAX_TOKENS) + REQUESTS * MAX_TOKENS


class Run:
    """`gpu-align bench --serve` as a user starts it, in a process group of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.out, self.page = folder / "bench.json", folder / "bench.html"
        write_pairs(folder / "pairs.jsonl")
        flags: list[Any] = ["--serve", model, "--vllm-args", "--max-model-len 512 --max-num-seqs 8"]
        flags += ["--modes", "none,prediction", "--dataset", "pairs.jsonl", "--max-tokens", MAX_TOKENS]
        flags += ["--concurrency", "4,2", "--requests", REQUESTS, "--json", self.out, "--html", self.page]
        # Not in pytest's folder: vLLM's sockets are there, too, and a socket's path has 107 characters at most.
        self.logs = Path(tempfile.mkdtemp())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_align", "bench", *map(str, flags)],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "TMPDIR": str(self.logs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.seen: list[psutil.Process] = []
        self.port = 0

    def servers(self) -> list[psutil.Process]:
        """vLLM's processes and the guard, all that run."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen += [process for process in found if process not in self.seen]
        return found

    def find_port(self) -> bool:
        for words in map(command_of, self.servers()):
            if "--port" in words:
                self.port = int(words[words.index("--port") + 1])
        return self.port > 0

    def wait_until(self, true: Callable[[], bool], pause: float = 0.2) -> None:
        deadline = time.monotonic() + 240
        while not true():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(pause)

    def generated(self) -> int:
        try:
            return counts(f"http://127.0.0.1:{self.port}").generated
        except httpx.TransportError:
            return 0

    def interrupt(self) -> dict[str, Any]:
        """Ctrl-C, which a terminal sends to the whole group; what is then in the JSON file."""
        self.servers()
        os.killpg(self.process.pid, signal.SIGINT)
        told, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 130, told
        assert "no process is left" in told
        assert "Traceback" not in told
        assert len(self.seen) >= 3, "the server, its engine, the guard"
        assert [each for each in self.seen if runs(each)] == []
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
        assert list(self.logs.glob("gpu-align-bench-*")) == []
        found: dict[str, Any] = json.loads(self.out.read_text())
        assert found["complete"] is False
        assert "<!doctype html>" in self.page.read_text()
        return found


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended
        return []


def runs(process: psutil.Process) -> bool:
    """False for one that has ended, if nobody has asked how."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(model: Path, folder: Path) -> Iterator[Run]:
    run = Run(model, folder)
    try:
        yield run
    finally:
        run.process.kill()  # the guard then ends the server, where the test has failed
        run.process.communicate()
        shutil.rmtree(run.logs, ignore_errors=True)


def test_ctrl_c_while_it_measures_writes_the_turns_that_have_ended(tiny_llama: Path, tmp_path: Path) -> None:
    with started(tiny_llama, tmp_path) as run:
        run.wait_until(run.find_port)
        run.wait_until(lambda: run.generated() > 0)
        run.wait_until(lambda: run.generated() > FIRST_TURN, pause=0.01)
        found = run.interrupt()
    (only,) = found["runs"]
    assert (only["mode"], only["concurrency"], only["requests"]) == ("none", 4, REQUESTS)
    assert only["output_tokens"] == only["steps"] == REQUESTS * MAX_TOKENS
    assert only["tokens_per_s"] > 0
    assert "<figure>" in run.page.read_text()
