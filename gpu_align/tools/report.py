"""What ``gpu-align report`` prints and writes: of one step log, and of a folder of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from .. import __version__, step_log
from ..step_log import SOURCES, Line, Step, StepLog, StepLogError
from ..step_log import read_step_log as read_step_log
from . import html
from .console import print_table, progress_bar, refuse
from .html import Origin

TABLE_HEADER = ("step", "tokens", "source", "proposed", "verified", "accepted", "cursor", "µs", "why")


def origin_of(step: Step) -> Origin:
    """Where the accepted drafts of a step came from."""
    return Origin(SOURCES.index(step.source))


def summary(log: StepLog) -> str:
    """One line: the steps, the drafts, the lengths of prediction and prompt, and whether the request ended."""
    steps = len(log.steps)
    per_step = log.output_tokens / steps if steps else 0.0
    return (
        f"{log.output_tokens} tokens in {steps} steps, {per_step:.1f} a step; "
        f"{log.accepted} drafts accepted, {log.rejected} rejected; "
        f"prediction of {log.prediction_tokens} tokens, prompt of {log.prompt_tokens}"
        + ("" if log.finished else "; not finished: the last whole step is shown last")
    )


def table_rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """One row a step, as `TABLE_HEADER` names them."""
    rows = []
    for step in steps:
        drafted = (step.source, str(len(step.proposed)), str(step.verified), str(step.accepted))
        cursor = "" if step.cursor_before is None else f"{step.cursor_before} → {step.cursor_after}"
        rows.append(
            (
                str(step.step),
                str(len(step.new)),
                *(drafted if step.proposed else ("",) * len(drafted)),
                cursor,
                str(step.duration_us) if step.duration_us else "",
                _why(step),
            )
        )
    return rows


def _why(step: Step) -> str:
    if not step.candidate:
        return ""
    why, expected = step.candidate.get("why", ""), step.candidate.get("expected")
    return f"{why} (expected {expected:.1f})" if isinstance(expected, (int, float)) else str(why)


def page(log: StepLog) -> str:
    """The output in the colours of where its tokens came from, and every step below it."""
    texts: list[str] = []
    origins: list[int] = []
    numbers: list[int] = []
    for index, step in enumerate(log.steps):
        for ids, text, origin in (
            (step.new[: step.accepted], step.accepted_text, origin_of(step)),
            (step.new[step.accepted :], step.own_text, Origin.GENERATED),
        ):
            if ids:
                texts.append(text if text is not None else "".join(f"{token} " for token in ids))
                origins.append(origin)
                numbers.append(index)
    parts = [html.note(summary(log))]
    if texts:
        parts += [html.legend(origins), html.tokens(texts, origins, numbers)]
        parts.append(html.note("Point at a token to see which verification step wrote it."))
    parts.append(html.heading("Steps"))
    parts.append(html.table(TABLE_HEADER, table_rows(log.steps), prose=True))
    rejected = [step for step in log.steps if step.rejected]
    if rejected:
        parts.append(html.heading("Rejected drafts"))
        parts += map(_rejection, rejected)
    if log.prediction_lines:
        parts += [html.heading("Prediction"), _prediction(log.prediction_lines)]
    return html.page(f"Request {log.request_id}", parts)


def _prediction(lines: Sequence[Line]) -> str:
    texts = [" ".join(map(str, line.tokens)) if line.text is None else line.text for line in lines]
    content = html.tokens(texts, [Origin.PREDICTION] * len(texts))
    return html.details(f"{len(lines)} line{'s' if len(lines) > 1 else ''}", "", content)


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


#: Why draft tokens did not save a step, in the words of the report.
NOT_VERIFIED = "proposed, and not verified by the engine"
UNKNOWN = "rejected; the log does not say why they were drafted"

SOURCE_HEADER = ("source", "steps", "drafted", "accepted", "rejected", "accepted of drafted")
LOSS_HEADER = ("lost", "steps", "source", "why they were drafted")
REQUEST_HEADER = (
    "request", "prediction", "tokens", "steps", "tokens/step", "steps lost", "accepted", "rejected", "mostly lost"
)  # fmt: skip


@dataclass
class SourceCount:
    """Draft tokens of one source, and the steps that they were verified in."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def add(self, other: SourceCount) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted


@dataclass(frozen=True)
class Loss:
    """Why draft tokens were lost; numbers in `why` are left out, so that equal reasons are one."""

    source: str
    why: str


@dataclass(frozen=True)
class Request:
    """The counts of one step log.

    Attributes:
        file: its name.
        request_id: the engine's.
        num_draft_tokens: K.
        prediction_tokens: the prediction's length.
        output_tokens: the output's length.
        steps: verification steps.
        undrafted: steps without a draft.
        sources: by the source of the drafts.
        lost_tokens: draft tokens that were lost, by reason.
        lost_in: the steps in which they were, by reason.
    """

    file: str
    request_id: str
    num_draft_tokens: int
    prediction_tokens: int
    output_tokens: int
    steps: int
    undrafted: int
    sources: dict[str, SourceCount]
    lost_tokens: Counter[Loss]
    lost_in: Counter[Loss]

    @classmethod
    def of(cls, log: StepLog, file: str) -> Request:
        """Count a step log."""
        sources: dict[str, SourceCount] = {}
        tokens: Counter[Loss] = Counter()
        steps: Counter[Loss] = Counter()
        for step in log.steps:
            if step.verified:
                count = SourceCount(1, step.verified, step.accepted)
                sources.setdefault(step.source, SourceCount()).add(count)
            for loss, lost in _losses(step):
                tokens[loss] += lost
                steps[loss] += 1
        return cls(
            file=file,
            request_id=log.request_id,
            num_draft_tokens=log.num_draft_tokens,
            prediction_tokens=log.prediction_tokens,
            output_tokens=log.output_tokens,
            steps=len(log.steps),
            undrafted=sum(not step.proposed for step in log.steps),
            sources=sources,
            lost_tokens=tokens,
            lost_in=steps,
        )

    @property
    def accepted(self) -> int:
        return sum(count.accepted for count in self.sources.values())

    @property
    def rejected(self) -> int:
        return sum(count.rejected for count in self.sources.values())

    @property
    def tokens_per_step(self) -> float:
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def steps_lost(self) -> int:
        """Steps beyond the ``1 + ceil((L - 1) / (K + 1))`` of a perfect prediction; the first has no drafts."""
        if not self.output_tokens:
            return 0
        perfect = 1 + -(-(self.output_tokens - 1) // (self.num_draft_tokens + 1))
        return max(self.steps - perfect, 0)

    def as_json(self) -> dict[str, Any]:
        names = (
            "file", "request_id", "prediction_tokens", "output_tokens", "steps", "undrafted", "tokens_per_step",
            "steps_lost", "accepted", "rejected",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def _losses(step: Step) -> Iterator[tuple[Loss, int]]:
    if step.rejected:
        why = str((step.candidate or {}).get("why") or UNKNOWN)
        yield Loss(step.source, _without_numbers(why)), step.rejected
    unverified = len(step.proposed) - step.verified
    if unverified:
        yield Loss(step.source, NOT_VERIFIED), unverified


def _without_numbers(why: str) -> str:
    return re.sub(r"\d+", "N", why)


@dataclass
class Report:
    """All requests of a folder.

    Attributes:
        requests: in the order of their files.
        skipped: files that are no step logs, and why.
    """

    requests: list[Request] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sources(self) -> dict[str, SourceCount]:
        """The sources that drafted, in the order of `SOURCES`."""
        found: dict[str, SourceCount] = {}
        for request in self.requests:
            for source, count in request.sources.items():
                found.setdefault(source, SourceCount()).add(count)
        return {source: found[source] for source in SOURCES if source in found}

    def losses(self, top: int) -> list[tuple[Loss, int, int]]:
        """The reasons that cost most draft tokens: reason, tokens, steps."""
        tokens: Counter[Loss] = Counter()
        steps: Counter[Loss] = Counter()
        for request in self.requests:
            tokens.update(request.lost_tokens)
            steps.update(request.lost_in)
        order = sorted(tokens, key=lambda loss: (-tokens[loss], loss.source, loss.why))
        return [(loss, tokens[loss], steps[loss]) for loss in order[:top]]

    def worst(self, top: int) -> list[Request]:
        """The requests that took most steps beyond those of a perfect prediction."""
        return sorted(self.requests, key=lambda r: (-r.steps_lost, -r.rejected, r.file))[:top]

    def total(self, name: str) -> int:
        """The sum of a count of `Request`."""
        return sum(int(getattr(request, name)) for request in self.requests)


def read_folder(folder: Path, progress: Callable[[str, int], None] = lambda name, done: None) -> Report:
    """Read every ``*.yaml`` in a folder and the folders in it.

    A file that is no step log, or is of a request that has not finished, is skipped.

    Raises:
        OSError: the folder cannot be read.
        MissingExtraError: PyYAML is not installed.
    """
    report = Report()
    for path in log_files(folder):
        name = str(path.relative_to(folder))
        try:
            log = read_step_log(path)
            if log.finished:
                report.requests.append(Request.of(log, name))
            else:
                report.skipped.append((name, "the request has not finished"))
        except (StepLogError, OSError) as error:
            report.skipped.append((name, str(error)))
        progress(name, 1)
    return report


def log_files(folder: Path) -> list[Path]:
    """The files that `read_folder` reads."""
    list(folder.iterdir())  # raises where the folder cannot be read; rglob finds nothing there
    return sorted(path for path in folder.rglob("*.yaml") if path.is_file())


def folder_summary(report: Report) -> str:
    """One line: requests, steps, drafts."""
    tokens, steps = report.total("output_tokens"), report.total("steps")
    per_step = tokens / steps if steps else 0.0
    return (
        f"{len(report.requests):,} requests, {tokens:,} tokens in {steps:,} steps, {per_step:.1f} a step; "
        f"{report.total('accepted'):,} drafts accepted, {report.total('rejected'):,} rejected; "
        f"{report.total('undrafted'):,} steps without a draft; "
        f"{report.total('steps_lost'):,} steps more than with perfect predictions"
    )


def source_rows(report: Report) -> list[tuple[str, ...]]:
    """One row a source, as `SOURCE_HEADER` names them."""
    return [
        (source, f"{c.steps:,}", f"{c.drafted:,}", f"{c.accepted:,}", f"{c.rejected:,}",
         f"{c.accepted / c.drafted:.0%}")
        for source, c in report.sources.items()
    ]  # fmt: skip


def loss_rows(report: Report, top: int) -> list[tuple[str, ...]]:
    """One row a reason, as `LOSS_HEADER` names them."""
    return [
        (f"{tokens:,}", f"{steps:,}", loss.source, loss.why) for loss, tokens, steps in report.losses(top)
    ]


def request_rows(report: Report, top: int) -> list[tuple[str, ...]]:
    """One row a request, the worst first, as `REQUEST_HEADER` names them."""
    rows: list[tuple[str, ...]] = []
    for request in report.worst(top):
        mostly = request.lost_tokens.most_common(1)
        rows.append(
            (request.file, f"{request.prediction_tokens:,}", f"{request.output_tokens:,}", f"{request.steps:,}",
             f"{request.tokens_per_step:.1f}", f"{request.steps_lost:,}", f"{request.accepted:,}",
             f"{request.rejected:,}", f"{mostly[0][0].source}: {mostly[0][0].why}" if mostly else "")
        )  # fmt: skip
    return rows


def to_json(report: Report, top: int) -> dict[str, Any]:
    """``{"requests", …totals, "by_source", "losses", "worst", "skipped"}``: `top` losses and worst requests."""
    totals = ("output_tokens", "steps", "undrafted", "steps_lost", "accepted", "rejected")
    return {
        "requests": len(report.requests),
        **{name: report.total(name) for name in totals},
        "by_source": {
            source: {"steps": c.steps, "drafted": c.drafted, "accepted": c.accepted}
            for source, c in report.sources.items()
        },
        "losses": [
            {"source": loss.source, "why": loss.why, "tokens": tokens, "steps": steps}
            for loss, tokens, steps in report.losses(top)
        ],
        "worst": [request.as_json() for request in report.worst(top)],
        "skipped": [{"file": file, "why": why} for file, why in report.skipped],
    }


def folder_page(report: Report, top: int) -> str:
    """The tables as a page."""
    parts = [html.note(folder_summary(report))]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (
        ("By source", SOURCE_HEADER, source_rows(report)),
        ("Draft tokens that were lost", LOSS_HEADER, loss_rows(report, top)),
        (
            "Requests with the most steps beyond a perfect prediction",
            REQUEST_HEADER,
            request_rows(report, top),
        ),
    )
    for title, header, rows in tables:
        if rows:
            parts += [html.heading(title), html.table(header, rows, prose=True)]
    return html.page("Step logs", parts)


def show_file(log: Path, tokenizer: str | None, html_out: Path | None, json_out: Path | None) -> None:
    """The steps of one request."""
    try:
        found = step_log.read_step_log(log)
    except OSError as error:
        refuse(f"{log}: {error.strerror or error}")
    except step_log.StepLogError as error:
        refuse(f"{log}: {error}")
    if tokenizer is not None:
        from . import simulate

        try:
            texts = simulate.load_tokenizer(tokenizer)
            found = found.with_texts(lambda ids: "".join(simulate.token_texts(texts, ids)))
        except (OSError, ValueError) as error:
            refuse(f"--tokenizer: {error}")
    title = f"request {escape(found.request_id)}"
    rows = table_rows(found.steps)
    console = print_table(title, TABLE_HEADER, rows, words=["source", "why"], folded="why")
    console.print(summary(found), soft_wrap=True, highlight=False)
    figures = {"request_id": found.request_id, **found.usage()}
    _write(figures, {"log": str(log), "tokenizer": tokenizer}, json_out)
    _write_page(page(found), html_out)


def show_folder(folder: Path, top: int, html_out: Path | None, json_out: Path | None) -> None:
    """All requests of a folder: sums, sources, reasons, the worst requests."""
    try:
        files = log_files(folder)
        with progress_bar("reading", len(files)) as advance:
            found = read_folder(folder, advance)
    except OSError as error:
        refuse(f"{folder}: {error.strerror or error}")
    for name, why in found.skipped[:3]:
        typer.echo(f"note: {name}: {why}", err=True)
    if len(found.skipped) > 3:
        typer.echo(f"note: {len(found.skipped) - 3} more files are no step logs", err=True)
    if not found.requests:
        refuse(f"{folder}: expected step logs (*.yaml), found none")
    print_table("by source", SOURCE_HEADER, source_rows(found), words=["source"], folded="source")
    if losses := loss_rows(found, top):
        title = "draft tokens that were lost"
        print_table(title, LOSS_HEADER, losses, words=["source", LOSS_HEADER[-1]],
                    folded=LOSS_HEADER[-1])  # fmt: skip
    if worst := request_rows(found, top):
        title = "requests with the most steps beyond a perfect prediction"
        words = ["request", REQUEST_HEADER[-1]]
        print_table(title, REQUEST_HEADER, worst, words=words, folded=words)
    typer.echo(folder_summary(found))
    _write(to_json(found, top), {"log": str(folder), "tokenizer": None}, json_out)
    _write_page(folder_page(found, top), html_out)


def _write(figures: dict[str, Any], about: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        report = {"version": __version__, **about, **figures}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {out}")


def _write_page(page: str, out: Path | None) -> None:
    if out is not None:
        out.write_text(page, encoding="utf-8")
        typer.echo(f"wrote {out}")
