"""Send the same request with different predictions, time it, and read the engine's step log of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_align.html import Origin
from gpu_align.step_log import StepLog, read_step_log
from gpu_align.step_report import origin_of

REPEATS = 3
FASTER_BY_STEPS = 4.0


class MeasurementError(RuntimeError):
    """The server answered, but not in a way that can be measured."""


@dataclass
class Row:
    """One kind of prediction, measured `REPEATS` times.

    wall_s: seconds of each request, measured at the client.
    token_ids: the output's tokens, with the end token where there is one.
    origins: an `Origin` a token.
    token_steps: the verification step (from 0) that produced each token.
    steps: forward passes that produced tokens; the first is the prefill.
    """

    name: str
    text: str
    token_ids: list[int]
    wall_s: list[float]
    steps: int
    drafted: int = 0
    accepted: int = 0
    origins: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    identical: bool = True

    @property
    def seconds(self) -> float:
        """Median wall time of a request."""
        return statistics.median(self.wall_s)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of wall time."""
        return len(self.token_ids) / self.seconds

    @property
    def rejected(self) -> int:
        """Draft tokens that the model did not agree with."""
        return self.drafted - self.accepted


@dataclass(frozen=True)
class Request:
    """What all rows have in common."""

    model: str
    messages: list[dict[str, str]]
    max_tokens: int


def send(client: Any, request: Request, prediction: str | None) -> tuple[Any, float]:
    """Send one chat request and return the completion and its wall time in seconds."""
    extra = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    started = time.perf_counter()
    completion = client.chat.completions.create(
        model=request.model,
        messages=request.messages,
        temperature=0,
        max_tokens=request.max_tokens,
        extra_body={"return_token_ids": True},
        **extra,
    )
    return completion, time.perf_counter() - started


def measure(
    client: Any,
    request: Request,
    name: str,
    prediction: str | None,
    steps_dir: Path,
    done: Callable[[], None],
) -> Row:
    """Measure one kind of prediction; `done()` is called after each request.

    Raises MeasurementError when an answer has no text, when the repetitions differ, or when the server has
    not logged the steps of a request with a prediction.
    """
    rows: list[Row] = []
    for _ in range(REPEATS):
        completion, seconds = send(client, request, prediction)
        row = _row(completion, name, seconds)
        if prediction is not None:
            fill_from_log(row, read_steps(steps_dir, completion.id))
        rows.append(row)
        done()
    first = rows[0]
    for other in rows[1:]:
        if (other.text, other.steps) != (first.text, first.steps):
            raise MeasurementError(
                f"{name}: two equal requests differ: {first.steps} and {other.steps} steps, "
                f"text {'equal' if other.text == first.text else 'different'}"
            )
        first.wall_s += other.wall_s
    return first


def _row(completion: Any, name: str, seconds: float) -> Row:
    choice = completion.choices[0]
    ids = (choice.model_extra or {}).get("token_ids")
    if not choice.message.content or not ids:
        raise MeasurementError(f"{name}: expected an answer with text and token ids, found {choice!r}")
    # Without drafts every forward pass yields one token.
    return Row(
        name,
        choice.message.content,
        list(ids),
        [seconds],
        steps=len(ids),
        origins=[Origin.GENERATED] * len(ids),
        token_steps=list(range(len(ids))),
    )


def read_steps(steps_dir: Path, response_id: str, timeout_s: float = 10.0) -> StepLog:
    """Return the step log of the request that `response_id` answered, waiting for it to be written.

    Raises MeasurementError when there is none after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for path in steps_dir.glob(f"{response_id}-*.yaml"):
            return read_step_log(path)
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"no step log of {response_id} in {steps_dir}: the server ignored the prediction"
            )
        time.sleep(0.05)


def fill_from_log(row: Row, log: StepLog) -> None:
    """Take steps, counts and every token's origin from a request's step log.

    Raises MeasurementError when the log's tokens are not the answer's.
    """
    ids: list[int] = []
    row.origins, row.token_steps = [], []
    for number, step in enumerate(log.steps):
        ids += step.new
        row.token_steps += [number] * len(step.new)
        row.origins += [origin_of(step)] * step.accepted
        row.origins += [Origin.GENERATED] * (len(step.new) - step.accepted)
    if ids != row.token_ids:
        raise MeasurementError(
            f"{row.name}: the step log's {len(ids)} tokens are not the answer's {len(row.token_ids)}"
        )
    row.steps, row.drafted, row.accepted = len(log.steps), log.drafted, log.accepted


def compare(rows: Sequence[Row]) -> None:
    """Mark each row whose text is not the first one's."""
    for row in rows:
        row.identical = row.text == rows[0].text


def failures(none: Row, verbatim: Row, rows: Sequence[Row]) -> list[str]:
    """Return one line for each expectation that is not met; empty when the demo has succeeded."""
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
