"""``--serve``: three servers in turn, and no process is left behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
from typer.testing import CliRunner

from gpu_align.tools.bench import servers
from gpu_align.tools.bench.client import BenchError
from gpu_align.tools.bench.measure import ASKED_FOR, MODES
from gpu_align.tools.cli import app
from tests.gpu_align.bench import fake_openai
from tests.gpu_align.bench.fake_openai import alive, wait_until
from tests.gpu_align.bench.test_bench_command import by_key

ROOT = Path(__file__).resolve().parents[3]


class Started:
    """Starts fake servers where vLLM would be started, and knows their processes."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.logs: list[Path] = []
        self.commands: list[list[str]] = []
        command_line, running = servers.command_line, servers.running

        def fake(*arguments: Any, **more: Any) -> list[str]:
            command = command_line(*arguments, **more)
            self.commands.append(command)
            after = command.index("vllm.entrypoints.openai.api_server")
            flags = [word for word in command[after + 1 :] if word != "--enforce-eager"]
            return [sys.executable, "-I", fake_openai.__file__, *flags]

        def note(command: Sequence[str], url: str, log: Path, *rest: Any) -> Any:
            self.logs.append(folder / log.name)
            return running(command, url, folder / log.name, *rest)

        patch.setattr(servers, "command_line", fake)
        patch.setattr(servers, "running", note)
        patch.setattr(servers, "has_gpu", lambda: False)
        patch.setattr(tempfile, "tempdir", str(folder))

    def children(self) -> list[int]:
        words = [log.read_text().split() for log in self.logs if log.exists()]
        return [int(each[each.index("child") + 1]) for each in words if "child" in each]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, tmp_path)


def bench(dataset: Path, *arguments: object) -> tuple[Any, dict[str, Any]]:
    out = dataset.with_suffix(".json")
    flags = ("--serve", "tiny", dataset, "--json", out, "--concurrency", 2, "--rounds", 1)
    done = CliRunner().invoke(app, ["bench", *map(str, (*flags, *arguments))])
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize("together", [False, True])
def test_three_servers(dataset: Path, started: Started, together: bool) -> None:
    done, found = bench(dataset, "-k", 9, "--vllm-args", "--seed 3", *(["--together"] if together else []))
    assert done.exit_code == 0, done.output
    assert found["serve"] == {"num_draft_tokens": 9, "arguments": ["--seed", "3"], "together": together}
    modes = [["none"], ["ngram"], ["prediction", "unrelated"]]
    assert [server["modes"] for server in found["servers"]] == modes
    assert {mode for mode, _ in by_key(found)} == set(MODES) - set(ASKED_FOR)
    assert by_key(found)["prediction", 2]["steps"] < by_key(found)["ngram", 2]["steps"] < 93
    assert ("one after another" in " ".join(found["notes"])) == (not together)
    configs = [
        json.loads(command[command.index("--speculative-config") + 1])
        for command in started.commands
        if "--speculative-config" in command
    ]
    assert [config["method"] for config in configs] == ["ngram", "custom_class"]
    assert [config["num_speculative_tokens"] for config in configs] == [9, 9]
    assert all(command[-2:] == ["--seed", "3"] for command in started.commands)
    children = started.children()
    assert len(children) == 3
    assert wait_until(lambda: not any(map(alive, children)))
    assert not list(dataset.parent.glob("gpu-align-bench-*"))


def test_only_the_servers_that_are_needed(dataset: Path, started: Started) -> None:
    for modes in ("none,prediction", "none,plain"):
        _, found = bench(dataset, "--modes", modes)
        assert [server["modes"] for server in found["servers"]] == [[mode] for mode in modes.split(",")]
        assert set(by_key(found)) == {(mode, 2) for mode in modes.split(",")}


def test_ctrl_c_leaves_no_process_and_writes_what_it_has(dataset: Path, started: Started) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(started.children()) == 2)  # the second server is being started
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done, found = bench(dataset)
    thread.join()
    assert done.exit_code == 130, done.output
    assert "no process is left" in done.stderr
    assert found["complete"] is False
    assert list(by_key(found)) == [("none", 2)]
    assert not list(dataset.parent.glob("gpu-align-bench-*"))
    assert wait_until(lambda: not any(map(alive, started.children())))


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(dataset: Path, started: Started) -> None:
    done, found = bench(dataset, "--vllm-args", "--pause x")
    assert done.exit_code == 1
    first, *log = done.stderr.splitlines()[1:]
    assert first.startswith("error: the server ended with exit code 1 before it was ready; the end of ")
    assert log[-1] == "ValueError: could not convert string to float: 'x'"
    assert len(log) <= 25
    assert len(list(dataset.parent.glob("gpu-align-bench-*"))) == 1  # the message names the log
    assert found["runs"] == []
    assert wait_until(lambda: not any(map(alive, started.children())))


@contextlib.asynccontextmanager
async def server(tmp_path: Path, *flags: str, timeout_s: float = 20.0) -> AsyncIterator[list[int]]:
    """A fake server: its process and its child's."""
    port, log = servers.free_port(), tmp_path / "log"
    command = [sys.executable, "-I", fake_openai.__file__, "--port", str(port), *flags]
    url = f"http://{servers.HOST}:{port}"
    async with servers.running(command, url, log, os.environ, lambda seconds: None, timeout_s) as group:
        yield [group, int(log.read_text().split()[1])]


@pytest.mark.parametrize(
    ("flags", "error"),
    [((), RuntimeError), ((), KeyboardInterrupt), ((), asyncio.CancelledError), (("--stubborn", "1"), None)],
)
def test_a_server_and_its_children_are_always_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], error: type[BaseException] | None
) -> None:
    monkeypatch.setattr(servers, "STOP_GRACE_S", 0.2 if flags else 20.0)
    pids: list[int] = []

    async def use() -> None:
        async with server(tmp_path, *flags) as running:
            pids.extend(running)
            if error is not None:
                raise error

    with pytest.raises(error) if error else contextlib.nullcontext():
        asyncio.run(use())
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(alive, pids)), 5)


def test_a_second_interrupt_does_not_leave_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    pids: list[int] = []

    async def use() -> None:
        async with server(tmp_path, "--stubborn", "1") as running:
            pids.extend(running)
            monkeypatch.setattr(subprocess.Popen, "wait", interrupted)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(use())
    assert wait_until(lambda: not any(map(alive, pids)), 5)


def test_a_server_that_dies_explains_what_its_client_saw(tmp_path: Path) -> None:
    async def use() -> None:
        async with server(tmp_path) as (group, _):
            os.kill(group, signal.SIGKILL)
            os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
            raise BenchError("no answer")

    with pytest.raises(BenchError, match=r"no answer \(the server ended with exit code -9\)") as caught:
        asyncio.run(use())
    assert caught.value.log.startswith("child ")


def test_a_server_that_never_answers_is_given_up_and_forced_soon(tmp_path: Path) -> None:
    """As vLLM is: it acts on no SIGTERM while its engine starts."""

    async def use() -> None:
        async with server(tmp_path, "--stubborn", "1", "--deaf", "1", timeout_s=0.4):
            raise AssertionError("it is not ready")

    started = time.monotonic()
    with pytest.raises(BenchError, match=r"not ready after \d+ s; the end of "):
        asyncio.run(use())
    assert time.monotonic() - started < servers.STOP_GRACE_S / 2
    child = int((tmp_path / "log").read_text().split()[1])
    assert wait_until(lambda: not alive(child))  # the kernel ends it, at once or soon


SCRIPT = """
import asyncio, sys
from pathlib import Path
from tests.gpu_align.bench.test_bench_serve import server

async def main():
    async with server(Path(sys.argv[1])) as (group, _):
        print(group, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()), int((tmp_path / "log").read_text().split()[1])]
    assert all(map(alive, pids))
    process.kill()
    process.communicate()
    assert wait_until(lambda: not any(map(alive, pids)))
