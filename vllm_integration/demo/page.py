"""Measurements of `bench` with the engine's step logs, as rows; their table, and a page that plays them."""

from __future__ import annotations

import difflib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from gpu_align.drafter.step_log import SOURCES, Step, StepLog, read_step_log
from gpu_align.tools import html
from gpu_align.tools.bench.client import Answer, BenchError, Counts
from gpu_align.tools.bench.measure import Result
from gpu_align.tools.html import Origin
from gpu_align.tools.simulate.tokenizers import TextTokenizer, token_texts

from . import task

#: The rows. All but `NGRAM` are answered by the server with the plugin; `VERBATIM` and `EDITED` have a prediction.
NONE, CONTEXT, NGRAM, VERBATIM, EDITED = ROWS = ("none", "context", "n-gram", "verbatim", "edited")
#: Modes of `bench` and their rows: of the file as text, and of the same edit as a tool call.
TEXTS = {name: name for name in ROWS}
CALLS = {f"call, {name}": name for name in (NONE, CONTEXT, NGRAM, EDITED)}
#: Rows that step logs are written of; in the page the case that a client has comes first.
_LOGGED = (EDITED, VERBATIM, CONTEXT)
HEADER = (
    "prediction", "verification steps", "fewer", "wall time", "speed-up", "accepted", "rejected",
    "output identical",
)  # fmt: skip
_ASSETS = Path(__file__).parent / "assets"

#: What a row is called where there is little room, and where there is more.
_LABELS = {
    NONE: ("no prediction", "Without a prediction"),
    NGRAM: ("vLLM's n-gram", "vLLM's n-gram drafter"),
    VERBATIM: ("verbatim", "Prediction: the exact answer"),
    EDITED: ("edited", "Prediction: the file before the edit"),
    CONTEXT: ("own context", "No prediction: own context only"),
}


@dataclass
class Row:
    """One kind of prediction, measured in several rounds: the first, but for `wall_s` and `identical`."""

    name: str
    answer: Answer
    wall_s: list[float]  #: seconds of each request, measured at the client
    steps: int  #: forward passes that produced tokens; the first is the prefill
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)  #: accepted and rejected drafts
    identical: bool = True  #: no output, of any round, differs from the one without a prediction
    prediction: str | None = None
    log: StepLog | None = None  #: of the engine

    @property
    def seconds(self) -> float:
        """Median wall time of a request."""
        return statistics.median(self.wall_s)

    def drafts(self, verdict: str) -> int:
        """Draft tokens of all sources that were ``"accepted"`` or ``"rejected"``."""
        return sum(counts[verdict] for counts in self.by_source.values())


def rows_of(
    result: Result, steps_dir: Path, predictions: Mapping[str, str], modes: Mapping[str, str]
) -> list[Row]:
    """The measurements of `bench` in these modes, mode → row. predictions: mode → the text that was sent."""
    rows = []
    for mode, name in modes.items():
        samples = [sample for sample in result.samples if sample.turn.mode == mode]
        if not samples:
            continue
        [(_, answer)], counts = samples[0].answers, samples[0].counts or Counts()
        drafted = counts.by_source()
        if name == NGRAM and counts.numbers["vllm_drafted"]:
            drafted = {NGRAM: {"accepted": counts.accepted, "rejected": counts.rejected}}
        row = Row(
            name,
            answer,
            [sample.seconds for sample in samples],
            samples[0].steps,
            {source: drafted[source] for source in (*SOURCES, NGRAM) if source in drafted},
            identical=not any(sample.different for sample in samples),
            prediction=predictions.get(mode),
            log=read_steps(steps_dir, answer) if name in _LOGGED else None,
        )
        rows.append(row)
    return rows


def read_steps(steps_dir: Path, answer: Answer, timeout_s: float = 10.0) -> StepLog:
    """Return the step log of an answer; BenchError if it is missing after `timeout_s` or has other tokens."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in steps_dir.glob(f"{answer.id}-*.yaml"):
            log = read_step_log(path)
            ids = [token for step in log.steps for token in step.new]
            if ids != answer.token_ids:
                found = f"the step log's {len(ids)} tokens are not the answer's {len(answer.token_ids)}"
                raise BenchError(f"{answer.id}: {found}")
            return log
        time.sleep(0.05)
    raise BenchError(f"no step log of {answer.id} in {steps_dir}: the server ignored the prediction")


def cells(row: Row, none: Row) -> tuple[str, ...]:
    """Return one row of the table under `HEADER`; `none` is the row without a prediction."""
    return (
        row.name,
        str(row.steps),
        f"{none.steps / row.steps:.1f}×",
        f"{row.seconds:.2f} s ({min(row.wall_s):.2f}–{max(row.wall_s):.2f})",
        f"{none.seconds / row.seconds:.1f}×",
        *(_by_source(row, verdict) for verdict in ("accepted", "rejected")),
        "yes" if row.identical else "NO",
    )


def _by_source(row: Row, verdict: str) -> str:
    """The drafts of a verdict: their sum, then each source that has some."""
    counts = {source: count[verdict] for source, count in row.by_source.items() if count[verdict]}
    if len(counts) > 1:
        return f"{row.drafts(verdict)} ({', '.join(f'{source} {count}' for source, count in counts.items())})"
    return f"{row.drafts(verdict)} ({next(iter(counts))})" if counts else "0"


#: The columns of `HEADER` where there is little room.
NARROW_HEADER = (HEADER[0], "steps,\nfewer", "wall time,\nspread,\nspeed-up", *HEADER[5:7], "same\noutput")


def narrow_cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The table under `NARROW_HEADER`, of 80 columns; the first row is the one without a prediction."""
    for row in rows:
        name, steps, fewer, wall, speed_up, *others = cells(row, rows[0])
        # One source a line: the widest cell is then a source and its number.
        lines = (f"{steps}\n{fewer}", f"{wall}\n{speed_up}", *others)
        yield [name, *(cell.replace(" (", "\n").replace(", ", "\n").replace(")", "") for cell in lines)]


def render(
    rows: Sequence[Row], calls: Sequence[Row], tokenizer: TextTokenizer, setup: str, num_draft_tokens: int
) -> str:
    """Return the page. rows, calls: the first has no prediction; one is `EDITED`. setup: a sentence."""
    none = rows[0]
    edited = next(row for row in rows if row.name == EDITED)
    page, style, *scripts = (
        (_ASSETS / name).read_text(encoding="utf-8")
        for name in ("demo.html", "demo.css", "replay.js", "demo.js")
    )
    lanes = (
        f'<li data-row="{row.name}"><span>{html.text(_LABELS[row.name][0])}</span>'
        f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true"></svg>'
        f"<span>{row.steps} passes, {row.seconds:.2f} s</span></li>"
        for row in rows
    )
    choices = (
        f'<label><input type="radio" name="row" value="{name}"{" checked" if name == EDITED else ""}> '
        f"{html.text(_LABELS[name][1].removeprefix('Prediction: '))}</label>"
        for name in _LOGGED
        if any(row.name == name for row in rows)
    )
    sources = {source for row in rows for source in row.by_source if source in SOURCES}
    body = Template(page).substitute(
        file=html.text(task.FILE_NAME),
        num_tokens=len(none.answer.token_ids),
        none_steps=none.steps,
        edited_steps=edited.steps,
        fewer=f"{none.steps / edited.steps:.1f}",
        none_seconds=f"{none.seconds:.2f}",
        edited_seconds=f"{edited.seconds:.2f}",
        faster=f"{none.seconds / edited.seconds:.1f}",
        identical="identical" if edited.identical else "DIFFERENT",
        lanes="".join(lanes),
        choices="".join(choices),
        legend=html.legend([Origin.GENERATED, *map(SOURCES.index, sources)]),
        instructions="".join(f"<li>{html.text(line)}</li>" for line in task.INSTRUCTIONS),
        diff=_diff(task.ORIGINAL, none.answer.text),
        table=html.table(HEADER, [cells(row, none) for row in rows]),
        call_table=html.table(HEADER, [cells(row, calls[0]) for row in calls]),
        num_draft_tokens=num_draft_tokens,
        setup=html.text(setup),
    )
    prompt = token_texts(tokenizer, none.answer.prompt_token_ids)
    data = html.data("demo-data", {"prompt": prompt, "rows": [_row_data(row, tokenizer) for row in rows]})
    title = f"The same answer in {edited.steps} passes of the model instead of {none.steps}"
    return html.page(title, [body, data], styles=[style], scripts=scripts)


def _diff(before: str, after: str) -> str:
    """A unified diff without the two lines that name files."""
    tags = {"+": "ins", "-": "del"}
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    tagged = ((tags.get(line[:1], "span"), html.text(line) or " ") for line in lines)
    return "".join(f"<{tag}>{line}</{tag}>" for tag, line in tagged)


def _row_data(row: Row, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The data of a row that the page's script shows."""
    label, seconds = _LABELS[row.name][1], round(row.seconds, 6)
    data: dict[str, Any] = {"name": row.name, "label": label, "seconds": seconds, "numSteps": row.steps}
    if row.name == NGRAM:
        return data
    data["output"] = token_texts(tokenizer, row.answer.token_ids)
    prediction = tokenizer.encode(row.prediction) if row.prediction else []
    if row.log is None:
        one = {"count": 1, "accepted": 0, "verified": 0, "proposed": [], "source": "none", "matched": 0}
        steps = [one] * row.steps
    else:
        steps = [_step_data(step, tokenizer) for step in row.log.steps]
        if len(prediction) != row.log.prediction_tokens:
            prediction = []  # the server has cut it differently: places in it cannot be shown
    return {**data, "prediction": token_texts(tokenizer, prediction), "steps": steps}


def _step_data(step: Step, tokenizer: TextTokenizer) -> dict[str, Any]:
    candidate = step.candidate or {}
    same = ("accepted", "verified", "source", "others")
    return {
        **{name: getattr(step, name) for name in same},
        "count": len(step.new),
        "proposed": token_texts(tokenizer, step.proposed),
        "position": candidate.get("position"),
        "matched": candidate.get("matched", 0),
        "why": candidate.get("why", ""),
        **({"expected": candidate["expected"]} if "expected" in candidate else {}),
        **({} if step.cursor_before is None else {"cursor": [step.cursor_before, step.cursor_after]}),
    }
