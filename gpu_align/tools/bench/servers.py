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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import typer

from ..console import ROOT
from ..doctor import has_gpu
from .client import BenchError, Client, Counts, WrongOptionError, http_client
from .measure import Session

#: Seconds between two looks at a server that is starting.
POLL_S = 0.25
#: Seconds to end in order: of a server that was healthy, and of one that was starting. While its engine starts,
#: vLLM acts on no SIGTERM, and has nothing to lose.
STOP_GRACE_S, START_GRACE_S = 20.0, 2.0
#: The same where this process was killed.
GUARD_GRACE_S = 5
_TAIL_LINES = 25
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")
HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str],
    url: str,
    log: Path,
    env: Mapping[str, str],
    tick: Callable[[float], None],
    timeout_s: float,
) -> AsyncIterator[int]:
    """Start a server, wait until it is healthy, give the id of its process group, and stop the group at the end.

    If this process itself is killed, a guard stops the group. url: ``url + "/health"`` gives 200 when it is ready.
    log: the file of its output; overwritten. tick: called with the seconds waited, about four times a second.
    BenchError: it dies, or is not healthy in time; with the end of its log.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    guard, ready = None, False
    try:
        # A line of input: the group has been stopped in order. Its end without one: this process is gone.
        end = f"kill -s TERM -- -{process.pid} && sleep {GUARD_GRACE_S} && kill -s KILL -- -{process.pid}"
        guard = subprocess.Popen(
            ["sh", "-c", f"read -r _ || {{ {end}; }}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C of the terminal is not for it
        )
        started = time.monotonic()
        async with http_client(url, timeout=2.0) as client:
            while not ready:
                waited = time.monotonic() - started
                if process.poll() is not None:
                    problem = f"the server ended with exit code {process.returncode} before it was ready"
                    raise BenchError(f"{problem}; the end of {log}:", log=_tail(log))
                with contextlib.suppress(httpx.HTTPError):
                    ready = (await client.get(f"{url}/health")).status_code == 200
                if not ready and waited > timeout_s:
                    problem = f"the server is not ready after {waited:.0f} s"
                    raise BenchError(f"{problem}; the end of {log}:", log=_tail(log))
                tick(waited)
                await asyncio.sleep(0.0 if ready else POLL_S)
        yield process.pid
    except BenchError as error:
        if not ready or process.poll() is None:
            raise
        # A dead server explains more than its client.
        ended = f"{error} (the server ended with exit code {process.returncode})"
        raise BenchError(ended, log=_tail(log)) from error
    finally:
        _stop(process, guard, STOP_GRACE_S if ready else START_GRACE_S)


def _stop(process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes] | None, grace_s: float) -> None:
    """End the whole group: asked first, forced after `grace_s`."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(grace_s)
    finally:  # a second Ctrl-C ends the waiting, not the stopping
        with contextlib.suppress(ProcessLookupError):
            # Workers that outlive the leader are still in its group.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if guard is not None:
            guard.communicate(b"stopped\n")


def _tail(log: Path) -> str:
    """The last error that the log names, but for those that only say where it is; else the last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in _ERROR.findall(text) if "root cause" not in line]
    return errors[-1] if errors else "\n".join([s for s in text.splitlines() if s.strip()][-_TAIL_LINES:])


class Kind(NamedTuple):
    title: str
    #: `--speculative-config` but for the number of draft tokens; None: no drafts
    speculation: Mapping[str, object] | None
    modes: tuple[str, ...]  #: what is measured on it


#: One window for `bench` and the demo; vLLM's own default is 5 tokens.
NGRAM_DRAFTS: Mapping[str, object] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PLUGIN_DRAFTS: Mapping[str, object] = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs"}
KINDS: Mapping[str, Kind] = {
    "none": Kind("no drafts", None, ("none",)),
    "ngram": Kind("vLLM's n-gram drafts", NGRAM_DRAFTS, ("ngram",)),
    "gpu-align": Kind(
        "gpu-align", PLUGIN_DRAFTS, ("prediction", "unrelated", "context", "conversation", "plain")
    ),
}


def free_port() -> int:
    """A TCP port without a listener at this moment."""
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
    """Of a vLLM server; options of the user (`extra`) come last, so that they win."""
    options = ["--model", model, "--host", HOST, "--port", str(port)]
    if speculation is not None:
        config = {**speculation, "num_speculative_tokens": num_draft_tokens}
        options += ["--speculative-config", json.dumps(config)]
    if not gpu:
        options += ["--dtype", "float32", "--enforce-eager"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *extra]


def environment(*, gpu: bool) -> dict[str, str]:
    """This process's, with what the server needs."""
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


@dataclass(frozen=True)
class Attached:
    """Servers that are there already."""

    base_url: str  #: of a server with our plugin; ends in ``/v1``
    compare_url: str | None = None  #: of one with vLLM's n-gram drafts, for the mode `ngram`
    model: str | None = None  #: None: the only one that is served
    api_key: str | None = None  #: for both

    async def measure(self, session: Session) -> None:
        """Measure all modes interleaved; BenchError: a server is not there, lacks what a mode needs, or fails."""
        modes = session.settings.modes
        async with contextlib.AsyncExitStack() as stack:
            base = await stack.enter_async_context(_client(session, self.base_url, self.api_key, self.model))
            others = [mode for mode in modes if mode in ("plain", "ngram")]
            clients = dict.fromkeys((mode for mode in modes if mode not in others), base)
            if clients:
                counts = await _describe(base, list(clients), session)
                wanting = [mode for mode in clients if mode != "none"]
                # A server without the plugin would ignore predictions, and be measured as if they were useless.
                if wanting and counts is not None and not counts.has_plugin:
                    raise WrongOptionError(
                        f"--modes: {wanting[0]} needs a server that drafts from predictions, and {base.base_url} "
                        "has no gpu_align metrics: start it with the plugin, or measure --modes none"
                    )
            if others and self.compare_url is not None:
                other = _client(session, self.compare_url, self.api_key, base.model)
                clients |= dict.fromkeys(others, await stack.enter_async_context(other))
                counts = await _describe(clients[others[0]], others, session)
                wanted = "vLLM's n-gram drafts" if "ngram" in others else "no plugin"
                drafts = counts is not None and ("vllm_drafts" in counts.numbers or "ngram" not in others)
                if counts is not None and (counts.has_plugin or not drafts):
                    what = "the gpu-align plugin" if counts.has_plugin else "no draft tokens"
                    raise WrongOptionError(
                        f"--compare-url: expected a server with {wanted}, found {what} at {self.compare_url}"
                    )
            session.result.about |= {"model": base.model, "tokenizer": base.root}
            await session.stage({mode: clients[mode] for mode in modes})


@dataclass(frozen=True)
class Served:
    """A model to serve by each kind of server in turn."""

    model: str  #: a name or a folder
    num_draft_tokens: int
    arguments: tuple[str, ...] = ()  #: more options of vLLM's server
    together: bool = False  #: all servers run at once, so that all modes can be interleaved
    #: those without a mode of the settings are left out
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    env: Mapping[str, str] = field(default_factory=dict)  #: more variables of their environment
    logs: Path | None = None  #: a folder for their output; None: one that is deleted where no server fails
    body: Mapping[str, Any] = field(default_factory=dict)  #: further fields of each request
    timeout_s: float = 3600.0  #: for a server to start; a model may have to be downloaded first

    async def measure(self, session: Session) -> None:
        """Start a server, measure its modes, stop it; then the next one. Or all servers at once."""
        modes = session.settings.modes
        kinds = [name for name, kind in self.kinds.items() if set(kind.modes) & set(modes)]
        session.result.about |= {"model": self.model, "tokenizer": self.model}
        if len(kinds) > 1 and not self.together:
            session.result.note(
                "The servers ran one after another: only modes of one server (prediction and unrelated) are "
                "interleaved."
            )
        clients: dict[str, Client] = {}
        async with contextlib.AsyncExitStack() as stack:
            logs = stack.enter_context(_log_folder(self.logs))
            servers = await stack.enter_async_context(contextlib.AsyncExitStack())
            for number, name in enumerate(kinds, start=1):
                title = f"server {number} of {len(kinds)}, {self.kinds[name].title}"
                server = self._server(self.kinds[name], logs / f"{name}.log", session, title)
                client = await servers.enter_async_context(server)
                measured = [mode for mode in self.kinds[name].modes if mode in modes]
                clients |= dict.fromkeys(measured, client)
                await _describe(client, measured, session)
                if not self.together or name == kinds[-1]:
                    await session.stage({mode: clients[mode] for mode in modes if mode in clients})
                    await servers.aclose()
                    clients.clear()

    @contextlib.asynccontextmanager
    async def _server(self, kind: Kind, log: Path, session: Session, title: str) -> AsyncIterator[Client]:
        """A client of a server that runs while the block does."""
        port, gpu = free_port(), has_gpu()
        url, K, extra = f"http://{HOST}:{port}", self.num_draft_tokens, self.arguments
        command = command_line(self.model, kind.speculation, port, K, extra, gpu=gpu)
        env = {**environment(gpu=gpu), **self.env}
        typer.echo(f"{title}: starting; log: {log}", err=True)

        def tick(seconds: float) -> None:
            session.advance(f"{title}: starting, {seconds:.0f} s", 0)

        async with (
            running(command, url, log, env, tick, self.timeout_s),
            _client(session, f"{url}/v1", None, None, self.body) as client,
        ):
            yield client


@contextlib.contextmanager
def _log_folder(given: Path | None) -> Iterator[Path]:
    """`given`, or a folder that is then deleted; not where a server fails, since the message names its log."""
    folder = given or Path(tempfile.mkdtemp(prefix="gpu-align-bench-"))
    try:
        yield folder
    except BenchError:
        given = folder
        raise
    finally:
        if given is None:
            shutil.rmtree(folder)


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
    counts = await client.counts()
    version = re.search(r'"version"\s*:\s*"([^"]{1,80})"', await client.root_text("/version"))
    server: dict[str, Any] = {"modes": list(modes), "url": client.base_url}
    server |= {"vllm": version[1] if version else None, "plugin": counts.info if counts else {}}
    session.result.about.setdefault("servers", []).append(server)
    info: Mapping[str, str] = server["plugin"]
    if drafter := info.get("drafter", "")[:80]:
        session.result.note(
            f"Requests without a prediction have drafts on {client.base_url}, by the model's own drafter "
            f"({drafter}): there `none` is not without drafts."
        )
    if re.fullmatch(r"[1-9]\d{0,8}", most := info.get("max_num_seqs", "")):
        session.most_streams = min(int(most), session.most_streams or int(most))
    return counts
