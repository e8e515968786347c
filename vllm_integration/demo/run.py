"""The demo from start to end: the model, `bench` with an edit of its own on two servers, the table, the page."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import task

if TYPE_CHECKING:
    from .page import Row

NUM_DRAFT_TOKENS = 32
MAX_TOKENS = 1536
TINY_NAME = "tiny-editor"
REPEATS = 3
_FEWER_STEPS = 4.0
CACHE_DIR = Path(".cache/demo-model")
#: Compiling would take longer than everything else that the demo does.
SERVER_OPTIONS = ("--max-model-len", "4096", "--max-num-seqs", "4", "--enforce-eager")
#: So that requests may bring tools; the parser does not take the answer, which stays a text, for a call.
TOOL_OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
#: Seconds. Another model may have to be downloaded first.
TINY_TIMEOUT_S, TIMEOUT_S = 300.0, 3600.0
_NEEDED = (
    "torch", "vllm", "transformers", "tokenizers", "rich", "yaml", "typer", "httpx", "prometheus_client",
)  # fmt: skip
_STEPS = 4


def run_demo(model: str | None = None, out_dir: Path = Path("demo_out"), ngram: bool = True) -> int:
    """Serve a model with the plugin, send one edit with different predictions, and compare steps and time.

    model: a Hugging Face name or folder; None: a tiny one of our own, kept under `.cache/demo-model/`. out_dir:
    gets `demo.html`, the servers' logs, and `steps/`, the step logs. ngram: also start one with vLLM's n-gram.

    Returns 0 when every output is identical and the tiny model has no `failures`; 1 when not; 2 when something is
    missing or the server does not run; 130 after Ctrl-C.
    """
    if found := problems():
        print(*(f"demo: {line}" for line in found), sep="\n")
        return 2

    from rich.console import Console

    from gpu_align.tools.bench.client import BenchError

    from .model import TrainingError

    console = Console()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(console, model, out_dir, ngram)
    except KeyboardInterrupt:
        console.print("\ndemo: interrupted; the server is stopped.", style="yellow")
        return 130
    except (TrainingError, BenchError, OSError) as error:
        text = f"demo: {error}\n{getattr(error, 'log', '')}".rstrip()
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)


def problems() -> list[str]:
    """Return one line for everything that would stop the demo; empty when it can run."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return [f"not installed: {', '.join(missing)}. Run: pip install -e '.[cpu,demo]'"]
    if "OMP_WAIT_POLICY" not in os.environ:
        # With threads that sleep, not spin, while they wait for one another, training is two to four times
        # faster on a busy machine. OpenMP reads this once, when torch is loaded; the server does not inherit it.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        try:
            importlib.import_module("torch")
        finally:
            del os.environ["OMP_WAIT_POLICY"]
    from gpu_align.tools.doctor import misfits

    from ..doctor import plugin

    findings = [finding for finding in (*misfits(), plugin()) if finding.ok is False]
    return [f"{finding.what}: {finding.found}. Run: {finding.fix}" for finding in findings]


def _run(console: Any, model: str | None, out_dir: Path, ngram: bool) -> int:
    from gpu_align.tools.bench.command import measure_servers
    from gpu_align.tools.bench.data import SentPredictions
    from gpu_align.tools.bench.measure import FIELDS, BenchSettings, Result, Session
    from gpu_align.tools.bench.servers import NGRAM_DRAFTS, PLUGIN_DRAFTS, Kind, Served
    from gpu_align.tools.console import print_table, write
    from gpu_align.tools.doctor import has_gpu
    from gpu_align.tools.inputs import Pair
    from gpu_align.tools.simulate.tokenizers import load_tokenizer

    from . import page
    from .model import CALLS_TEMPLATE
    from .page import CALLS, CONTEXT, EDITED, NGRAM, TEXTS, VERBATIM

    def headline(number: int, text: str) -> None:
        console.print(f"{number}/{_STEPS} {text}", style="bold", highlight=False)

    started = time.monotonic()
    out_dir.mkdir(parents=True, exist_ok=True)
    steps_dir = out_dir / "steps"
    shutil.rmtree(steps_dir, ignore_errors=True)
    steps_dir.mkdir()

    headline(1, "Model" if model is None else f"Model: {model}")
    tiny, gpu = model is None, has_gpu()
    path, name = (str(_tiny_model(console)), TINY_NAME) if model is None else (model, model)
    dtype = "float32" if tiny or not gpu else "auto"

    headline(2, f"The same edit request with different predictions, {REPEATS} rounds")
    rows_by_mode = TEXTS | CALLS
    others = tuple(mode for mode, name in rows_by_mode.items() if name == NGRAM)
    ours = tuple(mode for mode in rows_by_mode if mode not in others)
    kinds = {"server": Kind("vLLM with the plugin", PLUGIN_DRAFTS, ours)}
    if ngram:
        kinds["server-ngram"] = Kind("vLLM with its own n-gram drafter", NGRAM_DRAFTS, others)
    offline = {"HF_HUB_OFFLINE": "1"} if tiny else {}
    # Another model has a format of its own.
    tools = (*TOOL_OPTIONS, "--chat-template", CALLS_TEMPLATE) if tiny else ()
    # Both servers run at once; vLLM takes nine tenths of the memory by default.
    shared = ("--gpu-memory-utilization", "0.3") if tiny and gpu else ()
    served = Served(
        path,
        NUM_DRAFT_TOKENS,
        (*SERVER_OPTIONS, *shared, *tools, "--served-model-name", name, "--dtype", dtype),
        together=tiny,  # of another model the memory may hold one
        kinds=kinds,
        env={"GPU_ALIGN_DEBUG_DIR": str(steps_dir.resolve()), **offline},
        logs=out_dir,
        body={"return_token_ids": True},
        timeout_s=TINY_TIMEOUT_S if tiny else TIMEOUT_S,
    )
    modes = tuple(mode for kind in kinds.values() for mode in kind.modes)
    settings = BenchSettings((1,), modes, REPEATS, MAX_TOKENS, requests=1, fresh_prefix=False)
    predictions: dict[str, str] = {EDITED: task.ORIGINAL}

    def predict(pairs: Sequence[Pair], outputs: Sequence[str]) -> SentPredictions:
        predictions[VERBATIM] = outputs[0]
        view = {"type": "content", "content": task.ORIGINAL, "views": ["json"]}
        sent: dict[str, Sequence[str | Mapping[str, Any]]] = {m: [text] for m, text in predictions.items()}
        sent |= {mode: ["", view] for mode, name in CALLS.items() if name == EDITED}
        brought = {"tools": task.TOOLS} if tiny else {}
        asked = {
            mode: {**(FIELDS["context"] if name == CONTEXT else {}), **(brought if mode in CALLS else {})}
            for mode, name in rows_by_mode.items()
        }
        pair_of = {mode: int(mode in CALLS) for mode in modes}
        return SentPredictions(sent, ["before"] * 2, pair_of, asked)

    pairs = [
        Pair(name, "", task.ORIGINAL, prompt=prompt)
        for name, prompt in ((task.FILE_NAME, task.PROMPT), ("tool call", task.CALL_PROMPT))
    ]
    result = Result()
    failure = measure_servers(served, Session(pairs, settings, result, predict))
    if failure is not None:
        raise failure
    rows, calls = (page.rows_of(result, steps_dir, predictions, modes) for modes in (TEXTS, CALLS))

    headline(3, "Result")
    for title, shown in (("The file as text", rows), ("The same edit as a JSON tool call", calls)):
        cells = [*page.narrow_cells(shown)]
        print_table(title, page.NARROW_HEADER, cells, words=page.NARROW_HEADER[:1], folded=())
    console.print("steps: forward passes of the model, the prefill included", highlight=False)

    headline(4, "Page")
    drafts = f"up to {NUM_DRAFT_TOKENS} drafts a pass"
    setup = f"Model {name}, {dtype}, {'GPU' if gpu else 'CPU'}; {drafts}; temperature 0; {REPEATS} rounds."
    written = out_dir / "demo.html"
    write(written, lambda: page.render(rows, calls, load_tokenizer(path), setup, NUM_DRAFT_TOKENS))
    console.print(
        f"   playback, every pass, every token's source: {written}", highlight=False, soft_wrap=True
    )

    found = [*failures(rows, VERBATIM), *failures(calls, EDITED)]
    # Another model promises no speed, and in a shorter float type the batch's shape may flip an argmax.
    failed = bool(found) if tiny else dtype == "float32" and not all(row.identical for row in (*rows, *calls))
    for line in found:
        console.print(f"   {'FAILED' if failed else 'note'}: {line}", style="red", markup=False)
    edited = next(row for row in rows if row.name == EDITED)
    console.print(
        f"Demo {'failed' if failed else 'done'} in {time.monotonic() - started:.0f} s. With the file before the "
        f"edit as the prediction: {rows[0].steps} → {edited.steps} passes of the model, "
        f"{rows[0].seconds:.2f} → {edited.seconds:.2f} s.",
        style="red" if failed else "green",
        highlight=False,
    )
    return int(failed)


def failures(rows: Sequence[Row], best: str) -> list[str]:
    """Return one line for each expectation that is not met; empty when the demo has succeeded. best: a row."""
    none, predicted = (next(row for row in rows if row.name == name) for name in ("none", best))
    differs = "the output differs from the one without a prediction"
    found = [f"{row.name}: {differs}" for row in rows if not row.identical]
    if none.steps < _FEWER_STEPS * predicted.steps:
        expected = f"at least {_FEWER_STEPS:g}× fewer verification steps than {none.steps}"
        found.append(f"{best}: expected {expected}, found {predicted.steps}")
    if predicted.seconds >= none.seconds:
        expected = f"less than {none.seconds:.2f} s, the time without a prediction"
        found.append(f"{best}: expected {expected}, found {predicted.seconds:.2f} s")
    return found


def _tiny_model(console: Any) -> Path:
    from . import model

    spec = model.ModelSpec()
    folder = CACHE_DIR / spec.key()
    if folder.is_dir():  # it appears whole
        console.print(f"   {folder} (made by an earlier run)", highlight=False)
        return folder
    told = "   making a tiny Llama that learns this edit by heart, as text and as a call: some minutes"
    console.print(told, soft_wrap=True)
    with console.status("") as status:
        return model.make_model(spec, CACHE_DIR, status.update)
