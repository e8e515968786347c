"""The servers of a run: some that are there already, or three that are started in turn.

A *stage* is the servers that are up at one time, as one client a mode; the modes of a stage are interleaved.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_align.bench import servers
from gpu_align.bench.client import Client
from gpu_align.bench.errors import BenchError
from gpu_align.bench.measure import Session
from gpu_align.bench.metrics import scrape
from gpu_align.bench.plan import Settings
from gpu_align.bench.result import Result

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
    gpu = servers.has_gpu()
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
    port = servers.free_port()
    url = f"http://{servers.HOST}:{port}"
    command = servers.command_line(what.model, kind, port, what.num_draft_tokens, what.arguments, gpu=gpu)
    say(f"{title}: starting; log: {log}", 0.0)
    async with servers.running(
        command, url, log, servers.environment(gpu=gpu), lambda seconds: say(title, seconds)
    ):
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
