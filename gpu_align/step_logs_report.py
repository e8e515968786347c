"""What `gpu-align report` shows of a folder of step logs: by source, by reason, and the worst requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_align import html
from gpu_align.step_log import SOURCES, Step, StepLog, StepLogError, read_step_log

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


def summary(report: Report) -> str:
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


def page(report: Report, top: int) -> str:
    """The tables as a page."""
    parts = [html.note(summary(report))]
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
