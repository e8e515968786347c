"""The demo from start to end: model, server, requests, table, page."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_integration.demo import preflight, task

NUM_DRAFT_TOKENS = 32
MAX_MODEL_LEN = 4096
MAX_TOKENS = 1536
WARM_UP_TOKENS = 32
TINY_NAME = "tiny-editor"
CACHE_DIR = Path(".cache/demo-model")
# A model from the hub may have to be downloaded first.
READY_TIMEOUT_S = {"tiny": 300.0, "hub": 3600.0}
_STEPS = 5


@dataclass(frozen=True)
class _Served:
    """What the server needs to know about the model."""

    path: str
    name: str
    dtype: str
    tiny: bool
    gpu: bool


def run(model: str | None, out_dir: Path) -> int:
    """See `vllm_integration.demo.run_demo`."""
    if found := preflight.problems():
        print(*(f"demo: {line}" for line in found), sep="\n")
        return 2

    from rich.console import Console

    from vllm_integration.demo.measure import MeasurementError
    from vllm_integration.demo.model import TrainingError
    from vllm_integration.demo.server import ServerError

    console = Console()
    try:
        with _terminate_as_interrupt():
            return _run(console, model, out_dir)
    except KeyboardInterrupt:
        console.print("\ndemo: interrupted; the server is stopped.", style="yellow")
        return 130
    except (MeasurementError, TrainingError, ServerError) as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 2


def _run(console: Any, model: str | None, out_dir: Path) -> int:
    from vllm_integration.demo.measure import compare, failures

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
    rows = _serve_and_measure(console, served, out_dir, steps_dir)
    compare(rows)

    _headline(console, 4, "Result")
    from vllm_integration.demo.page import terminal_table

    console.print(terminal_table(rows))

    _headline(console, 5, "Page")
    page = _write_page(served, rows, out_dir)
    console.print(f"   every token coloured by where it came from: {page}", highlight=False, soft_wrap=True)

    found = failures(rows[0], rows[1], rows)
    # Another model promises no speed, and in a shorter float type the batch's shape may flip an argmax.
    failed = bool(found) if served.tiny else served.dtype == "float32" and not all(r.identical for r in rows)
    for line in found:
        console.print(f"   {'FAILED' if failed else 'note'}: {line}", style="red", markup=False)
    verdict = "failed" if failed else "done"
    console.print(
        f"Demo {verdict} in {time.monotonic() - started:.0f} s.", style="red" if failed else "green"
    )
    return int(failed)


def _serve_and_measure(console: Any, served: _Served, out_dir: Path, steps_dir: Path) -> list[Any]:
    from rich.text import Text

    from vllm_integration.demo.server import HOST, Server, free_port, vllm_command, vllm_environment

    _headline(console, 2, "vLLM server with the plugin")
    port = free_port()
    lengths = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_model_len": MAX_MODEL_LEN}
    command = vllm_command(served.path, port, name=served.name, dtype=served.dtype, **lengths)
    env = vllm_environment(steps_dir, gpu=served.gpu, offline=served.tiny)
    log = out_dir / "server.log"
    url = f"http://{HOST}:{port}"
    plain = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(f"   {' '.join(command)}", style="dim", **plain)
    with Server(command, url, log, env) as server:
        beat = _Beat(15.0)
        with console.status("   starting …") as status:

            def tick(seconds: float, line: str) -> None:
                text = f"starting, {seconds:.0f} s: {line}"
                if console.is_terminal:
                    status.update(Text("   " + text[:90]))
                elif beat():
                    console.print("   " + text[:90], **plain)

            took = server.wait_ready(READY_TIMEOUT_S["tiny" if served.tiny else "hub"], tick)
        console.print(f"   ready on {url} after {took:.0f} s; log: {log}", highlight=False, soft_wrap=True)
        _headline(console, 3, "The same edit request, four predictions")
        try:
            return _measure(console, url, served, steps_dir)
        except Exception:
            server.check_alive()  # a dead server explains more than the error of its client
            raise


def _measure(console: Any, url: str, served: _Served, steps_dir: Path) -> list[Any]:
    from openai import OpenAI, OpenAIError
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_integration.demo.measure import REPEATS, MeasurementError, Request, measure, send

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
            bar = progress.add_task("warm-up", total=1 + 4 * REPEATS)
            send(client, replace(request, max_tokens=WARM_UP_TOKENS), None)
            progress.advance(bar)

            def row(name: str, prediction: str | None) -> Any:
                progress.update(bar, description=name)
                return measure(client, request, name, prediction, steps_dir, lambda: progress.advance(bar))

            none = row("none", None)
            predictions = {"verbatim": none.text, "edited": task.ORIGINAL, "unrelated": task.UNRELATED}
            return [none, *(row(name, prediction) for name, prediction in predictions.items())]
    except OpenAIError as error:
        raise MeasurementError(f"the server refused a request: {error}") from error


def _tiny_model(console: Any) -> Path:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_integration.demo import model

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
    from gpu_align.simulate import load_tokenizer
    from vllm_integration.demo.page import render

    machine = "GPU" if served.gpu else "CPU"
    facts = [
        f"Model {served.name}, {served.dtype}, {machine}; at most {NUM_DRAFT_TOKENS} draft tokens a step.",
        f"The request: edit {task.FILE_NAME}, temperature 0. Times: median of {len(rows[0].wall_s)}.",
        "verbatim: the exact output. edited: the file before the edit, which is what a user really has.",
    ]
    page = out_dir / "demo.html"
    page.write_text(render(rows, load_tokenizer(served.path), facts), encoding="utf-8")
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
