"""``gpu-align bench``: options, progress, and what is written at the end, however it comes."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ... import __version__
from .. import console
from ..console import counted, option, refuse, refusing

if TYPE_CHECKING:
    from ..inputs import Pair
    from .data import Choice
    from .measure import Result, Session
    from .servers import Attached, Served

_INTERRUPTED = 130
_MAX_CONCURRENCY = 4096


def bench_command(
    dataset: Annotated[
        Path | None,
        typer.Argument(
            metavar="PAIRS.jsonl", help="edits: id, instruction, before, after; else a shipped set"
        ),
    ] = None,
    base_url: Annotated[str | None, option("URL", "a server with the plugin; ends in /v1")] = None,
    serve: Annotated[
        str | None, option("MODEL", "instead: start vLLM without drafts, with n-gram, with the plugin")
    ] = None,
    model: Annotated[str | None, option("NAME", "needed where the server has several")] = None,
    git: console.Git = None,
    repo: console.Repo = None,
    limit: Annotated[int | None, console.limit_option(16)] = None,
    before: console.Before = None,
    after: console.After = None,
    instruction: Annotated[str | None, option("TEXT", "what to do with --before")] = None,
    concurrency: Annotated[
        str | None, option("N,N", "requests in flight", show_default="of 1,8,32 what ends in 10 minutes")
    ] = None,
    modes: Annotated[
        str | None,
        option(
            "M,M",
            "of none, prediction, unrelated, context, conversation, plain, ngram",
            show_default="none, prediction, unrelated; with a second server ngram",
        ),
    ] = None,
    compare_url: Annotated[
        str | None, option("URL", "a server without the plugin, for the modes ngram and plain")
    ] = None,
    rounds: Annotated[int, option("N", "how often each combination is measured", min=1)] = 3,
    requests: Annotated[
        int | None, option("N", "a round", show_default="each edit once, two a stream at least", min=1)
    ] = None,
    max_tokens: Annotated[int, option("N", "of an answer", min=1)] = 1024,
    prediction: Annotated[
        str, option("auto|before|output", "the text before the edit, or the first output with edits")
    ] = "auto",
    num_draft_tokens: Annotated[
        int, option("K", "with --serve: a step", "--num-draft-tokens", "-k", min=1, max=128)
    ] = 32,
    vllm_args: Annotated[str, option("ARGS", "with --serve: more options of vLLM's server")] = "",
    together: Annotated[
        bool,
        typer.Option("--together", help="with --serve: all servers at once, interleaved; needs the memory"),
    ] = False,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="let vLLM's prefix cache spare repeated prompts")
    ] = False,
    timeout: Annotated[float, option("SECONDS", "longest wait for a piece of an answer", min=1)] = 600.0,
    api_key: Annotated[str | None, option("KEY", "of the servers", envvar="OPENAI_API_KEY")] = None,
    json_out: console.JsonOut = None,
    html_out: console.HtmlOut = None,
) -> None:
    """Measure what predictions save on a server: tokens a second, latencies, steps, identical answers."""
    from .client import BenchError
    from .measure import BenchSettings, Result, Session
    from .servers import Attached, Served

    console.check_outputs(
        {"--json": json_out, "--html": html_out}, [p for p in (dataset, before, after) if p is not None]
    )
    of_served = {"--vllm-args": vllm_args or None, "--together": together or None}
    of_attached = {"--compare-url": compare_url, "--model": model}
    console.refuse_others(
        {"--base-url": base_url, "--serve": serve},
        {name: (value, "--serve") for name, value in of_served.items()}
        | {name: (value, "--base-url") for name, value in of_attached.items()},
    )
    if prediction not in ("auto", "before", "output"):
        refuse(f"--prediction: expected auto, before or output, found {prediction!r}")
    where: Attached | Served
    if base_url is not None:
        compared = None if compare_url is None else console.server_url("--compare-url", compare_url)
        where = Attached(console.server_url("--base-url", base_url), compared, model, api_key)
    elif serve is None:
        refuse("expected --base-url URL or --serve MODEL, found neither")
    elif not serve.strip():
        refuse(f"--serve: expected a model's name or folder, found {serve!r}")
    else:
        try:
            where = Served(serve, num_draft_tokens, tuple(shlex.split(vllm_args)), together)
        except ValueError as error:
            refuse(f"--vllm-args: {error}, found {vllm_args!r}")
    settings = BenchSettings(
        concurrency=_numbers("1,8,32" if concurrency is None else concurrency),
        modes=_modes(modes, serve is not None, compare_url),
        rounds=rounds,
        requests=requests or 0,
        max_tokens=max_tokens,
        prediction=cast("Choice", prediction),
        timeout_s=timeout,
        fresh_prefix=not prefix_cache,
    )
    with refusing():
        source, edits = _edits(dataset, git, repo, limit, before, after, instruction)
    result = Result()
    result.about = {
        "version": __version__,
        "model": model,
        "tokenizer": None,
        "settings": asdict(settings),
        "data": {"source": source, "pairs": len(edits)},
    }
    if isinstance(where, Served):
        named = ("num_draft_tokens", "arguments", "together")
        result.about["serve"] = {name: getattr(where, name) for name in named}
    session = Session(edits, settings, result, tell=partial(typer.echo, err=True), fit=concurrency is None)
    try:
        failure = measure_servers(where, session)
    except BenchError as error:
        refuse(str(error))
    _finish(result, json_out, html_out, failure)


def _numbers(concurrency: str) -> tuple[int, ...]:
    words = [word.strip() for word in concurrency.split(",")]
    numbers = [int(word) if word.isascii() and word.isdigit() and len(word) < 9 else 0 for word in words]
    if not all(1 <= number <= _MAX_CONCURRENCY for number in numbers):
        expected = f"numbers from 1 to {_MAX_CONCURRENCY} as in 1,8,32"
        refuse(f"--concurrency: expected {expected}, found {concurrency!r}")
    return tuple(dict.fromkeys(numbers))


def _modes(given: str | None, served: bool, compare_url: str | None) -> tuple[str, ...]:
    """Those that are named, in the order of tables, or all that can run."""
    from .measure import ASKED_FOR, MODES

    can_compare = served or compare_url is not None
    names = [mode for mode in MODES if mode not in ASKED_FOR and (mode != "ngram" or can_compare)]
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        if not names or set(names) - set(MODES):
            found = next((name for name in names if name not in MODES), given)
            refuse(f"--modes: expected some of {','.join(MODES)}, found {found!r}")
    others = [mode for mode in names if mode in ("plain", "ngram")]
    if others and not can_compare:
        refuse(f"--modes: {others[0]} needs --compare-url, a server without the plugin, or --serve")
    if compare_url is not None and not others:
        refuse(f"--compare-url: {compare_url} is for the modes ngram and plain, found --modes {given}")
    return tuple(mode for mode in MODES if mode in names)


def _edits(
    dataset: Path | None,
    git: str | None,
    repo: Path | None,
    limit: int | None,
    before: Path | None,
    after: Path | None,
    instruction: str | None,
) -> tuple[str, list[Pair]]:
    """The source of the edits in words, and the edits."""
    from . import data

    console.refuse_others(
        {"a file PAIRS": dataset, "--git": git, "--before": before},
        {"--after": (after, "--before"), "--instruction": (instruction, "--before")}
        | {"--repo": (repo, "--git"), "--limit": (limit, "--git")},
    )
    if dataset is not None:
        return dataset.name, data.read_pairs(dataset)
    if git is not None:
        return f"git {git}", data.pairs_from_git(repo or Path(), git, limit or 16)
    if before is not None:
        return before.name, [data.pair_of_files(before, after, instruction)]
    return data.SHIPPED, data.shipped_pairs()


def measure_servers(where: Attached | Served, session: Session) -> BaseException | None:
    """Run a session, with a progress bar on stderr; SIGINT, SIGTERM and SIGHUP stop what was started.

    Returns what ended it: None, a BenchError, or a KeyboardInterrupt. WrongOptionError: nothing was measured.
    """
    from .client import BenchError, WrongOptionError

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if task is not None:
                with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                    loop.add_signal_handler(number, task.cancel)
        await where.measure(session)

    with console.progress_bar("measuring", None) as session.advance:
        try:
            asyncio.run(run())
        except WrongOptionError:
            raise
        except BenchError as error:
            return error
        except (KeyboardInterrupt, asyncio.CancelledError):
            return KeyboardInterrupt()
    session.result.complete = True
    return None


def _finish(
    result: Result, json_out: Path | None, html_out: Path | None, failure: BaseException | None
) -> None:
    """Write what there is, print it, and leave with the exit code of what happened."""
    from . import page

    with refusing():
        console.write(json_out, result.as_json)
        console.write(html_out, lambda: page.render(result.as_json()))
    if runs := result.runs():
        title = f"{result.about.get('model')}, {result.about['data']['source']}"
        words = ("mode", "identical")
        console.print_table(title, page.SPEED, page.rows(runs, page.SPEED), words=words, folded="speed-up")
        shown_by = console.print_table(
            "", page.STEPS, page.rows(runs, page.STEPS), words=words, folded="identical"
        )
        for sentence in (page.LEGEND, *page.verdict(runs, result.about), *result.notes):
            shown_by.print(sentence, soft_wrap=True, highlight=False, markup=False)
    if isinstance(failure, KeyboardInterrupt):
        finished = counted(len(result.samples), "turn")
        typer.echo(f"interrupted: {finished} of the plan finished, no process is left", err=True)
        raise typer.Exit(_INTERRUPTED)
    if failure is not None:
        typer.echo(f"error: {failure}", err=True)
        if log := getattr(failure, "log", ""):
            typer.echo(log, err=True)
        raise typer.Exit(1)
