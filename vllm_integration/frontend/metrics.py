"""Prometheus metrics of predictions, on vLLM's own `/metrics`. They count in the front-end processes, which
prometheus_client adds up (vLLM sets its multiprocess mode up for `--api-server-count` > 1)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import product
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from gpu_align.drafter.step_log import SOURCES
from gpu_align.texts import skeletons

from ..seams import guard, install
from ..wire.reports import DRAFTS
from ..wire.steps import Steps

#: Value of `gpu_align.Source`, and index in `SOURCES`.
PREDICTION = SOURCES.index("prediction")
#: Sources that draft, as the label says them.
DRAFTING = SOURCES[1:]
VERDICTS = ("accepted", "rejected")
LOST = ("no_draft", "no_slots")
#: What can happen to a prediction that is not used as it came, and why. "truncated": served with what fits.
#: "refused": an HTTP error, or an exception of the offline API. "dropped": the worker serves without it.
REFUSED = (
    *product(("characters", "tokens"), ("truncated", "refused")),
    *product(("bytes", "malformed", "unsupported"), ("refused",)),
    *product(("malformed", "room", "conversation"), ("dropped",)),
    *((f"skeleton_{reason}", "dropped") for reason in skeletons.REASONS),
    *product(("view",), ("truncated", "dropped")),
)

_LENGTHS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_SIZES = (16, 64, 256, 1024, 4096, 16384, 65536)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class _Spec(NamedTuple):
    """labels: of each the values that are there from the start, at 0, in every combination."""

    kind: str
    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    buckets: tuple[float, ...] = ()


_INFO = ("version", "vllm", "runner", "num_draft_tokens", "drafter", "max_num_seqs", "recipes")
_BY_VERDICT, _BY_SOURCE = {"verdict": VERDICTS}, {"source": DRAFTING}
_SPECS: dict[str, tuple[Any, ...]] = {
    "info": ("Gauge", "Always 1: what this server is, as labels.", dict.fromkeys(_INFO, ())),
    "enabled": ("Gauge", "1 while drafts are made, 0 while a part without which none are is off."),
    "fault": ("Gauge", "1 while a part of the plugin is off, and why.", {"part": (), "reason": ()}),
    "requests": ("Counter", "Requests that brought a prediction."),
    "predictions_refused": ("Counter", "Predictions not taken whole.", {"reason": (), "action": ()}),
    "prediction_tokens": ("Counter", "Tokens of predictions that were verified.", _BY_VERDICT),
    "draft_tokens": ("Counter", "Draft tokens that were verified.", _BY_SOURCE | _BY_VERDICT),
    "drafts": ("Counter", "Steps that verified drafts, by their source.", _BY_SOURCE),
    "steps": ("Counter", "Model passes that wrote tokens of a request that is drafted for."),
    "steps_lost": (
        "Counter",
        "Steps after a request's first that verified no draft: none was made, or it got no draft slots.",
        {"reason": LOST},
    ),
    "realignments": ("Counter", "Times drafts from a prediction were accepted again after rejected ones."),
    "accepted_length_tokens": ("Histogram", "Drafts accepted in a step that verified some.", {}, _LENGTHS),
    "prediction_length_tokens": ("Histogram", "Tokens of a prediction.", {}, _SIZES),
    "acceptance_ratio": (
        "Histogram",
        "Accepted of the verified prediction tokens of a choice that verified some.",
        {},
        _RATIOS,
    ),
}
#: Every metric, by its name without `gpu_align_`. `docs/metrics.md` and the dashboard show the same.
SPECS = {name: _Spec(kind, f"gpu_align_{name}", *spec) for name, (kind, *spec) in _SPECS.items()}

#: Of what the event loop and the threads that read requests both write.
_lock = RLock()


def set_info(**facts: object) -> None:
    """Set the facts about this server; equal in all of its front ends."""
    _get("info").labels(*(facts[name] for name in _INFO)).set(1)


#: Parts of the plugin that are off, by the output processor of the engine that told so, and what the metric shows.
_engine_faults: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()
_shown_faults: set[tuple[str, str]] = set()


def all_faults() -> dict[str, str]:
    """The parts of the plugin that are off in an engine or in this process, and why."""
    told = [*_engine_faults.values()]
    return {part: reason for faults in (*told, guard.faults()) for part, reason in faults.items()}


def off_reason() -> str | None:
    """Why nothing is drafted, as far as this process knows; None where something is."""
    found = all_faults()
    return install.off_reason() or next((found[part] for part in DRAFTS if part in found), None)


def show_faults(engine: Any = None, told: Mapping[str, str] | None = None) -> None:
    """Show which parts are off. told: those of this engine."""
    with _lock:
        if told is not None:
            _engine_faults[engine] = told
        _get("enabled").set(int(off_reason() is None))
        found = set(all_faults().items())
        for part, reason in found ^ _shown_faults:
            _get("fault").labels(part, reason).set(int((part, reason) in found))
        _shown_faults.clear()
        _shown_faults.update(found)


def count_refused(reason: str, action: str) -> None:
    """A prediction was not taken whole. Both are of a few fixed words, they become labels."""
    _get("predictions_refused").labels(reason, action).inc()


def count_request(prediction_length: int | None) -> None:
    """A request with a prediction has arrived; its length in tokens, if it is known here."""
    _get("requests").inc()
    if prediction_length is not None:
        _get("prediction_length_tokens").observe(prediction_length)


def count_steps(steps: Steps, *, firsts: int, realignments: int) -> None:
    """Steps of any requests. firsts: how many of them were the first of their request, which has no drafts."""
    _get("steps").inc(len(steps.verified))
    verifying = steps.verified > 0
    no_slots = int(np.count_nonzero(steps.length[~verifying]))
    no_draft = int(np.count_nonzero(~verifying)) - no_slots - firsts
    for reason, amount in zip(LOST, (no_draft, no_slots), strict=True):
        if amount > 0:
            _get("steps_lost").labels(reason).inc(amount)
    columns = (steps.source, steps.verified, steps.accepted)
    source, verified, accepted = (column[verifying] for column in columns)
    for number in np.unique(source).tolist():
        of_source = source == number
        name, right = SOURCES[number], int(accepted[of_source].sum())
        wrong = int(verified[of_source].sum()) - right
        _get("drafts").labels(name).inc(int(of_source.sum()))
        for verdict, amount in zip(VERDICTS, (right, wrong), strict=True):
            _get("draft_tokens").labels(name, verdict).inc(amount)
            if number == PREDICTION:
                _get("prediction_tokens").labels(verdict).inc(amount)
    _observe(_get("accepted_length_tokens"), accepted, _LENGTHS)
    if realignments:
        _get("realignments").inc(realignments)


def _observe(histogram: Any, values: npt.NDArray[np.integer[Any]], bounds: Sequence[float]) -> None:
    """`histogram.observe` of every value, by one addition a bucket: prometheus_client has no call for many."""
    buckets = np.bincount(np.searchsorted(bounds, values), minlength=1)
    for index in np.flatnonzero(buckets).tolist():
        histogram._buckets[index].inc(int(buckets[index]))
    histogram._sum.inc(int(values.sum()))


def count_finished(accepted: int, rejected: int) -> None:
    """A choice has ended: so many tokens of its prediction were accepted, and so many rejected."""
    if accepted + rejected:
        _get("acceptance_ratio").observe(accepted / (accepted + rejected))


def _get(name: str) -> Any:
    with _lock:
        return create()[name]


@functools.cache
def create() -> dict[str, Any]:
    """Make all metrics, at 0."""
    # Late: prometheus_client decides when it is imported whether this process is one of several.
    import prometheus_client

    made: dict[str, Any] = {}
    for name, spec in SPECS.items():
        more: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
        if spec.kind == "Gauge":
            # One value for all processes.
            more["multiprocess_mode"] = "min" if name == "enabled" else "max"
        make = getattr(prometheus_client, spec.kind)
        made[name] = metric = make(spec.name, spec.help, labelnames=tuple(spec.labels), **more)
        for values in product(*spec.labels.values()) if spec.labels else ():
            metric.labels(*values)
    for refused in REFUSED:
        made["predictions_refused"].labels(*refused)
    made["enabled"].set(1)
    return made
