"""What `gpu-align report` shows of a step log: a summary, a table and a coloured page."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_align import html
from gpu_align.html import Origin
from gpu_align.step_log import SOURCES, Line, Step, StepLog
from gpu_align.step_log import read_step_log as read_step_log

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
