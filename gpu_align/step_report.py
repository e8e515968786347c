"""Step logs of the vLLM plugin: read them, and show them as a table or as a coloured page.

The format is the plugin's (``vllm_integration/README.md``); nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_align import html
from gpu_align.errors import MissingExtraError

FORMAT = "gpu-align-steps/1"
SOURCES = ("none", "prediction", "context", "recipe")
TABLE_HEADER = ("step", "tokens", "source", "proposed", "verified", "accepted", "cursor", "µs", "why")

_COUNTS = ("step", "position", "duration_us", "verified", "accepted")

Decode = Callable[[list[int]], str]


class StepLogError(ValueError):
    """A file is not a whole step log; the message names the place and what was expected there."""


@dataclass(frozen=True)
class Step:
    """One verification step; the fields are those of the file. Texts are None where the file has none."""

    step: int
    position: int
    source: str
    proposed: list[int]
    confidence: list[float]
    duration_us: int
    verified: int
    accepted: int
    new: list[int]
    cursor_before: int | None = None
    cursor_after: int | None = None
    candidate: dict[str, Any] | None = None
    others: int = 0
    proposed_text: str | None = None
    accepted_text: str | None = None
    own_text: str | None = None

    @property
    def rejected(self) -> int:
        return self.verified - self.accepted


@dataclass(frozen=True)
class StepLog:
    """One request."""

    request_id: str
    num_draft_tokens: int
    prompt_tokens: int
    prediction_tokens: int
    steps: list[Step]

    @property
    def output_tokens(self) -> int:
        return sum(len(step.new) for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def rejected(self) -> int:
        return sum(step.rejected for step in self.steps)


def read_step_log(path: Path) -> StepLog:
    """Read a file that the plugin wrote.

    Raises:
        OSError: it cannot be read.
        StepLogError: it is no YAML, another YAML, or not whole.
        MissingExtraError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("gpu-align report", "PyYAML", "vllm") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except UnicodeDecodeError as error:
        raise StepLogError(f"expected UTF-8 text, found another byte at {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise StepLogError(
            f"{place}expected YAML: {getattr(error, 'problem', None) or 'torn file'}"
        ) from None
    except RecursionError:
        raise StepLogError("expected a step log, found YAML nested too deeply") from None
    return _log(document)


def _log(document: Any) -> StepLog:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise StepLogError(f"format: expected {FORMAT!r}, found {str(found)[:40]!r}")
    rows = _field("", document, "steps", list)
    return StepLog(
        _field("", document, "request_id", str),
        _field("", document, "num_draft_tokens", int),
        _field("", document, "prompt_tokens", int),
        _field("", document, "prediction_tokens", int),
        [_step(f"steps[{index}]", row) for index, row in enumerate(rows)],
    )


def _field(where: str, row: Any, name: str, kind: type[Any]) -> Any:
    place = f"{where}.{name}" if where else name
    if not isinstance(row, dict):
        raise StepLogError(f"{where}: expected a mapping, found {type(row).__name__}")
    if name not in row:
        raise StepLogError(f"{place}: expected, but missing; is the file whole?")
    value = row[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise StepLogError(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
    if isinstance(value, int) and value < 0:
        raise StepLogError(f"{place}: expected 0 or more, found {value}")
    return value


def _step(where: str, row: Any) -> Step:
    counts = {name: _field(where, row, name, int) for name in _COUNTS}
    lists = {name: _field(where, row, name, list) for name in ("proposed", "confidence", "new")}
    for name in ("proposed", "new"):
        for index, token in enumerate(lists[name]):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise StepLogError(f"{where}.{name}[{index}]: expected a token id, found {str(token)[:20]!r}")
    for index, number in enumerate(lists["confidence"]):
        if not isinstance(number, (int, float)):
            raise StepLogError(f"{where}.confidence[{index}]: expected a number, found {str(number)[:20]!r}")
    source = _field(where, row, "source", str)
    if source not in SOURCES:
        raise StepLogError(f"{where}.source: expected one of {', '.join(SOURCES)}, found {source[:20]!r}")
    if not counts["accepted"] <= counts["verified"] <= len(lists["proposed"]):
        raise StepLogError(
            f"{where}: expected accepted <= verified <= proposed tokens, found "
            f"{counts['accepted']}, {counts['verified']}, {len(lists['proposed'])}"
        )
    if counts["accepted"] > len(lists["new"]):
        raise StepLogError(
            f"{where}.new: expected at least the {counts['accepted']} accepted tokens, "
            f"found {len(lists['new'])}"
        )
    optional = {"cursor_before": int, "cursor_after": int, "others": int, "candidate": dict}
    optional |= dict.fromkeys(("proposed_text", "accepted_text", "own_text"), str)
    more = {
        name: _field(where, row, name, kind) for name, kind in optional.items() if row.get(name) is not None
    }
    return Step(**counts, **lists, source=source, **more)


def with_texts(log: StepLog, decode: Decode) -> StepLog:
    """`log` with the texts of its tokens, for files that have none."""
    output: list[int] = []
    steps = []
    for step in log.steps:
        before = output[-8:]
        output += step.new
        accepted = step.new[: step.accepted]
        texts = {
            "proposed_text": _text_after(decode, before, step.proposed),
            "accepted_text": _text_after(decode, before, accepted),
            "own_text": _text_after(decode, before + accepted, step.new[step.accepted :]),
        }
        steps.append(Step(**{**vars(step), **texts}))
    return StepLog(**{**vars(log), "steps": steps})


def _text_after(decode: Decode, before: list[int], tokens: list[int]) -> str:
    torn = "\ufffd"  # a character of which a later token has the rest
    known, whole = decode(before).rstrip(torn), decode(before + tokens).rstrip(torn)
    return whole[len(known) :]


def summary(log: StepLog) -> str:
    """One line: what the prediction was worth."""
    steps = len(log.steps)
    per_step = log.output_tokens / steps if steps else 0.0
    return (
        f"{log.output_tokens} tokens in {steps} steps, {per_step:.1f} a step; "
        f"{log.accepted} drafts accepted, {log.rejected} rejected; "
        f"prediction of {log.prediction_tokens} tokens, prompt of {log.prompt_tokens}"
    )


def table_rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """One row a step, as `TABLE_HEADER` names them."""
    return [
        (
            str(step.step),
            str(len(step.new)),
            step.source if step.proposed else "",
            str(len(step.proposed)) if step.proposed else "",
            str(step.verified) if step.proposed else "",
            str(step.accepted) if step.proposed else "",
            "" if step.cursor_before is None else f"{step.cursor_before} → {step.cursor_after}",
            str(step.duration_us) if step.duration_us else "",
            _why(step),
        )
        for step in steps
    ]


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
        accepted, own = step.new[: step.accepted], step.new[step.accepted :]
        origin = html.Origin(SOURCES.index(step.source)) if accepted else html.Origin.GENERATED
        for ids, text, where in (
            (accepted, step.accepted_text, origin),
            (own, step.own_text, html.Origin.GENERATED),
        ):
            if ids:
                texts.append(text if text is not None else "".join(f"{token} " for token in ids))
                origins.append(int(where))
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
        parts += [_rejection(step) for step in rejected]
    return html.page(f"Request {log.request_id}", parts)


def _rejection(step: Step) -> str:
    shown = step.proposed_text
    if shown is None:
        shown = " ".join(map(str, step.proposed))
    wrote = (step.accepted_text or "") + (step.own_text or "")
    if step.own_text is None:
        wrote = " ".join(map(str, step.new))
    origin = SOURCES.index(step.source)
    content = (
        html.note("proposed")
        + html.tokens([shown], [origin])
        + html.note("the model wrote")
        + html.tokens([wrote], [int(html.Origin.GENERATED)])
    )
    return html.details(f"Step {step.step}: {step.accepted} of {step.verified} accepted", _why(step), content)
