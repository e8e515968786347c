"""Prometheus metrics of predictions, on vLLM's own `/metrics`.

They count in the front-end processes, from what came with the engine's outputs. prometheus_client adds the
processes up where there are several (vLLM sets its multiprocess mode up for `--api-server-count` > 1).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_align.step_log import SOURCES

from ..config.in_use import configured_here
from ..wire.steps import Steps
from ..wire.usage import PREDICTION
from . import prediction as limits

#: Sources that draft, as the label says them.
DRAFTING = SOURCES[1:]
VERDICTS = ("accepted", "rejected")
LOST = ("no_draft", "no_slots")

_LENGTHS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_SIZES = (16, 64, 256, 1024, 4096, 16384, 65536)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class _Spec(NamedTuple):
    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


#: What can happen to a prediction that is not used as it came, as labels.
REFUSED = (
    *(
        (reason, action)
        for reason in ("characters", "tokens", "parts", "nesting")
        for action in ("truncated", "refused")
    ),
    *((reason, "refused") for reason in ("bytes", "items", "malformed", "unsupported")),
    ("malformed", "dropped"),
    ("room", "dropped"),
)

#: Every metric, by the name this module knows it by. `docs/metrics.md` and the dashboard show the same.
SPECS = {
    "info": _Spec(
        "Gauge",
        "gpu_align_info",
        "Always 1: what this server is, as labels.",
        ("version", "vllm", "runner", "num_draft_tokens", "recipes"),
    ),
    "enabled": _Spec(
        "Gauge",
        "gpu_align_enabled",
        "1 while drafts are made, 0 once the plugin or a worker has turned them off.",
    ),
    "requests": _Spec("Counter", "gpu_align_requests", "Requests that brought a prediction."),
    "refused": _Spec(
        "Counter", "gpu_align_predictions_refused", "Predictions not taken whole.", ("reason", "action")
    ),
    "tokens": _Spec(
        "Counter", "gpu_align_prediction_tokens", "Tokens of predictions that were verified.", ("verdict",)
    ),
    "draft_tokens": _Spec(
        "Counter", "gpu_align_draft_tokens", "Draft tokens that were verified.", ("source", "verdict")
    ),
    "drafts": _Spec(
        "Counter", "gpu_align_drafts", "Steps that verified drafts, by their source.", ("source",)
    ),
    "steps": _Spec(
        "Counter", "gpu_align_steps", "Model passes that wrote tokens of a request that is drafted for."
    ),
    "lost": _Spec(
        "Counter",
        "gpu_align_steps_lost",
        "Steps after a request's first that verified no draft: none was made, or it got no draft slots.",
        ("reason",),
    ),
    "realignments": _Spec(
        "Counter",
        "gpu_align_realignments",
        "Times drafts from a prediction were accepted again after some had been rejected.",
    ),
    "accepted_length": _Spec(
        "Histogram",
        "gpu_align_accepted_length_tokens",
        "Drafts accepted in a step that verified some.",
        buckets=_LENGTHS,
    ),
    "prediction_length": _Spec(
        "Histogram", "gpu_align_prediction_length_tokens", "Tokens of a prediction.", buckets=_SIZES
    ),
    "acceptance_ratio": _Spec(
        "Histogram",
        "gpu_align_acceptance_ratio",
        "Accepted of the verified prediction tokens of a choice that verified some.",
        buckets=_RATIOS,
    ),
}

_metrics: dict[str, Any] = {}
#: Set where prometheus_client adds several processes up.
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def create_if_expected() -> None:
    """Make all metrics, at 0, where this process is a front end of an engine that drafts from predictions; from
    then on they count what `limits` does."""
    if configured_here():
        _get("requests")
        if count_refused not in limits.on_count:
            limits.on_count.append(count_refused)


def set_info(**labels: str) -> None:
    """What this server is; equal in all of its front ends."""
    _get("info").labels(**labels).set(1)


def set_enabled(value: bool) -> None:
    """Whether drafts are made, as far as this process knows."""
    _get("enabled").set(int(value))


def enabled() -> bool:
    """Whether drafts are made, as far as any process of the server knows."""
    return all(value for _, value in _samples().get("gpu_align_enabled", ()))


def read() -> dict[str, Any]:
    """What the counters and histograms count, summed over the processes of the server.

    Of a counter its value; with labels, a mapping for each. Of a histogram the `count` and the `sum`.
    """
    counts: dict[str, Any] = {}
    samples = _samples()
    for spec in SPECS.values():
        name = spec.name.removeprefix("gpu_align_")
        if spec.kind == "Counter":
            counts[name] = {} if spec.labels else 0
            for labels, value in samples.get(f"{spec.name}_total", ()):
                if not spec.labels:
                    counts[name] = value
                    continue
                place = counts[name]
                for label in spec.labels[:-1]:
                    place = place.setdefault(labels[label], {})
                place[labels[spec.labels[-1]]] = value
        elif spec.kind == "Histogram":
            counts[name] = {
                part: next((value for _, value in samples.get(f"{spec.name}_{part}", ())), 0)
                for part in ("count", "sum")
            }
    return counts


def _samples() -> dict[str, list[tuple[dict[str, str], float]]]:
    """Of each of our samples its labels and values."""
    from prometheus_client import CollectorRegistry, multiprocess

    families: Iterable[Any]
    if _MULTIPROCESS in os.environ:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        families = registry.collect()
    else:
        _get("requests")
        families = [family for metric in _metrics.values() for family in metric.collect()]
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        if family.name.startswith("gpu_align_"):
            for sample in family.samples:
                whole = int(sample.value) if sample.value == int(sample.value) else sample.value
                samples.setdefault(sample.name, []).append((sample.labels, whole))
    return samples


def count_refused(reason: str, action: str) -> None:
    """A prediction was not taken whole. Both are of a few fixed words, they become labels."""
    _get("refused").labels(reason, action).inc()


def count_request(prediction_length: int | None) -> None:
    """A request with a prediction has arrived; its length in tokens, if it is known here."""
    _get("requests").inc()
    if prediction_length is not None:
        _get("prediction_length").observe(prediction_length)


def count_steps(steps: Steps, *, firsts: int, realignments: int) -> None:
    """Steps of any requests. firsts: how many of them were the first of their request, which has no drafts."""
    _get("steps").inc(len(steps.verified))
    verifying = steps.verified > 0
    no_slots = int(np.count_nonzero(steps.length[~verifying]))
    no_draft = int(np.count_nonzero(~verifying)) - no_slots - firsts
    for reason, amount in zip(LOST, (no_draft, no_slots), strict=True):
        if amount > 0:
            _get("lost").labels(reason).inc(amount)
    source, verified, accepted = (
        field[verifying] for field in (steps.source, steps.verified, steps.accepted)
    )
    for number in np.unique(source).tolist():
        of_source = source == number
        name, right = SOURCES[number], int(accepted[of_source].sum())
        wrong = int(verified[of_source].sum()) - right
        _get("drafts").labels(name).inc(int(of_source.sum()))
        for verdict, amount in zip(VERDICTS, (right, wrong), strict=True):
            _get("draft_tokens").labels(name, verdict).inc(amount)
            if number == PREDICTION:
                _get("tokens").labels(verdict).inc(amount)
    _observe(_get("accepted_length"), accepted, _LENGTHS)
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
    if not _metrics:
        _create()
    return _metrics[name]


def _create() -> None:
    # Late: prometheus_client decides when it is imported whether this process is one of several.
    import prometheus_client

    for name, spec in SPECS.items():
        more: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
        if spec.kind == "Gauge":
            # One value for all processes.
            more["multiprocess_mode"] = "min" if name == "enabled" else "max"
        _metrics[name] = getattr(prometheus_client, spec.kind)(
            spec.name, spec.help, labelnames=spec.labels, **more
        )
    _metrics["enabled"].set(1)
    for reason, action in REFUSED:
        _metrics["refused"].labels(reason, action)
    for verdict in VERDICTS:
        _metrics["tokens"].labels(verdict)
        for source in DRAFTING:
            _metrics["draft_tokens"].labels(source, verdict)
    for source in DRAFTING:
        _metrics["drafts"].labels(source)
    for reason in LOST:
        _metrics["lost"].labels(reason)
