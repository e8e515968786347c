"""Send the same request with different predictions in turn, time it, and read what the engine counted."""

from __future__ import annotations

import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_align.step_log import StepLog, read_step_log
from gpu_align.tools.html import Origin
from gpu_align.tools.report import origin_of

REPEATS = 3
FASTER_BY_STEPS = 4.0

#: The rows. All but `NGRAM` are answered by the server with the plugin.
NONE, NGRAM, VERBATIM, EDITED, UNRELATED = "none", "n-gram", "verbatim", "edited", "unrelated"


class MeasurementError(RuntimeError):
    """The server answered, but not in a way that can be measured."""


@dataclass
class Row:
    """One kind of prediction, measured `REPEATS` times.

    wall_s: seconds of each request, measured at the client.
    token_ids: the output's tokens, with the end token where there is one.
    prompt_token_ids: the prompt's, as the server made them.
    prediction: the text that was sent.
    origins: an `Origin` a token.
    token_steps: the verification step (from 0) that produced each token.
    steps: forward passes that produced tokens; the first is the prefill.
    by_source: accepted and rejected drafts of each source that drafted.
    log: the engine's step log of the first request, where there is one.
    """

    name: str
    text: str
    token_ids: list[int]
    wall_s: list[float]
    steps: int
    drafted: int = 0
    accepted: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    prediction: str | None = None
    origins: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: StepLog | None = None
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


def measure_rounds(
    client: Any,
    request: Request,
    predictions: Mapping[str, Callable[[str], str]],
    steps_dir: Path,
    done: Callable[[str], None],
) -> list[Row]:
    """Measure a request without a prediction and with each of `predictions`, in `REPEATS` rounds.

    Every round sends each request once, so that whatever else the machine does slows all of them alike.

    Args:
        client: the official client.
        request: what all requests have in common.
        predictions: for each row the prediction, made from the output without one.
        steps_dir: where the server writes its step logs.
        done: called with the row's name after each request.

    Returns:
        The rows, the one without a prediction first.

    Raises:
        MeasurementError: an answer has no text, two answers to equal requests differ, or the server has not
            logged the steps of a request with a prediction.
    """
    rounds: dict[str, list[Row]] = {name: [] for name in (NONE, *predictions)}
    for _ in range(REPEATS):
        for name, rows in rounds.items():
            prediction = None if name == NONE else predictions[name](rounds[NONE][0].text)
            completion, seconds = send(client, request, prediction)
            row = _row(completion, name, seconds)
            if prediction is not None:
                row.prediction = prediction
                fill_from_log(row, read_steps(steps_dir, completion.id))
            rows.append(row)
            done(name)
    return [_merge(rows) for rows in rounds.values()]


def measure_ngram(client: Any, request: Request, metrics_url: str, done: Callable[[str], None]) -> Row:
    """Measure the request on a server that drafts by itself; it tells its drafts on `metrics_url`.

    Raises MeasurementError as `measure_rounds` does, and when the counters do not fit the answer.
    """
    rows = []
    for _ in range(REPEATS):
        before = read_draft_counters(metrics_url)
        completion, seconds = send(client, request, None)
        row = _row(completion, NGRAM, seconds)
        fill_from_counters(row, before, _counters_after(metrics_url, before, len(row.token_ids)))
        rows.append(row)
        done(NGRAM)
    return _merge(rows)


def _merge(rows: Sequence[Row]) -> Row:
    """The first of equal rows, with the times of all."""
    first = rows[0]
    for other in rows[1:]:
        if (other.text, other.steps) != (first.text, first.steps):
            raise MeasurementError(
                f"{first.name}: two equal requests differ: {first.steps} and {other.steps} steps, "
                f"text {'equal' if other.text == first.text else 'different'}"
            )
        first.wall_s += other.wall_s
    return first


_GENERATED = "vllm:generation_tokens_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def read_draft_counters(metrics_url: str) -> dict[str, int]:
    """Return the server's counters of generated, drafted and accepted tokens."""
    with urllib.request.urlopen(metrics_url, timeout=30) as answer:
        return parse_draft_counters(answer.read().decode())


def parse_draft_counters(exposition: str) -> dict[str, int]:
    """Return those counters of Prometheus' text format, over all their labels.

    Raises MeasurementError when one is missing.
    """
    found: dict[str, int] = {}
    for name in (_GENERATED, _DRAFTED, _ACCEPTED):
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", exposition, re.MULTILINE)
        if not values:
            raise MeasurementError(f"/metrics: expected the counter {name}, but it is missing")
        found[name] = round(sum(map(float, values)))
    return found


def _counters_after(metrics_url: str, before: Mapping[str, int], tokens: int) -> dict[str, int]:
    """The counters once they hold the answer, which may be a moment after it."""
    deadline = time.monotonic() + 10
    while True:
        now = read_draft_counters(metrics_url)
        if now[_GENERATED] - before[_GENERATED] >= tokens or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def fill_from_counters(row: Row, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Take the counts of one request from the server's counters before and after it.

    Raises MeasurementError when another request was counted, or none.
    """
    generated, drafted, accepted = (after[name] - before[name] for name in (_GENERATED, _DRAFTED, _ACCEPTED))
    if generated != len(row.token_ids) or not 0 <= accepted <= min(drafted, generated):
        raise MeasurementError(
            f"{row.name}: /metrics: expected {len(row.token_ids)} tokens generated, and no more accepted than "
            f"drafted, found {generated}, {accepted}, {drafted}"
        )
    row.drafted, row.accepted = drafted, accepted
    # Each pass writes one token of the model's own and the drafts that it accepts.
    row.steps = generated - accepted
    row.by_source = {NGRAM: (accepted, drafted - accepted)} if drafted else {}
    row.origins, row.token_steps = [], []  # the counters do not say which tokens were drafts


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
        prompt_token_ids=list((completion.model_extra or {}).get("prompt_token_ids") or []),
    )


def read_steps(steps_dir: Path, response_id: str, timeout_s: float = 10.0) -> StepLog:
    """Return the step log of the request that `response_id` answered, waiting for it to be written.

    Raises MeasurementError when there is none after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for path in steps_dir.glob(f"{response_id}-*.yaml"):
            log = read_step_log(path)
            if log.finished:  # with GPU_ALIGN_DEBUG_LIVE there is a file before
                return log
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
    row.by_source = {
        source: (counts["accepted"], counts["drafted"] - counts["accepted"])
        for source, counts in log.usage()["by_source"].items()
    }
    row.log = log


def compare(rows: Sequence[Row]) -> None:
    """Mark each row whose text is not the first one's."""
    for row in rows:
        row.identical = row.text == rows[0].text


def result(rows: Sequence[Row], model: str, num_draft_tokens: int) -> dict[str, Any]:
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
                "by_source": {
                    source: {"accepted": accepted, "rejected": rejected}
                    for source, (accepted, rejected) in row.by_source.items()
                },
                "identical": row.identical,
                "step_log": None if row.log is None else row.log.request_id,
            }
            for row in rows
        ],
    }


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
