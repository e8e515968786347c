"""The vLLM servers of `--serve`: their command lines and environment, and one that runs while a block does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .client import BenchError, Client
from .measure import Result, Session, Settings, scrape

#: Seconds between two looks at a server that is starting.
POLL_S = 0.25
#: Seconds to end in order: of a server that was healthy, and of one that was starting. While its engine starts,
#: vLLM acts on no SIGTERM, and has nothing to lose.
STOP_GRACE_S, START_GRACE_S = 20.0, 2.0
_TAIL_LINES = 25


class ServerProcess:
    """Leaving the `with` block stops the whole group; if this process itself is killed, a guard does.

    Args:
        command: what to run.
        url: where it answers; ``url + "/health"`` gives 200 when it is ready.
        log: the file its output goes to; overwritten.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.url = url
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._ready = self._stopped = False

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            self._guard = _start_guard(self.pid)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the group's leader."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def check_alive(self, when: str = "") -> None:
        """Raise BenchError with the end of the log when the process has ended; `when` completes the sentence."""
        if self.exit_code is not None:
            self._fail(f"the server ended with exit code {self.exit_code}{when}")

    def waiting(self, timeout_s: float) -> Iterator[float]:
        """Give the seconds waited so far until the server is healthy; whoever asks pauses between two of them.

        Raises:
            BenchError: it ended, or is not healthy after `timeout_s`; with the end of its log.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            self.check_alive(" before it was ready")
            if self._healthy():
                self._ready = True
                return
            if waited > timeout_s:
                self._fail(f"the server is not ready after {waited:.0f} s")
            yield waited

    def wait_ready(self, timeout_s: float, tick: Callable[[float], None]) -> float:
        """Wait until the server is healthy and return the seconds it took. Raises as `waiting` does."""
        started = time.monotonic()
        for waited in self.waiting(timeout_s):
            tick(waited)
            time.sleep(POLL_S)
        return time.monotonic() - started

    def stop(self, grace_s: float | None = None) -> None:
        """End the whole group: asked first, forced after `grace_s` (None: as it needs). Again is harmless."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s if grace_s is not None else self._grace_s())
        finally:  # a second Ctrl-C ends the waiting, not the stopping
            self._signal(signal.SIGKILL)  # workers that the leader left behind are still in its group
            self._process.wait()
            if self._guard is not None:
                self._guard.communicate(b".")

    def _grace_s(self) -> float:
        return STOP_GRACE_S if self._ready else START_GRACE_S

    def last_line(self) -> str:
        """The last line of the log that is not empty."""
        return next(reversed(self._lines()), "").strip()

    def tail(self) -> str:
        """The last lines of the log that are not empty."""
        return "\n".join(self._lines()[-_TAIL_LINES:])

    def _lines(self) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _fail(self, message: str) -> None:
        raise BenchError(f"{message}; the end of {self.log}:", log=self.tail())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C of the terminal is not for it
    )


HOST = "127.0.0.1"
START_TIMEOUT_S = 3600.0  # a model may have to be downloaded first

#: `--speculative-config` of each kind of server; None: no drafts.
SPECULATION: Mapping[str, Mapping[str, object] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "gpu-align": {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"},
}


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def command_line(
    model: str, kind: str, port: int, num_draft_tokens: int, extra: Sequence[str], *, gpu: bool
) -> list[str]:
    """Return the command line of a vLLM server.

    Args:
        model: a name or a folder.
        kind: a key of `SPECULATION`.
        port: where it listens.
        num_draft_tokens: the most draft tokens a step.
        extra: options of the user; they come last, so that they win.
        gpu: without one, the server runs in float32 and compiles nothing.
    """
    options = ["--model", model, "--host", HOST, "--port", str(port)]
    speculation = SPECULATION[kind]
    if speculation is not None:
        config = {**speculation, "num_speculative_tokens": num_draft_tokens}
        options += ["--speculative-config", json.dumps(config)]
    if not gpu:
        options += ["--dtype", "float32", "--enforce-eager"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *extra]


def environment(*, gpu: bool) -> dict[str, str]:
    """Return this process's environment with what the server needs."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[3])  # a checkout that is not installed
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    env["GPU_ALIGN_STRICT"] = "1"  # a server that quietly does not draft would be measured as one that does
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not gpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # One core for the front end, as vLLM does it, but no thread tied to a core that others may be using:
        # a parallel region is as slow as its slowest thread.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = str(max(1, (os.cpu_count() or 1) - 1))
        env.setdefault("OMP_NUM_THREADS", threads)
        # vLLM's n-gram drafter runs in numba. Where its number of threads is not that of torch, OpenMP changes its
        # team twice a step: n-gram drafts would look ten times slower than they are.
        env.setdefault("NUMBA_NUM_THREADS", threads)
    return env


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device."""
    import torch

    return torch.cuda.is_available()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], url: str, log: Path, env: Mapping[str, str], tick: Callable[[float], None]
) -> AsyncIterator[int]:
    """Start a server, wait until it is healthy, give the id of its group, and stop the group at the end.

    Args:
        command, url, log, env: of a `ServerProcess`.
        tick: called with the seconds waited, about four times a second.

    Raises:
        BenchError: it dies at its start, or is not healthy after `START_TIMEOUT_S`; with the end of its log.
    """
    with ServerProcess(command, url, log, env) as process:
        waiting = process.waiting(START_TIMEOUT_S)
        while (waited := await asyncio.to_thread(next, waiting, None)) is not None:
            tick(waited)
            await asyncio.sleep(POLL_S)
        try:
            yield process.pid
        except BenchError as error:
            if not error.log and process.exit_code is not None:  # a dead server explains more than its client
                raise BenchError(
                    f"{error} (the server ended with exit code {process.exit_code})", log=process.tail()
                ) from error
            raise


#: Says on the terminal what is being waited for; `seconds` is 0 when it begins.
Say = Callable[[str, float], None]
#: Which server of `--serve` measures which modes.
_SERVED = {"none": ("none",), "ngram": ("ngram",), "gpu-align": ("prediction", "unrelated")}
_TITLES = {"none": "no drafts", "ngram": "vLLM's n-gram drafts", "gpu-align": "gpu-align"}


@dataclass(frozen=True)
class Attached:
    """Servers that are there already.

    Attributes:
        base_url: a server with our plugin, ends in ``/v1``.
        compare_url: one with vLLM's n-gram drafts, for the mode `ngram`.
        model: what to ask for; None: the only one that is served.
        api_key: for both.
    """

    base_url: str
    compare_url: str | None = None
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class Served:
    """A model to serve three times.

    Attributes:
        model: a name or a folder.
        num_draft_tokens: the most draft tokens a step, of ours and of n-gram.
        arguments: more options of vLLM's server.
        together: whether all servers run at once, so that all modes can be interleaved.
    """

    model: str
    num_draft_tokens: int = 32
    arguments: tuple[str, ...] = ()
    together: bool = False


async def run_attached(where: Attached, session: Session) -> None:
    """Measure servers that are there already, all modes interleaved.

    Raises:
        BenchError: a server is not there, does not serve the model or lacks what a mode needs, or fails.
    """
    settings = session.settings
    base = _client(where.base_url, where.api_key, settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(base.close)
        chosen = await base.choose_model(where.model)
        clients = dict.fromkeys((mode for mode in settings.modes if mode != "ngram"), base)
        if clients:
            await _describe(base, clients, session.result)
            await _needs_plugin(base, clients)
        if "ngram" in settings.modes and where.compare_url is not None:
            other = _client(where.compare_url, where.api_key, settings)
            stack.push_async_callback(other.close)
            await other.choose_model(chosen.id)
            await _needs_ngram(other)
            await _describe(other, {"ngram": other}, session.result)
            clients["ngram"] = other
        session.result.about |= {"model": chosen.id, "tokenizer": chosen.root}
        await session.stage({mode: clients[mode] for mode in settings.modes})


async def run_served(what: Served, session: Session, say: Say) -> None:
    """Start a server, measure its modes, stop it; then the next one. Or all servers at once.

    Raises:
        BenchError: a server does not start, or fails.
    """
    kinds = [kind for kind, modes in _SERVED.items() if set(modes) & set(session.settings.modes)]
    session.result.about |= {"model": what.model, "tokenizer": what.model}
    if len(kinds) > 1 and not what.together:
        session.result.note(
            "The servers ran one after another: only modes of one server (prediction and unrelated) are "
            "interleaved."
        )
    logs = Path(tempfile.mkdtemp(prefix="gpu-align-bench-"))
    try:
        await _serve_kinds(what, kinds, logs, session, say)
    except BenchError:
        raise  # the logs stay: the message names them
    except BaseException:
        shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)


async def _serve_kinds(what: Served, kinds: Sequence[str], logs: Path, session: Session, say: Say) -> None:
    gpu = has_gpu()
    async with contextlib.AsyncExitStack() as stack:
        all_clients: dict[str, Client] = {}
        for number, kind in enumerate(kinds, start=1):
            title = f"server {number} of {len(kinds)}, {_TITLES[kind]}"
            server = _server(what, kind, gpu, logs / f"{kind}.log", session, title, say)
            client = await stack.enter_async_context(server)
            clients = {mode: client for mode in _SERVED[kind] if mode in session.settings.modes}
            await _describe(client, clients, session.result)
            if what.together:
                all_clients |= clients
            else:
                await session.stage(clients)
                await stack.aclose()
        if what.together:
            await session.stage({mode: all_clients[mode] for mode in session.settings.modes})


@contextlib.asynccontextmanager
async def _server(
    what: Served, kind: str, gpu: bool, log: Path, session: Session, title: str, say: Say
) -> AsyncIterator[Client]:
    port = free_port()
    url = f"http://{HOST}:{port}"
    command = command_line(what.model, kind, port, what.num_draft_tokens, what.arguments, gpu=gpu)
    say(f"{title}: starting; log: {log}", 0.0)
    async with running(command, url, log, environment(gpu=gpu), lambda seconds: say(title, seconds)):
        client = _client(f"{url}/v1", None, session.settings)
        try:
            await client.choose_model(None)
            yield client
        finally:
            await client.close()


def _client(url: str, api_key: str | None, settings: Settings) -> Client:
    return Client(url, api_key, settings.timeout_s, fresh_prefix=settings.fresh_prefix)


async def _describe(client: Client, modes: Sequence[str] | dict[str, Client], result: Result) -> None:
    """Note which server measured which modes, and what it says of itself."""
    counts = await scrape(client.metrics)
    version = re.search(r'"version"\s*:\s*"([^"]{1,80})"', await client.root_text("/version") or "")
    server: dict[str, Any] = {"modes": list(modes), "url": client.base_url}
    server |= {"vllm": version[1] if version else None, "plugin": counts.info if counts else {}}
    result.about.setdefault("servers", []).append(server)


async def _needs_plugin(client: Client, modes: Sequence[str] | dict[str, Client]) -> None:
    """A server without the plugin would ignore predictions, and be measured as if they were useless."""
    counts = await scrape(client.metrics)
    wanting = [mode for mode in modes if mode != "none"]
    if wanting and counts is not None and not counts.has_plugin:
        raise BenchError(
            f"--modes: {wanting[0]} needs a server that drafts from predictions, and {client.base_url} has no "
            "gpu_align metrics: start it with the plugin, or measure --modes none",
            usage=True,
        )


async def _needs_ngram(client: Client) -> None:
    counts = await scrape(client.metrics)
    if counts is not None and (counts.has_plugin or not counts.has_drafts):
        what = "the gpu-align plugin" if counts.has_plugin else "no draft tokens"
        raise BenchError(
            f"--compare-url: expected a server with vLLM's n-gram drafts, found {what} at {client.base_url}",
            usage=True,
        )
