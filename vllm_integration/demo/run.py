"""The demo from start to end: model, server, requests, table, page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from . import preflight, task

NUM_DRAFT_TOKENS = 32
MAX_MODEL_LEN = 4096
MAX_TOKENS = 1536
WARM_UP_TOKENS = 32
TINY_NAME = "tiny-editor"
CACHE_DIR = Path(".cache/demo-model")
# A model from the hub may have to be downloaded first.
READY_TIMEOUT_S = {"tiny": 300.0, "hub": 3600.0}
_STEPS = 6


@dataclass(frozen=True)
class _Served:
    """What the server needs to know about the model."""

    path: str
    name: str
    dtype: str
    tiny: bool
    gpu: bool


def run(model: str | None, out_dir: Path, ngram: bool = True) -> int:
    """See `vllm_integration.demo.run_demo`."""
    if found := preflight.problems():
        print(*(f"demo: {line}" for line in found), sep="\n")
        return 2

    from rich.console import Console

    from gpu_align.tools.bench.client import BenchError

    from .measure import MeasurementError
    from .model import TrainingError

    console = Console()
    try:
        with _terminate_as_interrupt():
            return _run(console, model, out_dir, ngram)
    except KeyboardInterrupt:
        console.print("\ndemo: interrupted; the server is stopped.", style="yellow")
        return 130
    except (MeasurementError, TrainingError, BenchError, OSError) as error:
        log = getattr(error, "log", "")
        text = f"demo: {error}\n{log}".rstrip()
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _run(console: Any, model: str | None, out_dir: Path, ngram: bool) -> int:
    from rich.padding import Padding
    from rich.text import Text

    from .measure import EDITED, VERBATIM, compare, failures

    started = time.monotonic()
    gpu = preflight.has_gpu()
    out_dir.mkdir(parents=True, exist_ok=True)
    steps_dir = out_dir / "steps"
    shutil.rmtree(steps_dir, ignore_errors=True)
    steps_dir.mkdir()

    if model is None:
        _headline(console, 1, "Model")
        path = _tiny_model(console)
        served = _Served(str(path), TINY_NAME, "float32", tiny=True, gpu=gpu)
    else:
        _headline(console, 1, f"Model: {model}")
        dtype = os.environ.get("DEMO_DTYPE") or ("auto" if gpu else "float32")
        served = _Served(model, model, dtype, tiny=False, gpu=gpu)
    rows = _measure_plugin(console, served, out_dir, steps_dir)
    if ngram:
        rows.insert(1, _measure_ngram(console, served, out_dir, steps_dir))
    compare(rows)

    _headline(console, 5, "Result")
    from .page import explain, terminal_table

    console.print(terminal_table(rows))
    for row in rows:
        console.print(Padding.indent(Text(f"{row.name}: {explain(row, rows[0])}"), 3))

    _headline(console, 6, "Page")
    page = _write_page(served, rows, out_dir)
    console.print(f"   playback, every pass, every token's source: {page}", highlight=False, soft_wrap=True)

    by_name = {row.name: row for row in rows}
    found = failures(rows[0], by_name[VERBATIM], rows)
    # Another model promises no speed, and in a shorter float type the batch's shape may flip an argmax.
    failed = bool(found) if served.tiny else served.dtype == "float32" and not all(r.identical for r in rows)
    for line in found:
        console.print(f"   {'FAILED' if failed else 'note'}: {line}", style="red", markup=False)
    edited = by_name[EDITED]
    console.print(
        f"Demo {'failed' if failed else 'done'} in {time.monotonic() - started:.0f} s. With the file before the "
        f"edit as the prediction: {rows[0].steps} → {edited.steps} passes of the model, "
        f"{rows[0].seconds:.2f} → {edited.seconds:.2f} s.",
        style="red" if failed else "green",
        highlight=False,
    )
    return int(failed)


def _serve(
    console: Any,
    served: _Served,
    speculation: Mapping[str, Any],
    log: Path,
    steps_dir: Path,
    use: Callable[[str], Any],
) -> Any:
    """Return what `use(url)` returns while a server with `speculation` runs."""
    from rich.text import Text

    from gpu_align.tools.bench.servers import HOST, ServerProcess, free_port

    from .server import vllm_command, vllm_environment

    port = free_port()
    command = vllm_command(
        served.path,
        port,
        name=served.name,
        dtype=served.dtype,
        speculation=speculation,
        max_model_len=MAX_MODEL_LEN,
    )
    env = vllm_environment(steps_dir, gpu=served.gpu, offline=served.tiny)
    url = f"http://{HOST}:{port}"
    plain = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(f"   {' '.join(command)}", style="dim", **plain)
    with ServerProcess(command, url, log, env) as server:
        beat = _Beat(15.0)
        with console.status("   starting …") as status:

            def tick(seconds: float) -> None:
                text = f"starting, {seconds:.0f} s: {server.last_line()}"
                if console.is_terminal:
                    status.update(Text("   " + text[:90]))
                elif beat():
                    console.print("   " + text[:90], **plain)

            took = server.wait_ready(READY_TIMEOUT_S["tiny" if served.tiny else "hub"], tick)
        console.print(f"   ready on {url} after {took:.0f} s; log: {log}", highlight=False, soft_wrap=True)
        try:
            return use(url)
        except Exception:
            server.check_alive()  # a dead server explains more than the error of its client
            raise


def _measure_plugin(console: Any, served: _Served, out_dir: Path, steps_dir: Path) -> list[Any]:
    from .measure import EDITED, REPEATS, UNRELATED, VERBATIM, measure_rounds
    from .server import plugin_speculation

    _headline(console, 2, "vLLM server with the plugin")

    def use(url: str) -> list[Any]:
        _headline(console, 3, f"The same edit request, four predictions, {REPEATS} rounds")
        predictions = {
            VERBATIM: lambda output: output,
            EDITED: lambda _: task.ORIGINAL,
            UNRELATED: lambda _: task.UNRELATED,
        }
        with _requests(console, url, served, 4 * REPEATS) as (client, request, done):
            return measure_rounds(client, request, predictions, steps_dir, done)

    rows: list[Any] = _serve(
        console, served, plugin_speculation(NUM_DRAFT_TOKENS), out_dir / "server.log", steps_dir, use
    )
    return rows


def _measure_ngram(console: Any, served: _Served, out_dir: Path, steps_dir: Path) -> Any:
    from .measure import REPEATS, measure_ngram
    from .server import ngram_speculation

    _headline(console, 4, "The same request to a vLLM server with its own n-gram drafter")

    def use(url: str) -> Any:
        with _requests(console, url, served, REPEATS) as (client, request, done):
            return measure_ngram(client, request, f"{url}/metrics", done)

    speculation = ngram_speculation(NUM_DRAFT_TOKENS)
    return _serve(console, served, speculation, out_dir / "server-ngram.log", steps_dir, use)


@contextmanager
def _requests(
    console: Any, url: str, served: _Served, num: int
) -> Iterator[tuple[Any, Any, Callable[[str], None]]]:
    """A client, the request, and what to call after each of `num` requests; a first one has warmed the server."""
    from openai import OpenAI, OpenAIError
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .measure import MeasurementError, Request, send

    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=1800)
    request = Request(served.name, task.messages(), MAX_TOKENS)
    columns = (
        TextColumn("   {task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("warm-up", total=1 + num)
            send(client, replace(request, max_tokens=WARM_UP_TOKENS), None)
            progress.advance(bar)

            def done(name: str) -> None:
                progress.update(bar, description=name, advance=1)

            yield client, request, done
    except OpenAIError as error:
        raise MeasurementError(f"the server refused a request: {error}") from error


def _tiny_model(console: Any) -> Path:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from . import model

    spec = model.ModelSpec()
    folder = model.cached(spec, CACHE_DIR)
    if folder is not None:
        console.print(f"   {folder} (made by an earlier run)", highlight=False)
        return folder
    console.print(
        "   making a tiny Llama that learns this one edit by heart, about a minute on two cores",
        soft_wrap=True,
    )
    columns = (
        TextColumn("   {task.description:<26}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens learnt  loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    beat = _Beat(10.0)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("tokenizer, from the stdlib", total=1, loss=float("nan"))

        def report(now: model.Progress) -> None:
            stage = "answer after the prompt" if now.with_prompt else "answer alone"
            progress.update(bar, description=stage, total=now.total, completed=now.learnt, loss=now.loss)
            if not console.is_terminal and beat():
                console.print(
                    f"   {stage}: step {now.step}, loss {now.loss:.3f}, {now.learnt}/{now.total} learnt"
                )

        folder = model.make_model(spec, CACHE_DIR, report)
    console.print(f"   {folder}", highlight=False, soft_wrap=True)
    return folder


def _write_page(served: _Served, rows: list[Any], out_dir: Path) -> Path:
    from gpu_align.tools.simulate import load_tokenizer

    from .measure import NGRAM, result
    from .page import render

    machine = "GPU" if served.gpu else "CPU"
    times = len(rows[0].wall_s)
    facts = [
        f"Model {served.name}, {served.dtype}, {machine}; up to {NUM_DRAFT_TOKENS} drafts a pass; temperature 0.",
        f"Times: the median of {times} (shortest to longest), measured by the client.",
        f"The requests are sent in turn, in {times} rounds.",
        "A pass is a forward pass of the model: a verification step in the step log.",
    ]
    if any(row.name == NGRAM for row in rows):
        facts.append(
            "vLLM's n-gram drafter cannot be chosen for one request: it runs in a second server, after the first, "
            "with vLLM's default window. Its passes and drafts are taken from /metrics."
        )
    (out_dir / "demo.json").write_text(
        json.dumps(result(rows, served.name, NUM_DRAFT_TOKENS), indent=1) + "\n", encoding="utf-8"
    )
    page = out_dir / "demo.html"
    page.write_text(render(rows, load_tokenizer(served.path), facts, NUM_DRAFT_TOKENS), encoding="utf-8")
    return page


def _headline(console: Any, number: int, text: str) -> None:
    console.print(f"{number}/{_STEPS} {text}", style="bold", highlight=False)


class _Beat:
    """True at most once every `seconds`: a log file gets a line where a terminal has a moving bar."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo the way Ctrl-C does, so that the server is stopped then too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
