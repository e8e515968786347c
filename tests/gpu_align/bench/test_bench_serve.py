"""``--serve``: three servers in turn, and no process is left behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
from typer.testing import CliRunner

from gpu_align.tools.bench import servers
from gpu_align.tools.bench.command import bench_command
from gpu_align.tools.bench.measure import MODES
from gpu_align.tools.cli import app
from tests.gpu_align.bench import fake_openai
from tests.gpu_align.bench.fake_openai import Fake, alive, wait_until
from tests.gpu_align.bench.test_bench_command import by_key
from tests.gpu_align.bench.test_bench_data import git

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
            return [sys.executable, "-I", str(Path(fake_openai.__file__)), *flags]

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
    flags = [
        "--serve",
        "tiny",
        "--dataset",
        dataset,
        "--json",
        out,
        "--concurrency",
        2,
        "--rounds",
        1,
        *arguments,
    ]
    done = CliRunner().invoke(app, ["bench", *map(str, flags)])
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize("together", [False, True])
def test_three_servers(dataset: Path, started: Started, together: bool) -> None:
    done, found = bench(dataset, "-k", 9, "--vllm-args", "--seed 3", *(["--together"] if together else []))
    assert done.exit_code == 0, done.output
    assert found["serve"] == {"num_draft_tokens": 9, "arguments": ["--seed", "3"], "together": together}
    assert [server["modes"] for server in found["servers"]] == [
        ["none"],
        ["ngram"],
        ["prediction", "unrelated"],
    ]
    assert {mode for mode, _ in by_key(found)} == set(MODES)
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
    _, found = bench(dataset, "--modes", "none,prediction")
    assert [server["modes"] for server in found["servers"]] == [["none"], ["prediction"]]


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


def test_the_examples_of_the_help_run(
    dataset: Path, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, examples = str(bench_command.__doc__).partition("Examples:")
    lines = [line.split()[1:] for line in examples.splitlines() if line.startswith("gpu-align bench ")]
    assert len(lines) == 3
    git(tmp_path, "init", "-q")
    for text in ("one two three\n", "one two four\n"):
        (tmp_path / "a.txt").write_text(text)
        git(tmp_path, "add", "a.txt")
        git(tmp_path, "commit", "-qm", "count")
    monkeypatch.chdir(tmp_path)
    with Fake() as fake:
        for words in lines:
            here = [fake.url if word == "http://localhost:8000/v1" else word for word in words]
            done = CliRunner().invoke(app, [*here, "--rounds", "1", "--max-tokens", "9"])
            assert done.exit_code == 0, done.output
    assert "<!doctype html>" in (tmp_path / "bench.html").read_text()
    assert json.loads((tmp_path / "bench.json").read_text())["version"]


SCRIPT = """
import asyncio, sys
from pathlib import Path
from gpu_align.tools.bench.servers import running

async def main():
    fake, port, log = sys.argv[1:]
    command = [sys.executable, "-I", fake, "--port", port]
    async with running(command, "http://127.0.0.1:" + port, Path(log), {}, lambda seconds: None, 60) as group:
        print(group, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [fake_openai.__file__, str(servers.free_port()), str(log)]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    group = int(process.stdout.readline())
    child = int(log.read_text().split()[1])
    assert alive(group)
    assert alive(child)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not alive(group) and not alive(child))
