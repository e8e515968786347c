"""Learn a table from one's own traffic, and say what it is worth on requests that it has not seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_align.config import DrafterConfig
from gpu_align.ops.constants import SURVIVAL_ONE
from gpu_align.ops.draft.tables import KNOTS, SHIPPED, IntArray, fit_curves, read_survival
from gpu_align.simulate.records import Record
from gpu_align.tune.fit import at_knots, calibrate, relearn
from gpu_align.tune.observe import NUM_DRAFT_TOKENS, Observed, observe
from gpu_align.tune.table import make_table

#: One request in so many is held back for the report.
HELD_BACK = 4
#: Fewer requests than this are refused: a report on two or three of them says nothing.
LEAST_REQUESTS = 8
NUM_ROUNDS = 2
#: `(length_factor, min_survival)`, from few rejected drafts to few steps, and across.
SETTINGS = (
    (1.5, 0.3), (2.0, 0.2), (2.0, 0.05), (2.0, 0.01), (3.0, 0.1), (3.0, 0.02), (3.0, 0.005), (4.0, 0.04),
    (4.0, 0.01), (6.0, 0.08), (6.0, 0.02), (8.0, 0.05), (12.0, 0.05), (64.0, 0.02),
)  # fmt: skip
#: So many of them are tried on the held-back requests: the one chosen and its neighbours.
MAX_REPORTED = 4
#: Output tokens of the requests that the settings are chosen on.
MAX_CHOICE_TOKENS = 200_000

#: Told what is being done, and of output tokens as they are replayed.
Progress = Callable[[str, int], object]


@dataclass(frozen=True)
class Point:
    """What a table and its settings come to on some requests.

    Attributes:
        tokens: output tokens.
        steps: verification steps.
        accepted: draft tokens.
        rejected: draft tokens.
        gap: how far confidences are off: the mean of |accepted − promised| over the drafts, by bins of 0.05.
    """

    tokens: int
    steps: int
    accepted: int
    rejected: int
    gap: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def rejected_per_accepted(self) -> float:
        return self.rejected / max(self.accepted, 1)


@dataclass(frozen=True)
class Report:
    """Before and after, on requests that were held back.

    Attributes:
        learned_from: requests.
        held_back: requests.
        before: the table that comes with the library, at the default settings.
        after: the new table, at the settings chosen with it.
        equal: tokens a step of the new table at the rejections of `before`, between its settings; None where it
            does not reach so many, or so few.
        settings: of `after`.
    """

    learned_from: int
    held_back: int
    before: Point
    after: Point
    equal: float | None
    settings: dict[str, float]

    @property
    def gain(self) -> float | None:
        """By how much `equal` is above the tokens a step of `before`; 0.03 is 3 %."""
        return None if self.equal is None else self.equal / self.before.tokens_per_step - 1


@dataclass(frozen=True)
class Tuned:
    """A table for `write_table`, and its report."""

    table: dict[str, Any]
    report: Report


def replays(records: Sequence[Record]) -> int:
    """Output tokens that `tune` will replay at most, for a progress bar."""
    learned, held = split(records)
    held_tokens, chosen = (sum(len(r.output) for r in part) for part in (held, _sample(learned)))
    learned_tokens = sum(len(r.output) for r in learned)
    return NUM_ROUNDS * learned_tokens + len(SETTINGS) * chosen + (1 + MAX_REPORTED) * held_tokens


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """``(learned from, held back)``: by the requests' contents, so that the same texts are never in both."""
    ordered = sorted(records, key=_key)
    learned: list[Record] = []
    held: list[Record] = []
    part, before = -1, ""
    for record in ordered:
        part, before = part + (_key(record) != before), _key(record)
        (learned if part % HELD_BACK else held).append(record)
    return learned, held


def tune(
    records: Sequence[Record], config: DrafterConfig | None = None, progress: Progress | None = None
) -> Tuned:
    """Learn from three quarters of the requests, and report on the others.

    ::

        repeat NUM_ROUNDS times: replay with the table so far; relearn(counts, the shipped table)
        calibrate the confidences on the last replay
        settings = those with the most tokens a step that reject no more than the shipped table does

    The result depends on the requests alone, not on their order.

    Args:
        records: requests with a prediction and an output.
        config: settings other than the two that are chosen; the defaults if None.
        progress: told of what is replayed; `replays` in all.

    Raises:
        ValueError: fewer than `LEAST_REQUESTS`.
    """
    learned, held = split(records)
    if len(records) < LEAST_REQUESTS or not learned:
        raise ValueError(
            f"expected at least {LEAST_REQUESTS} requests with predictions, different ones, found {len(records)}"
        )
    config = config if config is not None else DrafterConfig()
    width = max(len(r.prompt) + len(r.output) for r in records)
    tell = progress if progress is not None else lambda *_: None

    def seen(
        part: Sequence[Record], survival: IntArray, c: DrafterConfig, what: str, **more: Any
    ) -> Observed:
        return observe(part, survival, width, c, progress=lambda done: tell(what, done), **more)

    knots, shipped_calibration = read_survival(SHIPPED)
    shipped = fit_curves(knots, NUM_DRAFT_TOKENS)
    known = np.minimum(shipped / SURVIVAL_ONE, 1.0)
    survival, first = shipped, None
    for _ in range(NUM_ROUNDS):
        found = seen(learned, survival, config, "learning")
        first = first if first is not None else found
        curves = relearn(found.runs, known)
        survival = fit_curves(at_knots(curves).astype(np.float64), NUM_DRAFT_TOKENS)
    # The confidences of the choices that the drafter makes with the table, not with the one before it.
    sample = _sample(learned)
    limit = seen(sample, shipped, config, "choosing") if len(sample) < len(learned) else first
    assert limit is not None
    most = _point(limit).rejected_per_accepted
    tried = {s: seen(sample, survival, _with(config, s), "choosing") for s in SETTINGS}
    front = _front({setting: _point(observed) for setting, observed in tried.items()})
    allowed = [s for s, point in front if point.rejected_per_accepted <= most] or [front[0][0]]
    chosen = allowed[-1]
    calibration = calibrate(tried[chosen].drafts, shipped_calibration)
    first_reported = max(0, min(len(allowed) - 2, len(front) - MAX_REPORTED))
    reported = [s for s, _ in front[first_reported:][:MAX_REPORTED]]

    before = _point(seen(held, shipped, config, "reporting", calibration=shipped_calibration))
    after = {
        setting: _point(
            seen(held, survival, _with(config, setting), "reporting", calibration=tuple(calibration))
        )
        for setting in reported
    }
    settings = {"length_factor": chosen[0], "min_survival": chosen[1]}
    equal = at_rejections(list(after.values()), before.rejected_per_accepted)
    report = Report(len(learned), len(held), before, after[chosen], equal, settings)
    table = make_table(
        at_knots(curves), calibration, found.runs.sum(axis=1), len(learned), "gpu-align tune", settings
    )
    assert table["knots"] == list(KNOTS)
    return Tuned(table, report)


def at_rejections(points: Sequence[Point], rejected: float) -> float | None:
    """Tokens a step at so many rejected drafts per accepted one, on the line through the best of these points;
    None outside."""
    best: list[tuple[float, float]] = []
    for x, y in sorted((p.rejected_per_accepted, p.tokens_per_step) for p in points):
        if not best or y > best[-1][1]:
            best.append((x, y))
    xs, ys = zip(*best, strict=True)
    if not xs[0] <= rejected:
        return None
    return float(np.interp(rejected, xs, ys)) if rejected <= xs[-1] else float(ys[-1])


def _front(points: Mapping[tuple[float, float], Point]) -> list[tuple[tuple[float, float], Point]]:
    """The settings that no other one beats in both, from few rejected drafts to many."""
    front: list[tuple[tuple[float, float], Point]] = []
    for setting, point in sorted(points.items(), key=lambda p: (p[1].rejected_per_accepted, p[1].steps)):
        if not front or point.steps < front[-1][1].steps:
            front.append((setting, point))
    return front


def _with(config: DrafterConfig, setting: tuple[float, float]) -> DrafterConfig:
    return replace(config, length_factor=setting[0], min_survival=setting[1])


def _point(found: Observed) -> Point:
    tokens, steps, accepted, rejected = map(int, found.total)
    gap = float(np.abs(found.drafts[1]).sum() / max(found.drafts[0].sum(), 1))
    return Point(tokens, steps, accepted, rejected, gap)


def _sample(records: Sequence[Record]) -> list[Record]:
    """Every n-th, with the smallest n that keeps their outputs within `MAX_CHOICE_TOKENS`; at least one."""
    for every in range(1, len(records) + 1):
        part = list(records[::every])
        if sum(len(r.output) for r in part) <= MAX_CHOICE_TOKENS:
            return part
    return list(records[:1])


def _key(record: Record) -> str:
    """The same for requests with the same prediction: they are about the same text."""
    return hashlib.sha256(np.array(record.prediction, dtype=np.int64).tobytes()).hexdigest()
