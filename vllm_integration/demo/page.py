"""The demo's table, for the terminal and for a page that plays the requests and shows their passes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from gpu_align.step_log import Step
from gpu_align.tools import html
from gpu_align.tools.html import Origin
from gpu_align.tools.report import origin_of
from gpu_align.tools.simulate.tokenizers import TextTokenizer, token_texts

from . import task
from .rows import EDITED, NGRAM, NONE, UNRELATED, VERBATIM, Row

HEADER = (
    "prediction",
    "verification steps",
    "fewer",
    "wall time",
    "speed-up",
    "accepted",
    "rejected",
    "output identical",
)
_CAPTION = "steps: forward passes of the model, the prefill included"
_ASSETS = Path(__file__).parent / "assets"

#: What a row is called where there is little room, and where there is more.
_LABELS = {
    NONE: ("no prediction", "Without a prediction"),
    NGRAM: ("vLLM's n-gram", "vLLM's n-gram drafter"),
    VERBATIM: ("verbatim", "Prediction: the exact answer"),
    EDITED: ("edited", "Prediction: the file before the edit"),
    UNRELATED: ("unrelated", "Prediction: an unrelated text"),
}
#: The case that a client has comes first.
_CHOICES = (EDITED, VERBATIM, UNRELATED)


def tokens_of(row: Row) -> tuple[list[int], list[int]]:
    """An `Origin` a token, and the verification step (from 0) that produced it; empty where nobody says so."""
    if row.name == NGRAM:  # the counters do not say which tokens were drafts
        return [], []
    if row.log is None:
        return [Origin.GENERATED] * len(row.token_ids), list(range(len(row.token_ids)))
    origins: list[int] = []
    numbers: list[int] = []
    for number, step in enumerate(row.log.steps):
        origins += [origin_of(step)] * step.accepted
        origins += [Origin.GENERATED] * (len(step.new) - step.accepted)
        numbers += [number] * len(step.new)
    return origins, numbers


def cells(row: Row, none: Row) -> tuple[str, ...]:
    """Return one row of the table; `none` is the row without a prediction."""
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


def explain(row: Row, none: Row) -> str:
    """Return what a row shows, in a sentence or two, with its own figures."""
    if row.name == NONE:
        return "one pass of the model for each token. All other outputs must equal this one."
    accepted = {source: counts["accepted"] for source, counts in row.by_source.items()}
    own = accepted.get("prediction", 0)
    elsewhere = " and ".join(
        f"{accepted[source]} from {words}"
        for source, words in (("context", "the prompt and the output so far"), ("recipe", "recipes"))
        if accepted.get(source)
    )
    if row.name == NGRAM:
        return (
            "the drafter that vLLM has built in. It needs no prediction: it repeats what followed the last "
            "tokens when they occurred before, here in the file that the prompt holds. It ran in a second server."
        )
    if row.name == VERBATIM:
        return f"the best case, the exact answer: {len(row.token_ids) / row.steps:.1f} tokens a pass."
    if row.name == EDITED:
        also = f"; {elsewhere}" if elsewhere else ""
        return (
            f"what a client really has, the file before the edit: {own} of {row.drafts('accepted')} accepted "
            f"drafts come from it{also}. Drafts are rejected where an edit begins."
        )
    drafted = sum(row.by_source.get("prediction", {}).values())
    useless = f"{drafted} of its tokens were verified, {own} accepted" if drafted else "it was not used"
    rest = (
        f" What was saved does not come from it: the file stands in the prompt too, and the drafter looks "
        f"there. Accepted: {elsewhere}."
        if elsewhere
        else ""
    )
    return f"a useless prediction does not change the answer ({useless}).{rest}"


def terminal_table(rows: Sequence[Row]) -> Any:
    """Return the rows as a `rich` table that fits 80 columns; the first row is the one without a prediction."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=_CAPTION)
    table.add_column(HEADER[0])
    for name in (
        "steps,\nfewer",
        "wall time,\nspread,\nspeed-up",
        "accepted",
        "rejected",
        "output\nidentical",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name, steps, fewer, wall, speed_up, accepted, rejected, identical = cells(row, rows[0])
        # One source a line: the widest cell is then a source and its number.
        lines = (f"{steps}\n{fewer}", f"{wall}\n{speed_up}", accepted, rejected, identical)
        broken = (cell.replace(" (", "\n").replace(", ", "\n").replace(")", "") for cell in lines)
        table.add_row(name, *broken, style=None if row.identical else "red")
    return table


def render(rows: Sequence[Row], tokenizer: TextTokenizer, facts: Sequence[str], num_draft_tokens: int) -> str:
    """Return the page.

    Args:
        rows: the first is the one without a prediction; one is the row `EDITED`.
        tokenizer: the served model's, to spell its tokens.
        facts: paragraphs about the run.
        num_draft_tokens: drafts a pass, at most.
    """
    none = rows[0]
    edited = next(row for row in rows if row.name == EDITED)
    template = Template((_ASSETS / "demo.html").read_text(encoding="utf-8"))
    body = template.substitute(
        file=html.text(task.FILE_NAME),
        num_tokens=len(none.token_ids),
        none_steps=none.steps,
        edited_steps=edited.steps,
        fewer=f"{none.steps / edited.steps:.1f}",
        none_seconds=f"{none.seconds:.2f}",
        edited_seconds=f"{edited.seconds:.2f}",
        faster=f"{none.seconds / edited.seconds:.1f}",
        identical="identical" if edited.identical else "DIFFERENT",
        lanes="".join(map(_lane, rows)),
        choices="".join(_choice(row) for name in _CHOICES for row in rows if row.name == name),
        legend=html.legend(origin for row in rows for origin in tokens_of(row)[0]),
        instructions="".join(f"<li>{html.text(line)}</li>" for line in task.INSTRUCTIONS),
        diff=_diff(task.ORIGINAL, none.text),
        table=html.table(HEADER, [cells(row, none) for row in rows]),
        notes="".join(f"<li><b>{row.name}</b>: {html.text(explain(row, none))}</li>" for row in rows),
        num_draft_tokens=num_draft_tokens,
        outputs="".join(_outputs(row, tokenizer) for row in rows),
        facts="".join(map(html.note, facts)),
    )
    prompt = token_texts(tokenizer, none.prompt_token_ids)
    data = html.data("demo-data", {"prompt": prompt, "rows": [_row_data(row, tokenizer) for row in rows]})
    style, *scripts = (
        (_ASSETS / name).read_text(encoding="utf-8") for name in ("demo.css", "replay.js", "demo.js")
    )
    title = f"The same answer in {edited.steps} passes of the model instead of {none.steps}"
    return html.page(title, [body, data], styles=[style], scripts=scripts)


def _lane(row: Row) -> str:
    return (
        f'<li data-row="{row.name}"><span>{html.text(_LABELS[row.name][0])}</span>'
        f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true"></svg>'
        f"<span>{row.steps} passes, {row.seconds:.2f} s</span></li>"
    )


def _choice(row: Row) -> str:
    checked = " checked" if row.name == EDITED else ""
    return (
        f'<label><input type="radio" name="row" value="{row.name}"{checked}> '
        f"{html.text(_LABELS[row.name][1].removeprefix('Prediction: '))}</label>"
    )


def _diff(before: str, after: str) -> str:
    """A unified diff, three lines of context, without the two lines that name files."""
    tags = {"+": "ins", "-": "del"}
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    parts = []
    for line in lines:
        tag = tags.get(line[:1], "span")
        parts.append(f"<{tag}>{html.text(line) or ' '}</{tag}>")
    return "".join(parts)


def _outputs(row: Row, tokenizer: TextTokenizer) -> str:
    if row.name == NGRAM:  # the server tells its counts, not its passes
        return ""
    content = html.tokens(token_texts(tokenizer, row.token_ids), *tokens_of(row))
    return html.details(_LABELS[row.name][1], f"{row.steps} passes, {row.seconds:.2f} s", content)


def _row_data(row: Row, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What the page's script shows of a row."""
    data: dict[str, Any] = {
        "name": row.name,
        "label": _LABELS[row.name][1],
        "seconds": round(row.seconds, 6),
        "numSteps": row.steps,
    }
    if row.name == NGRAM:
        return data
    data["output"] = token_texts(tokenizer, row.token_ids)
    prediction = tokenizer.encode(row.prediction) if row.prediction else []
    if row.log is not None and len(prediction) != row.log.prediction_tokens:
        prediction = []  # the server has cut it differently: places in it cannot be shown
    data["prediction"] = token_texts(tokenizer, prediction)
    if row.log is None:
        one = {"count": 1, "accepted": 0, "verified": 0, "proposed": [], "source": "none", "matched": 0}
        data["steps"] = [one] * row.steps
    else:
        data["steps"] = [_step_data(step, tokenizer) for step in row.log.steps]
    return data


def _step_data(step: Step, tokenizer: TextTokenizer) -> dict[str, Any]:
    candidate = step.candidate or {}
    data = {
        "count": len(step.new),
        "accepted": step.accepted,
        "verified": step.verified,
        "proposed": token_texts(tokenizer, step.proposed),
        "source": step.source,
        "position": candidate.get("position"),
        "matched": candidate.get("matched", 0),
        "why": candidate.get("why", ""),
        "others": step.others,
    }
    if "expected" in candidate:
        data["expected"] = candidate["expected"]
    if step.cursor_before is not None:
        data["cursor"] = [step.cursor_before, step.cursor_after]
    return data
