"""The servers that are measured: those that are there already, and vLLM servers that run meanwhile."""

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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..console import ROOT
from ..doctor import has_gpu
from .client import BenchError, Client
from .measure import Counts, Session, scrape

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
            guard = Path(__file__).with_name("guard.py")
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(guard), str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C of the terminal is not for it
            )
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

    def waiting(self, timeout_s: float) -> Iterator[float]:
        """Give the seconds waited so far until the server is healthy; whoever asks pauses between two of them.

        Raises:
            BenchError: it ended, or is not healthy after `timeout_s`; with the end of its log.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            problem = ""
            if self.exit_code is not None:
                problem = f"the server ended with exit code {self.exit_code} before it was ready"
            elif self._healthy():
                self._ready = True
                return
            elif waited > timeout_s:
                problem = f"the server is not ready after {waited:.0f} s"
            if problem:
                raise BenchError(f"{problem}; the end of {self.log}:", log=self.tail())
            yield waited

    def stop(self, grace_s: float | None = None) -> None:
        """End the whole group: asked first, forced after `grace_s` (None: as it needs). Again is harmless."""
        if self._stopped:
            return
        self._stopped = True
        if grace_s is None:
            grace_s = STOP_GRACE_S if self._ready else START_GRACE_S
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        finally:  # a second Ctrl-C ends the waiting, not the stopping
            self._signal(signal.SIGKILL)  # workers that the leader left behind are still in its group
            self._process.wait()
            if self._guard is not None:
                self._guard.communicate(b".")

    def tail(self) -> str:
        """The last lines of the log that are not empty."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


HOST = "127.0.0.1"


class Kind(NamedTuple):
    """A kind of vLLM server.

    Attributes:
        title: in words.
        speculation: `--speculative-config` but for the number of draft tokens; None: no drafts.
        modes: what is measured on it.
    """

    title: str
    speculation: Mapping[str, object] | None
    modes: tuple[str, ...]


NGRAM_DRAFTS: Mapping[str, object] = {"method": "ngram"}
PLUGIN_DRAFTS: Mapping[str, object] = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
KINDS: Mapping[str, Kind] = {
    "none": Kind("no drafts", None, ("none",)),
    "ngram": Kind(
        "vLLM's n-gram drafts", {**NGRAM_DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, ("ngram",)
    ),
    "gpu-align": Kind("gpu-align", PLUGIN_DRAFTS, ("prediction", "unrelated")),
}


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def command_line(
    model: str,
    speculation: Mapping[str, object] | None,
    port: int,
    num_draft_tokens: int,
    extra: Sequence[str],
    *,
    gpu: bool,
) -> list[str]:
    """Return the command line of a vLLM server.

    Args:
        model: a name or a folder.
        speculation: see `Kind`.
        port: where it listens.
        num_draft_tokens: the most draft tokens a step.
        extra: options of the user; they come last, so that they win.
        gpu: without one, the server runs in float32 and compiles nothing.
    """
    options = ["--model", model, "--host", HOST, "--port", str(port)]
    if speculation is not None:
        config = {**speculation, "num_speculative_tokens": num_draft_tokens}
        options += ["--speculative-config", json.dumps(config)]
    if not gpu:
        options += ["--dtype", "float32", "--enforce-eager"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *extra]


def environment(*, gpu: bool) -> dict[str, str]:
    """Return this process's environment with what the server needs."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
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


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str],
    url: str,
    log: Path,
    env: Mapping[str, str],
    tick: Callable[[float], None],
    timeout_s: float,
) -> AsyncIterator[int]:
    """Start a server, wait until it is healthy, give the id of its group, and stop the group at the end.

    Args:
        command, url, log, env: of a `ServerProcess`.
        tick: called with the seconds waited, about four times a second.
        timeout_s: the longest wait.

    Raises:
        BenchError: it dies at its start, or is not healthy in time; with the end of its log.
    """
    with ServerProcess(command, url, log, env) as process:
        waiting = process.waiting(timeout_s)
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
    """A model to serve by each kind of server in turn.

    Attributes:
        model: a name or a folder.
        num_draft_tokens: the most draft tokens a step, of ours and of n-gram.
        arguments: more options of vLLM's server.
        together: whether all servers run at once, so that all modes can be interleaved.
        kinds: the servers; those without a mode of the settings are left out.
        env: more variables of their environment.
        logs: a folder for their output; None: one that is deleted where no server fails.
        body: further fields of each request.
        timeout_s: the longest wait for a server to start; a model may have to be downloaded first.
    """

    model: str
    num_draft_tokens: int = 32
    arguments: tuple[str, ...] = ()
    together: bool = False
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    env: Mapping[str, str] = field(default_factory=dict)
    logs: Path | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 3600.0


async def run_attached(where: Attached, session: Session) -> None:
    """Measure servers that are there already, all modes interleaved.

    Raises:
        BenchError: a server is not there, does not serve the model or lacks what a mode needs, or fails.
    """
    modes = session.settings.modes
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(_client(session, where.base_url, where.api_key, where.model))
        clients = dict.fromkeys((mode for mode in modes if mode != "ngram"), base)
        if clients:
            counts = await _describe(base, list(clients), session)
            wanting = [mode for mode in clients if mode != "none"]
            # A server without the plugin would ignore predictions, and be measured as if they were useless.
            if wanting and counts is not None and not counts.has_plugin:
                raise BenchError(
                    f"--modes: {wanting[0]} needs a server that drafts from predictions, and {base.base_url} has "
                    "no gpu_align metrics: start it with the plugin, or measure --modes none",
                    usage=True,
                )
        if "ngram" in modes and where.compare_url is not None:
            other = await stack.enter_async_context(
                _client(session, where.compare_url, where.api_key, base.model)
            )
            counts = await _describe(other, ["ngram"], session)
            if counts is not None and (counts.has_plugin or not counts.has_drafts):
                what = "the gpu-align plugin" if counts.has_plugin else "no draft tokens"
                raise BenchError(
                    "--compare-url: expected a server with vLLM's n-gram drafts, "
                    f"found {what} at {other.base_url}",
                    usage=True,
                )
            clients["ngram"] = other
        session.result.about |= {"model": base.model, "tokenizer": base.root}
        await session.stage({mode: clients[mode] for mode in modes})


async def run_served(what: Served, session: Session, say: Say) -> None:
    """Start a server, measure its modes, stop it; then the next one. Or all servers at once.

    Raises:
        BenchError: a server does not start, or fails.
    """
    kinds = [name for name, kind in what.kinds.items() if set(kind.modes) & set(session.settings.modes)]
    session.result.about |= {"model": what.model, "tokenizer": what.model}
    if len(kinds) > 1 and not what.together:
        session.result.note(
            "The servers ran one after another: only modes of one server (prediction and unrelated) are "
            "interleaved."
        )
    logs = what.logs or Path(tempfile.mkdtemp(prefix="gpu-align-bench-"))
    failed = False
    try:
        async with contextlib.AsyncExitStack() as stack:
            all_clients: dict[str, Client] = {}
            for number, name in enumerate(kinds, start=1):
                title = f"server {number} of {len(kinds)}, {what.kinds[name].title}"
                server = _server(what, what.kinds[name], logs / f"{name}.log", session, title, say)
                client = await stack.enter_async_context(server)
                clients = {m: client for m in what.kinds[name].modes if m in session.settings.modes}
                await _describe(client, list(clients), session)
                if what.together:
                    all_clients |= clients
                else:
                    await session.stage(clients)
                    await stack.aclose()
            if what.together:
                await session.stage({mode: all_clients[mode] for mode in session.settings.modes})
    except BenchError:
        failed = True  # the logs stay: the message names them
        raise
    finally:
        if what.logs is None and not failed:
            shutil.rmtree(logs)


@contextlib.asynccontextmanager
async def _server(
    what: Served, kind: Kind, log: Path, session: Session, title: str, say: Say
) -> AsyncIterator[Client]:
    """A client of a server that runs while the block does."""
    port, gpu = free_port(), has_gpu()
    url = f"http://{HOST}:{port}"
    command = command_line(what.model, kind.speculation, port, what.num_draft_tokens, what.arguments, gpu=gpu)
    env = {**environment(gpu=gpu), **what.env}
    say(f"{title}: starting; log: {log}", 0.0)
    async with (
        running(command, url, log, env, lambda seconds: say(title, seconds), what.timeout_s),
        _client(session, f"{url}/v1", None, None, what.body) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def _client(
    session: Session, url: str, api_key: str | None, model: str | None, body: Mapping[str, Any] | None = None
) -> AsyncIterator[Client]:
    """A client of a model, or of the only one."""
    settings = session.settings
    client = Client(url, api_key, settings.timeout_s, fresh_prefix=settings.fresh_prefix, body=body)
    async with contextlib.aclosing(client):
        await client.choose_model(model)
        yield client


async def _describe(client: Client, modes: Sequence[str], session: Session) -> Counts | None:
    """Note which server measures which modes, and what it says of itself; its counters."""
    counts = await scrape(client.metrics)
    version = re.search(r'"version"\s*:\s*"([^"]{1,80})"', await client.root_text("/version") or "")
    server: dict[str, Any] = {"modes": list(modes), "url": client.base_url}
    server |= {"vllm": version[1] if version else None, "plugin": counts.info if counts else {}}
    session.result.about.setdefault("servers", []).append(server)
    return counts
