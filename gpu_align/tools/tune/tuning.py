"""Learn a table from one's own traffic, and say what it is worth on requests not seen."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...drafter.config import DrafterConfig
from ...drafter.step_log import StepLog, StepLogError, read_step_log
from ...drafter.survival import FORMAT, KNOTS, SHIPPED, IntArray, fit_curves, read_survival
from ...ops.choose import LENGTH_EDGES, MARGIN_EDGES, SURVIVAL_ONE
from ...ops.files import NUM_BINS, content_hash
from ..console import Advance
from ..inputs import RecordError, files_in
from ..simulate.records import Record, read_records
from .fit import NUM_DRAFT_TOKENS, Array, ReplayCounts, at_knots, calibrate, observe, relearn

_LOG_ENDINGS = (".yaml", ".yml")


def files_of(places: Sequence[Path]) -> list[Path]:
    """The files that are given, and the step logs in the folders that are given, sorted."""
    files: list[Path] = []
    for place in places:
        found = files_in(place, _LOG_ENDINGS)
        if not found:
            raise FileNotFoundError(f"{place}: expected step logs (*.yaml) in this folder, found none")
        files += found
    return files


def _untold(name: str, done: int, total: int | None = None) -> None:
    """An `Advance` that tells nothing."""


def read_traffic(
    files: Iterable[Path], tokenizer: str | None = None, progress: Advance = _untold
) -> tuple[list[Record], Counter[str]]:
    """The requests of step logs and files of pairs, and the reasons why others cannot be replayed, with how many.

    A step log is one request. It has no tokens of the prompt, so drafts from the prompt are not seen. OSError: a
    file cannot be read. ValueError: an invalid file of pairs. MissingExtraError: PyYAML, or a tokenizer's package.
    """
    records: list[Record] = []
    skipped: Counter[str] = Counter()
    for file in files:
        found: list[Record | str]
        if file.suffix not in _LOG_ENDINGS:
            try:
                found = [r if r.prediction else "no prediction" for r in read_records(file, tokenizer)]
            except RecordError as error:
                raise ValueError(f"{file}: {error}") from error
        else:
            try:
                found = [record_of(read_step_log(file))]
            except StepLogError:
                found = ["not a whole step log"]
        records += [record for record in found if isinstance(record, Record)]
        skipped.update(reason for reason in found if isinstance(reason, str))
        progress("", 1)
    return records, skipped


def record_of(log: StepLog) -> Record | str:
    """The request of a step log as it can be replayed, or why it cannot."""
    output = [token for step in log.steps for token in step.new]
    prediction = [token for line in log.prediction_lines or () for token in line.tokens]
    if any(step.source == "memory" for step in log.steps):
        return "drafts from earlier answers"
    if not log.prediction_tokens:
        return "no prediction"
    if log.prediction_lines is None:
        return "the log does not hold the prediction"
    if len(prediction) != log.prediction_tokens:
        return "the log does not hold the whole prediction"
    return Record(log.request_id, [], prediction, output) if output else "no output"


class Point(NamedTuple):
    """Counts of a replay of some requests with a table and its settings."""

    tokens: int  #: of the outputs
    steps: int
    accepted: int
    rejected: int
    gap: float  #: how far confidences are off: the mean of |accepted − promised| over the drafts, by bins of 0.05

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def rejected_per_accepted(self) -> float:
        return self.rejected / max(self.accepted, 1)


@dataclass(frozen=True)
class Report:
    """Before and after, on requests that were held back."""

    learned_from: int  #: requests
    held_back: int
    before: Point  #: the shipped table at the default settings
    after: Point  #: the new table at the settings chosen with it
    equal: float | None  #: tokens a step of `after`, between its settings, at the rejections of `before`
    settings: dict[str, float]  #: of `after`

    @property
    def gain(self) -> float | None:
        """By how much `equal` is above the tokens a step of `before`; 0.03 is 3 %."""
        return None if self.equal is None else self.equal / self.before.tokens_per_step - 1


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


def point_of(found: ReplayCounts) -> Point:
    tokens, steps, accepted, rejected = map(int, found.total)
    gap = float(np.abs(found.drafts[1]).sum() / max(found.drafts[0].sum(), 1))
    return Point(tokens, steps, accepted, rejected, gap)


def make_table(
    survival: npt.NDArray[np.int64],
    calibration: list[float],
    seen: npt.NDArray[Any],
    num_records: int,
    made_by: str,
    settings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The content of a file: counts by class, no texts and no tokens.

    survival: [NUM_CLASSES, len(KNOTS)] in units of 1/`SURVIVAL_ONE`. calibration: [NUM_BINS]. seen: [NUM_CLASSES],
    candidates that it was learned from. settings: fields of `DrafterConfig` that go with it.
    """
    table: dict[str, Any] = {
        "format": FORMAT,
        "made_by": made_by,
        "records": num_records,
        "length_edges": list(LENGTH_EDGES),
        "margin_edges": list(MARGIN_EDGES),
        "knots": list(KNOTS),
        "unit": SURVIVAL_ONE,
        "seen": np.asarray(seen).astype(int).tolist(),
        "calibration": calibration,
        **({"settings": dict(settings)} if settings else {}),
        "survival": np.asarray(survival).astype(int).tolist(),
    }
    return {"sha256": content_hash(table, "sha256"), **table}


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write one class a line: a new table reads as a diff."""
    text = json.dumps(table, separators=(",", ":"))
    for joint, broken in (('"survival":[[', '"survival":[\n['), ("],[", "],\n["), ("]]}", "]\n]}")):
        text = text.replace(joint, broken)
    path.write_text(text + "\n", encoding="utf-8")


#: Parts of the requests, of which each is replayed with what the others taught.
NUM_PARTS = 4
MADE_BY = "gpu-align tune"


def key_of(record: Record) -> str:
    """The same for requests with the same prediction: they are about the same text."""
    return hashlib.sha256(np.array(record.prediction, dtype=np.int64).tobytes()).hexdigest()


def in_parts(records: Sequence[Record]) -> list[list[Record]]:
    """Up to `NUM_PARTS`; requests with the same prediction are in the same one."""
    keys = [key_of(record) for record in records]
    part_of = {key: i % NUM_PARTS for i, key in enumerate(sorted(set(keys)))}
    return [
        [record for record, key in zip(records, keys, strict=True) if part_of[key] == part]
        for part in sorted(set(part_of.values()))
    ]


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
MAX_CHOICE_TOKENS = 120_000


class Tuned(NamedTuple):
    table: dict[str, Any]
    report: Report


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """``(learned from, held back)``: by the requests' contents, so that the same texts are never in both."""
    keyed = sorted(((key_of(record), record) for record in records), key=lambda pair: pair[0])
    held = set(sorted({key for key, _ in keyed})[::HELD_BACK])
    return [r for key, r in keyed if key not in held], [r for key, r in keyed if key in held]


def tune(records: Sequence[Record], progress: Advance = _untold) -> Tuned:
    """Learn from three quarters of the requests, and report on the others; their order does not matter. ::

        repeat NUM_ROUNDS times: replay with the table so far; relearn(counts, the shipped table)
        settings = those with the most tokens a step that reject no more than the shipped table does
        the shipped survival stays if it does as well on parts that a table was not learned from
        calibrate the confidences on the settings' replay

    Args:
        records: requests with a prediction and an output.
        progress: told of output tokens as they are replayed, and at first how many these are at most.

    ValueError: fewer than `LEAST_REQUESTS`. There are no recipes in the replays.
    """
    learned, held = split(records)
    if len(records) < LEAST_REQUESTS or not learned:
        expected = f"at least {LEAST_REQUESTS} requests with predictions, different ones"
        raise ValueError(f"expected {expected}, found {len(records)}")
    parts_of = (NUM_ROUNDS, learned), (1 + 2 * len(SETTINGS), _sample(learned)), (1 + MAX_REPORTED, held)
    progress("", 0, sum(times * len(r.output) for times, part in parts_of for r in part))
    width = max(len(r.prompt) + len(r.output) for r in records)

    def each(
        doing: str, parts: Sequence[Sequence[Record]], tables: Sequence[_Table], **settings: float
    ) -> list[ReplayCounts]:
        config = DrafterConfig(**settings)  # type: ignore[arg-type]
        told = partial(progress, doing)
        pairs = zip(parts, tables, strict=True)
        return [observe(part, t.survival, width, config, t.calibration, told) for part, t in pairs]

    shipped = _Table.shipped()
    known = np.minimum(shipped.survival / SURVIVAL_ONE, 1.0)
    table, parts = shipped, in_parts(learned)
    for _ in range(NUM_ROUNDS):
        shown = each("learning", parts, [_Table(table.survival)] * len(parts))
        found = _sum(shown)
        curves = relearn(found.runs, known)
        table = _Table.of(curves)
    # What is chosen among is tried on requests that it was not learned from.
    unseen = [_Table.of(relearn(found.runs - part.runs, known)) for part in shown]
    parts = [_sample(part, MAX_CHOICE_TOKENS // len(parts)) for part in parts]
    sample = [record for part in parts for record in part]
    uncalibrated = _Table(shipped.survival)
    [first] = each("choosing", [sample], [uncalibrated])
    most = point_of(first).rejected_per_accepted

    def choose(tables: Sequence[_Table]) -> _Choice:
        tried = {s: _sum(each("choosing", parts, tables, **_settings(s))) for s in SETTINGS}
        return _Choice.of(tried, most)

    choice, plain = choose(unseen), choose([uncalibrated] * len(parts))
    if plain.value >= choice.value:
        # These requests teach nothing that holds for others of them.
        choice, curves, table, unseen = plain, known, shipped, [uncalibrated] * len(parts)
    calibration = calibrate(choice.observed.drafts, shipped.calibration)
    table = _Table(table.survival, tuple(calibration))

    def report(table: _Table, **settings: float) -> Point:
        return point_of(each("reporting", [held], [table], **settings)[0])

    settings, before = _settings(choice.setting), report(shipped)
    after = {s: report(table, **_settings(s)) for s in choice.reported}
    equal = at_rejections(list(after.values()), before.rejected_per_accepted)
    told = Report(len(learned), len(held), before, after[choice.setting], equal, settings)
    made = make_table(at_knots(curves), calibration, found.runs.sum(axis=1), len(learned), MADE_BY, settings)
    return Tuned(made, told)


@dataclass(frozen=True)
class _Table:
    """Survival, [C, K], that a drafter chooses by, and offsets of its confidences."""

    survival: IntArray
    calibration: tuple[float, ...] = (0.0,) * NUM_BINS

    @classmethod
    def of(cls, curves: Array) -> _Table:
        """The table of these curves, as it is written to a file and read from it."""
        return cls(fit_curves(at_knots(curves).astype(np.float64), NUM_DRAFT_TOKENS))

    @classmethod
    def shipped(cls) -> _Table:
        knots, calibration = read_survival(SHIPPED)
        return cls(fit_curves(knots, NUM_DRAFT_TOKENS), calibration)


class _Choice(NamedTuple):
    """Settings, and what they came to."""

    setting: tuple[float, float]  #: the one that rejects as much as is allowed
    reported: list[tuple[float, float]]  #: it and its neighbours
    observed: ReplayCounts  #: with it
    value: float  #: tokens a step at the rejections that are allowed

    @classmethod
    def of(cls, tried: Mapping[tuple[float, float], ReplayCounts], most: float) -> _Choice:
        """Choose among the settings that no other one beats in both. most: rejected drafts per accepted one."""
        points = {setting: point_of(observed) for setting, observed in tried.items()}
        front: dict[tuple[float, float], Point] = {}
        for setting, point in sorted(points.items(), key=lambda p: (p[1].rejected_per_accepted, p[1].steps)):
            if all(point.steps < other.steps for other in front.values()):
                front[setting] = point
        settings = list(front)
        last = max(0, sum(point.rejected_per_accepted <= most for point in front.values()) - 1)
        first = max(0, min(last - 1, len(settings) - MAX_REPORTED))
        value = at_rejections(list(front.values()), most)
        reported = settings[first:][:MAX_REPORTED]
        return cls(settings[last], reported, tried[settings[last]], 0.0 if value is None else value)


def _sum(found: Sequence[ReplayCounts]) -> ReplayCounts:
    return ReplayCounts(*(sum(arrays[1:], arrays[0]) for arrays in zip(*found, strict=True)))


def _settings(setting: tuple[float, float]) -> dict[str, float]:
    return {"length_factor": setting[0], "min_survival": setting[1]}


def _sample(records: Sequence[Record], most: int = MAX_CHOICE_TOKENS) -> list[Record]:
    """Every n-th, with the smallest n that keeps their outputs within so many tokens; at least one."""
    parts = (list(records[::every]) for every in range(1, len(records) + 1))
    return next((part for part in parts if sum(len(r.output) for r in part) <= most), list(records[:1]))
