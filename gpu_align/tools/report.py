"""``gpu-align report``: tables and pages of one step log, and of a folder of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .. import __version__
from ..drafter.step_log import SOURCES, Step, StepLog, StepLogError, read_step_log
from . import console, html
from .console import option, refuse, refusing
from .html import Origin

TABLE_HEADER = ("step", "tokens", "source", "proposed", "verified", "accepted", "cursor", "µs", "why")
#: Why draft tokens did not save a step, in the words of the report.
NOT_VERIFIED = "proposed, and not verified by the engine"
UNKNOWN = "rejected; the log does not say why they were drafted"

Sums = defaultdict[Any, Counter[str]]
#: Title, header, rows, and the columns that a narrow terminal narrows.
Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]], list[str]]


def origin_of(step: Step) -> Origin:
    return Origin(SOURCES.index(step.source))


def summary(log: StepLog) -> str:
    steps = len(log.steps)
    return (
        f"{log.output_tokens} tokens in {steps} steps, {_per_step(log.output_tokens, steps):.1f} a step; "
        f"{log.accepted} drafts accepted, {log.rejected} rejected; "
        f"prediction of {log.prediction_tokens} tokens, prompt of {log.prompt_tokens}"
    )


def _per_step(tokens: int, steps: int) -> float:
    return tokens / steps if steps else 0.0


def table_rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """One row a step, as `TABLE_HEADER` names them."""
    rows = []
    for step in steps:
        drafted = (step.source, str(len(step.proposed)), str(step.verified), str(step.accepted))
        shown = drafted if step.proposed else ("",) * len(drafted)
        cursor = "" if step.cursor_before is None else f"{step.cursor_before} → {step.cursor_after}"
        took = str(step.duration_us or "")
        rows.append((str(step.step), str(len(step.new)), *shown, cursor, took, _why(step)))
    return rows


def _why(step: Step) -> str:
    if not step.candidate:
        return ""
    why, expected = step.candidate.get("why", ""), step.candidate.get("expected")
    return f"{why} (expected {expected:.1f})" if isinstance(expected, (int, float)) else str(why)


def page(log: StepLog) -> str:
    """The output in the colours of where its tokens came from, and every step below it."""
    spans: list[tuple[str, Origin, int]] = []
    for index, step in enumerate(log.steps):
        for ids, text, origin in (
            (step.new[: step.accepted], step.accepted_text, origin_of(step)),
            (step.new[step.accepted :], step.own_text, Origin.GENERATED),
        ):
            if ids:
                spans.append(("".join(f"{i} " for i in ids) if text is None else text, origin, index))
    parts = [html.note(summary(log))]
    if spans:
        texts, origins, numbers = zip(*spans, strict=True)
        parts += [html.legend(origins), html.tokens(texts, origins, numbers)]
        parts.append(html.note("Point at a token to see which verification step wrote it."))
    parts += [html.heading("Steps"), html.table(TABLE_HEADER, table_rows(log.steps), prose=True)]
    if rejected := [step for step in log.steps if step.rejected]:
        parts += [html.heading("Rejected drafts"), *map(_rejection, rejected)]
    if lines := log.prediction_lines:
        shown = [" ".join(map(str, line.tokens)) if line.text is None else line.text for line in lines]
        content = html.tokens(shown, [Origin.PREDICTION] * len(shown))
        title = f"{len(shown)} line{'s' if len(shown) > 1 else ''}"
        parts += [html.heading("Prediction"), html.details(title, "", content)]
    return html.page(f"Request {log.request_id}", parts)


def _rejection(step: Step) -> str:
    shown, wrote = step.proposed_text, (step.accepted_text or "") + (step.own_text or "")
    if shown is None:
        shown = " ".join(map(str, step.proposed))
    if step.own_text is None:
        wrote = " ".join(map(str, step.new))
    content = (
        html.note("proposed")
        + html.tokens([shown], [origin_of(step)])
        + html.note("the model wrote")
        + html.tokens([wrote], [Origin.GENERATED])
    )
    return html.details(f"Step {step.step}: {step.accepted} of {step.verified} accepted", _why(step), content)


@dataclass(frozen=True)
class LogCounts:
    """The counts of one step log: the fields of its JSON, then what they are sums of."""

    file: str
    request_id: str
    prediction_tokens: int
    output_tokens: int
    steps: int
    undrafted: int  #: steps without a draft
    tokens_per_step: float
    steps_lost: int  #: beyond a perfect prediction, ``1 + ceil((L - 1) / (K + 1))``: the first has no drafts
    accepted: int
    rejected: int
    #: source → ``steps`` with drafts of it, ``drafted`` tokens that were verified, and ``accepted``.
    sources: Sums = field(default_factory=lambda: defaultdict(Counter))
    #: (source, reason, its numbers left out) → draft ``tokens`` lost, and ``steps`` in which they were.
    losses: Sums = field(default_factory=lambda: defaultdict(Counter))

    @classmethod
    def of(cls, log: StepLog, file: str) -> LogCounts:
        tokens, steps = log.output_tokens, len(log.steps)
        perfect = 1 + -(-(tokens - 1) // (log.num_draft_tokens + 1))
        about = file, log.request_id, log.prediction_tokens, tokens, steps
        counts = cls(
            *about,
            undrafted=sum(not step.proposed for step in log.steps),
            tokens_per_step=_per_step(tokens, steps),
            steps_lost=max(steps - perfect, 0) if tokens else 0,
            accepted=log.accepted,
            rejected=log.rejected,
        )
        for step in log.steps:
            why = re.sub(r"\d+", "N", str((step.candidate or {}).get("why") or UNKNOWN))
            if step.verified:
                counts.sources[step.source].update(steps=1, drafted=step.verified, accepted=step.accepted)
            for reason, lost in ((why, step.rejected), (NOT_VERIFIED, len(step.proposed) - step.verified)):
                if lost:
                    counts.losses[step.source, reason].update(tokens=lost, steps=1)
        return counts


def read_folder(folder: Path) -> tuple[list[LogCounts], list[tuple[str, str]]]:
    """Count every ``*.yaml`` in a folder and the folders in it; files that are no step logs, and why. OSError: the
    folder cannot be read. MissingExtraError: PyYAML is not installed."""
    list(folder.iterdir())  # raises where the folder cannot be read; rglob finds nothing there
    paths = sorted(path for path in folder.rglob("*.yaml") if path.is_file())
    requests, skipped = [], []
    with console.progress_bar("reading", len(paths)) as advance:
        for path in paths:
            name = str(path.relative_to(folder))
            try:
                requests.append(LogCounts.of(read_step_log(path), name))
            except (StepLogError, OSError) as error:
                skipped.append((name, str(error)))
            advance(name, 1)
    return requests, skipped


def worst(requests: Sequence[LogCounts], top: int) -> list[LogCounts]:
    """The requests that took most steps beyond those of a perfect prediction."""
    return sorted(requests, key=lambda r: (-r.steps_lost, -r.rejected, r.file))[:top]


def figures_of(requests: Sequence[LogCounts], top: int) -> dict[str, Any]:
    """``{"requests", …totals, "by_source", "losses", "worst"}``; `top` losses and requests."""
    names = ("output_tokens", "steps", "undrafted", "steps_lost", "accepted", "rejected")
    sources: Sums = defaultdict(Counter)
    losses: Sums = defaultdict(Counter)
    for request in requests:
        for sums, parts in ((sources, request.sources), (losses, request.losses)):
            for key, numbers in parts.items():
                sums[key].update(numbers)
    most = sorted(losses.items(), key=lambda item: (-item[1]["tokens"], item[0]))[:top]
    return {
        "requests": len(requests),
        **{name: sum(getattr(request, name) for request in requests) for name in names},
        "by_source": {source: dict(sources[source]) for source in SOURCES if source in sources},
        "losses": [{"source": source, "why": why, **numbers} for (source, why), numbers in most],
        "worst": [
            {name: value for name, value in vars(request).items() if name not in ("sources", "losses")}
            for request in worst(requests, top)
        ],
    }


def folder_tables(found: Mapping[str, Any], requests: Sequence[LogCounts]) -> Iterator[Table]:
    """The tables of what `figures_of` returns. requests: the worst."""
    rows = [
        (source, *map(html.or_dash, (n["steps"], n["drafted"], n["accepted"], n["drafted"] - n["accepted"])),
         f"{n['accepted'] / n['drafted']:.0%}")
        for source, n in found["by_source"].items()
    ]  # fmt: skip
    header: tuple[str, ...] = ("source", "steps", "drafted", "accepted", "rejected", "accepted of drafted")
    yield "by source", header, rows, ["source"]
    rows = [(f"{n['tokens']:,}", f"{n['steps']:,}", n["source"], n["why"]) for n in found["losses"]]
    header = ("lost", "steps", "source", "why they were drafted")
    yield "draft tokens that were lost", header, rows, [header[-1]]
    rows = []
    for r in requests:
        mostly = max(r.losses, key=lambda reason: r.losses[reason]["tokens"], default=())
        written = map(html.or_dash, (r.prediction_tokens, r.output_tokens, r.steps))
        lost = map(html.or_dash, (r.steps_lost, r.accepted, r.rejected))
        rows.append((r.file, *written, f"{r.tokens_per_step:.1f}", *lost, ": ".join(mostly)))
    header = ("request", "prediction", "tokens", "steps", "tokens/step", "steps lost", "accepted", "rejected",
              "mostly lost")  # fmt: skip
    title = "requests with the most steps beyond a perfect prediction"
    yield title, header, rows, [header[-1]]


def folder_summary(found: dict[str, Any]) -> str:
    return (
        f"{found['requests']:,} requests, {found['output_tokens']:,} tokens in {found['steps']:,} steps, "
        f"{_per_step(found['output_tokens'], found['steps']):.1f} a step; "
        f"{found['accepted']:,} drafts accepted, {found['rejected']:,} rejected; "
        f"{found['undrafted']:,} steps without a draft; "
        f"{found['steps_lost']:,} steps more than with perfect predictions"
    )


def report_command(
    log: Annotated[
        Path, typer.Argument(metavar="FILE.yaml|DIR", help="a file of GPU_ALIGN_DEBUG_DIR, or the folder")
    ],
    html_out: console.HtmlOut = None,
    json_out: console.JsonOut = None,
    tokenizer: Annotated[str | None, console.tokenizer_option("for a file without texts")] = None,
    trust_remote_code: console.TrustRemoteCode = False,
    top: Annotated[int | None, option("N", "of a folder, so many requests and reasons (10)", min=0)] = None,
) -> None:
    """Show what was drafted, why, and what the model made of it: of one request, or of a folder of requests.

    Of a folder: the worst requests, why draft tokens were lost, and the worth of each source.
    """
    console.check_outputs({"--html": html_out, "--json": json_out}, [log])
    is_folder = log.is_dir()
    if is_folder and tokenizer is not None:
        refuse("--tokenizer: expected with a file only, found a folder")
    if not is_folder and top is not None:
        refuse(f"--top: expected with a folder only, found the file {log}")
    with refusing(log, f"{log}: "):
        found = read_folder(log) if is_folder else read_step_log(log)
    if isinstance(found, StepLog):
        figures, shown = _show_request(found, tokenizer)
    else:
        requests, skipped = found
        for name, why in skipped[:3]:
            typer.echo(f"note: {name}: {why}", err=True)
        if len(skipped) > 3:
            typer.echo(f"note: {len(skipped) - 3} more files are no step logs", err=True)
        if not requests:
            refuse(f"{log}: expected step logs (*.yaml), found none")
        figures, shown = _show_folder(requests, 10 if top is None else top)
        figures["skipped"] = [{"file": file, "why": why} for file, why in skipped]
    figures = {"version": __version__, "log": str(log), "tokenizer": tokenizer, **figures}
    console.write(json_out, lambda: figures)
    console.write(html_out, lambda: shown)


def _show_request(found: StepLog, tokenizer: str | None) -> tuple[dict[str, Any], str]:
    """Figures and page."""
    if tokenizer is not None:
        from .simulate.tokenizers import load_tokenizer, token_texts

        with refusing(named="--tokenizer: "):
            texts = load_tokenizer(tokenizer)
            found = found.with_texts(lambda ids: "".join(token_texts(texts, ids)))
    title, rows = f"request {escape(found.request_id)}", table_rows(found.steps)
    shown_by = console.print_table(title, TABLE_HEADER, rows, words=["source", "why"], folded="why")
    shown_by.print(summary(found), soft_wrap=True, highlight=False)
    return {"request_id": found.request_id, **found.usage()}, page(found)


def _show_folder(requests: Sequence[LogCounts], top: int) -> tuple[dict[str, Any], str]:
    """All requests of a folder: sums, sources, reasons, the worst requests."""
    found = figures_of(requests, top)
    parts = [html.note(folder_summary(found))]
    for title, header, rows, folded in folder_tables(found, worst(requests, top)):
        shown, names = rows, []
        if header[0] == "request":  # names that a terminal would wrap are told below
            shown = [(str(number), *row[1:]) for number, row in enumerate(rows, start=1)]
            names = [f"{number}: {row[0]}" for number, row in enumerate(rows, start=1)]
        if rows or title == "by source":
            console.print_table(title, header, shown, words=["source", *folded], folded=folded)
        for name in names:
            typer.echo(name)
        if rows:
            parts += [html.heading(title[0].upper() + title[1:]), html.table(header, rows, prose=True)]
    typer.echo(folder_summary(found))
    return found, html.page("Step logs", parts)
