"""A server as a process: its children end with it, whatever ends it; what it says when it does not start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_align.tools.bench.client import BenchError
from gpu_align.tools.bench.servers import HOST, STOP_GRACE_S, ServerProcess, free_port
from tests.gpu_align.bench.fake_openai import alive, wait_until

# Starts a child of its own, as vLLM does, and tells both ids; `stubborn` ignores the request to end.
_FAKE = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def _fake_server(tmp_path: Path, *words: str) -> ServerProcess:
    command = [sys.executable, "-c", _FAKE, *words]
    return ServerProcess(command, "http://127.0.0.1:9", tmp_path / "log", os.environ)


def _wait_ready(server: ServerProcess, seconds: float) -> list[float]:
    """Every wait until it is ready."""
    return [time.sleep(0.05) or waited for waited in server.waiting(seconds)]


def _pids(running: ServerProcess) -> list[int]:
    """The server's, and its child's once it has told it."""
    assert wait_until(lambda: len(running.log.read_text().split()) == 2)
    return [running.pid, int(running.log.read_text().split()[1])]


def _gone(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(alive, pids)), 5)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_server_and_its_children_are_always_stopped(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    pids: list[int] = []

    def use() -> None:
        with _fake_server(tmp_path) as running:
            pids.extend(_pids(running))
            if error is not None:
                raise error

    with pytest.raises(error) if error else contextlib.nullcontext():
        use()
    assert len(pids) == 2
    assert _gone(pids)


def test_a_stubborn_server_is_forced(tmp_path: Path) -> None:
    with _fake_server(tmp_path, "stubborn") as running:
        pids = _pids(running)
        running.stop(grace_s=0.2)
        running.stop()  # nothing left to do
    assert _gone(pids)


def test_a_stubborn_server_that_still_starts_is_forced_soon(tmp_path: Path) -> None:
    """As vLLM is: it acts on no SIGTERM while its engine starts."""
    with _fake_server(tmp_path, "stubborn") as running:
        pids = _pids(running)
        started = time.monotonic()
    assert time.monotonic() - started < STOP_GRACE_S / 2
    assert _gone(pids)


def test_a_second_interrupt_does_not_leave_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with _fake_server(tmp_path, "stubborn") as running:
        pids = _pids(running)
        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.stop()
    assert _gone(pids)


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('x' * 9); raise SystemExit('no such model')"]
    with (
        ServerProcess(command, "http://127.0.0.1:9", tmp_path / "log", os.environ) as running,
        pytest.raises(BenchError, match="exit code 1 before it was ready; the end of ") as caught,
    ):
        _wait_ready(running, 20)
    assert caught.value.log == "xxxxxxxxx\nno such model"


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with (
        _fake_server(tmp_path) as running,
        pytest.raises(BenchError, match=r"not ready after \d+ s"),
    ):
        _wait_ready(running, 0.4)


def test_health_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "health").write_text("ok")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", HOST, "-d", str(tmp_path)]
    with ServerProcess(command, f"http://{HOST}:{port}", tmp_path / "log", os.environ) as running:
        assert 0 < len(_wait_ready(running, 20)) < 400
