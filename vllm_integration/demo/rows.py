"""The demo's rows: what `bench` has measured, with the engine's step logs, and what the demo promises."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_align.step_log import SOURCES, StepLog, read_step_log
from gpu_align.tools.bench.client import Answer, BenchError
from gpu_align.tools.bench.measure import Counts, Result

REPEATS = 3
FASTER_BY_STEPS = 4.0

#: The rows. All but `NGRAM` are answered by the server with the plugin; those of `PREDICTED` have a prediction.
NONE, NGRAM, VERBATIM, EDITED, UNRELATED = ROWS = ("none", "n-gram", "verbatim", "edited", "unrelated")
PREDICTED = (VERBATIM, EDITED, UNRELATED)


@dataclass
class Row:
    """One kind of prediction, measured `REPEATS` times.

    Attributes:
        text: the output of the first round, as are all but `wall_s`.
        token_ids: its tokens, with the end token where there is one.
        wall_s: seconds of each request, measured at the client.
        steps: forward passes that produced tokens; the first is the prefill.
        by_source: accepted and rejected drafts of each source that drafted.
        identical: whether no output, of any round, differs from the one without a prediction.
        prompt_token_ids: the prompt's tokens, as the server made them.
        prediction: the text that was sent.
        log: the engine's step log, where there is one.
    """

    name: str
    text: str
    token_ids: list[int]
    wall_s: list[float]
    steps: int
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    identical: bool = True
    prompt_token_ids: list[int] = field(default_factory=list)
    prediction: str | None = None
    log: StepLog | None = None

    @property
    def seconds(self) -> float:
        """Median wall time of a request."""
        return statistics.median(self.wall_s)

    def drafts(self, verdict: str) -> int:
        """Draft tokens of all sources that were ``"accepted"`` or ``"rejected"``."""
        return sum(counts[verdict] for counts in self.by_source.values())


def rows_of(result: Result, steps_dir: Path) -> list[Row]:
    """Return what `bench` has measured as rows, in the order of `ROWS`.

    Raises:
        BenchError: the engine has not logged the steps of a request with a prediction, or other tokens.
    """
    rows = []
    for name in ROWS:
        samples = [sample for sample in result.samples if sample.turn.mode == name]
        if not samples:
            continue
        [(_, answer)], counts = samples[0].answers, samples[0].counts or Counts()
        drafted = counts.by_source()
        by_source = {source: drafted[source] for source in SOURCES if source in drafted}
        if name == NGRAM and counts.vllm_drafted:
            by_source = {NGRAM: {"accepted": counts.accepted, "rejected": counts.rejected}}
        rows.append(
            Row(
                name,
                answer.text,
                answer.token_ids,
                [sample.seconds for sample in samples],
                samples[0].steps,
                by_source,
                not any(sample.different for sample in samples),
                answer.prompt_token_ids,
                log=read_steps(steps_dir, answer) if name in PREDICTED else None,
            )
        )
    return rows


def read_steps(steps_dir: Path, answer: Answer, timeout_s: float = 10.0) -> StepLog:
    """Return the step log of the request that was answered, waiting for it to be written.

    Raises:
        BenchError: there is none after `timeout_s`, or its tokens are not the answer's.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in steps_dir.glob(f"{answer.id}-*.yaml"):
            log = read_step_log(path)
            if not log.finished:  # with GPU_ALIGN_DEBUG_LIVE there is a file before
                continue
            ids = [token for step in log.steps for token in step.new]
            if ids != answer.token_ids:
                found = f"the step log's {len(ids)} tokens are not the answer's {len(answer.token_ids)}"
                raise BenchError(f"{answer.id}: {found}")
            return log
        time.sleep(0.05)
    raise BenchError(f"no step log of {answer.id} in {steps_dir}: the server ignored the prediction")


def as_json(rows: Sequence[Row], model: str, num_draft_tokens: int) -> dict[str, Any]:
    """The rows as `demo.json` has them."""
    return {
        "model": model,
        "num_draft_tokens": num_draft_tokens,
        "rows": [
            {
                "prediction": row.name,
                "output_tokens": len(row.token_ids),
                "steps": row.steps,
                "wall_s": [round(seconds, 6) for seconds in row.wall_s],
                "by_source": row.by_source,
                "identical": row.identical,
                "step_log": None if row.log is None else row.log.request_id,
            }
            for row in rows
        ],
    }


def failures(rows: Sequence[Row]) -> list[str]:
    """Return one line for each expectation that is not met; empty when the demo has succeeded."""
    none, verbatim = (next(row for row in rows if row.name == name) for name in (NONE, VERBATIM))
    differs = "the output differs from the one without a prediction"
    found = [f"{row.name}: {differs}" for row in rows if not row.identical]
    if none.steps < FASTER_BY_STEPS * verbatim.steps:
        found.append(
            f"{verbatim.name}: expected at least {FASTER_BY_STEPS:g}× fewer verification steps "
            f"than {none.steps}, found {verbatim.steps}"
        )
    if verbatim.seconds >= none.seconds:
        found.append(
            f"{verbatim.name}: expected less than {none.seconds:.2f} s, the time without a prediction, "
            f"found {verbatim.seconds:.2f} s"
        )
    return found
