"""Real engines and servers for tests: `V2Engine`, in a process that speaks JSON lines, and `serve`, over HTTP.

Both fork a process that has imported vLLM (`engine_process`)."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import IO, Any, TypeVar

import psutil
import pytest

from gpu_align.tools.bench.servers import HOST, PLUGIN_DRAFTS, free_port
from vllm_integration.seams.source_probe import installed_root

T = TypeVar("T")
ENGINE_PROCESS = Path(__file__).with_name("engine_process.py")

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "GPU_ALIGN_STRICT": "1",
    "TORCH_COMPILE_DISABLE": "1",  # the stand-in for Triton's backend is not good for it
}
# Ranks and engines that are processes of their own: vLLM wants a memory node for each.
SEVERAL_PROCESSES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# V1 runs on the CPU as it is, without the interpreter.
RUNNERS = {"V1": {"TRITON_INTERPRET": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {}}
MAX_MODEL_LEN = 256
BLOCK_SIZE = 32  # tokens in a block of the prefix cache
SHORT = {"GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"}  # less to interpret
VOCABULARY = range(4, 404)  # the words of the tiny model; smaller ids are special


@dataclass
class Request:
    """One request; arrives and is aborted before the step of that number, or aborted the n-th time that it is in a
    phase: (phase, n), see `engine_process.Engine.phase`.

    extra: more of its `extra_args`. salt: its `cache_salt`.
    """

    prompt: list[int]
    prediction: list[int] | list[list[int]] | None = None
    max_tokens: int = 16
    arrives: int = 0
    aborted: int | tuple[str, int] | None = None
    adapter: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """What became of the requests.

    steps: a dict a step: request number → (tokens scheduled, of which drafts, tokens sampled).
    """

    answers: list[dict[str, Any]]
    steps: list[dict[int, tuple[int, int, int]]]
    preemptions: int

    @property
    def outputs(self) -> list[list[int]]:
        return [answer["token_ids"] for answer in self.answers]

    @property
    def accepted(self) -> int:
        return sum(max(0, sampled - 1) for step in self.steps for _, _, sampled in step.values())

    def of(self, index: int) -> list[tuple[int, int, int]]:
        """The steps of one request."""
        return [step[index] for step in self.steps if index in step]

    def verification_steps(self, index: int) -> int:
        """Steps of one request that sampled tokens, after the one that ended its prefill."""
        return sum(1 for _, _, sampled in self.of(index) if sampled) - 1


class _ForkServer:
    """An `engine_process` that has imported vLLM, from where `path` says, and makes an engine process of each
    message."""

    def __init__(self, runner: str, path: str) -> None:
        self.lock = threading.Lock()  # two threads that ask at once must not take each other's answers
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as this process
        with theirs:
            Popen(
                [sys.executable, str(ENGINE_PROCESS), "--fork-from", str(theirs.fileno()), runner],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env={**os.environ, **ENVIRONMENT, **RUNNERS[runner], "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def fork(self, message: str, descriptors: list[int]) -> int:
        try:
            with self.lock:
                socket.send_fds(self.socket, [message.encode()], descriptors)
                return int(self.socket.recv(100))
        except (OSError, ValueError) as error:
            self.log.seek(0)
            raise RuntimeError(f"no engine process can be made:\n{self.log.read()[-4000:]}") from error


#: One a runner and search path for this process, started when the first engine is.
_fork_server = cache(_ForkServer)


class Forked:
    """An engine process that is no child of this process."""

    def __init__(
        self, settings: dict[str, Any], environment: dict[str, str], log: IO[str], runner: str
    ) -> None:
        (read_input, write_input), (read_output, write_output) = os.pipe(), os.pipe()
        theirs = [read_input, write_output, log.fileno()]
        server = _fork_server(runner, environment.get("PYTHONPATH", ""))
        self.pid = server.fork(json.dumps([settings, environment]), theirs)
        self._process = psutil.Process(self.pid)
        os.close(read_input)
        os.close(write_output)
        self.stdin, self.stdout = os.fdopen(write_input, "w"), os.fdopen(read_output)

    def send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)

    def end(self) -> None:
        """Wait for its end, and force it after half a minute."""
        try:
            self._process.wait(30)
        except psutil.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._process.wait()


class V2Engine:
    """A running `engine_process`; use as a context manager.

    runner: "V2", or "V1", which needs no interpreter. Ranks are forked, as on a GPU; what `settings["before"]`
    patches is patched in them.
    directory: for its log and, with `step_log`, one YAML file a request in `directory / "steps"`.
    settings: of `vllm.LLM`, and those that `engine_process` knows.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        num_draft_tokens: int,
        environment: dict[str, str] | None = None,
        step_log: bool = False,
        runner: str = "V2",
        **settings: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **ENVIRONMENT, **RUNNERS[runner], **(environment or {})}
        self.steps = directory / "steps"
        if step_log:
            environment["GPU_ALIGN_DEBUG_DIR"] = str(self.steps)
        if "tensor_parallel_size" in settings:
            environment.update(SEVERAL_PROCESSES)
            settings["before"] = f"fork_workers()\n{settings.get('before', '')}"
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 96,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "speculative_config": {**PLUGIN_DRAFTS, "num_speculative_tokens": num_draft_tokens},
            **settings,
        }
        self.log = directory / "log"
        self._log = self.log.open("w")
        self._process = Forked(arguments, environment, self._log, runner)
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> V2Engine:
        self.facts = self._answer(seconds=240)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.end()
        self._log.close()

    def warnings(self) -> list[str]:
        """Our lines of the log from WARNING up, without what is said of a step log that was asked for."""
        return [
            line
            for line in self.log.read_text().splitlines()
            if ("gpu_align" in line or "served without its prediction" in line)
            and (" ERROR " in line or (" WARNING " in line and "GPU_ALIGN_DEBUG_DIR" not in line))
        ]

    def run(self, requests: Sequence[Request], seconds: float = 240) -> Run:
        raw = self._call("run", {"requests": [asdict(request) for request in requests]}, seconds)
        steps = [{int(index): tuple(row) for index, row in step.items()} for step in raw["steps"]]
        return Run(raw["answers"], steps, raw["preemptions"])

    def trim(self, price: float | None) -> list[dict[int, tuple[int, int, list[float]]]]:
        steps = self._call("trim", {"price": price}, 30)
        return [{int(index): tuple(row) for index, row in step.items()} for step in steps]

    def execute(self, code: str) -> Any:
        """Run code in the engine's process; what it calls `found`."""
        return self._call("execute", {"code": code}, 60)

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call the engine's method of this name; see `engine_process.Engine`."""
        return dict(self._call(name, arguments, 60))

    def _call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        """The next line; a process that is silent for too long is ended, which closes its pipe."""
        watchdog = threading.Timer(seconds, self._process.send, [signal.SIGKILL])
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError(f"the engine has ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)


def vllm_version() -> str:
    """Of the installed vLLM, which is not imported; empty where there is none."""
    root = installed_root()
    text = "" if root is None else (root / "vllm" / "_version.py").read_text()
    found = re.search(r"^__version__ = .*'([\d.]+)", text, re.M)
    return found[1] if found else ""


def copy_vllm(directory: Path, names: Sequence[str]) -> None:
    """A search path with the installed vLLM: links, but for the files of these names, which can be changed."""
    root = installed_root()
    if root is None:
        pytest.skip("vLLM is not installed")
    leave = shutil.ignore_patterns("__pycache__")  # compiled files of the changed ones go elsewhere
    shutil.copytree(root / "vllm", directory / "vllm", copy_function=os.symlink, ignore=leave)
    for name in names:
        (directory / name).unlink()
        shutil.copy(root / name, directory / name)


def prompt_of(seed: int, length: int = 12) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice(VOCABULARY) for _ in range(length)]


def edited(tokens: list[T], seed: int, vocabulary: Sequence[T] = VOCABULARY) -> list[T]:  # type: ignore[assignment]
    """Insertions, deletions and substitutions, one in about eight tokens."""
    draw, out = random.Random(seed), []
    for token in tokens:
        kind = draw.randrange(24)
        if kind == 0:
            continue
        out.append(draw.choice(vocabulary) if kind == 1 else token)
        if kind == 2:
            out += draw.choices(vocabulary, k=3)
    return out


# --- servers ---

SERVER_K = 16  # draft tokens a step
SERVER_MAX_LEN = 512


@dataclass
class Server:
    """A running server: where it listens, where it writes step logs and its output, its process."""

    url: str
    logs: Path
    output: Path
    pid: int


@contextmanager
def serve(
    model: Path,
    directory: Path,
    *flags: str,
    runner: str,
    environment: Mapping[str, str] | None = None,
    before: str = "",
    program: str = "",
) -> Iterator[Server]:
    """The OpenAI server in its own process, stopped at the end; its output and step logs in `directory`.

    It is forked from a process that has imported vLLM, and forks its engine core, as on a GPU. before: code that
    it runs first. program: code instead of the server's.
    """
    url = f"http://{HOST}:{(port := free_port())}"
    argv = ["--model", str(model), "--served-model-name", "tiny", "--host", HOST, "--port", str(port)]
    argv += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(SERVER_MAX_LEN)]
    argv += ["--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    argv += ["--speculative-config", json.dumps({**PLUGIN_DRAFTS, "num_speculative_tokens": SERVER_K})]
    argv += flags
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ALIGN_")}
    variables |= {**ENVIRONMENT, **SEVERAL_PROCESSES, **RUNNERS[runner]}
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    logs, output = directory / "steps", directory / "server.log"
    variables |= {"GPU_ALIGN_DEBUG_DIR": str(logs), **(environment or {})}
    with output.open("w") as sink:
        settings = {
            "argv": argv,
            "before": f"fork_workers()\ntokens_are_free()\ndraft_by_the_reference()\n{before}",
            "program": program,
        }
        process = Forked(settings, variables, sink, runner)
    server = Server(url, logs, output, process.pid)
    children: list[psutil.Process] = []
    try:
        _wait_until_ready(server)
        children = psutil.Process(process.pid).children(recursive=True)
        yield server
    finally:
        process.send(signal.SIGTERM)
        process.end()
        for child in psutil.wait_procs(children, timeout=10)[1]:  # a server that is killed does not end them
            child.kill()


def _wait_until_ready(server: Server, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and psutil.pid_exists(server.pid):
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the server is not there:\n{server.output.read_text()[-4000:]}")
