"""The metrics count what they say, and the dashboard and the page show all of them and no others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import prometheus_client
import pytest

from tests.vllm_integration.fakes import Step, count, message
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import metrics, usage
from vllm_integration.frontend.usage import Collector
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import REFUSALS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "deploy" / "grafana" / "dashboards" / "gpu_align.json"
#: What Prometheus adds to the name of a metric of each kind.
SUFFIXES = {"Gauge": ("",), "Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count")}
SAMPLES = {spec.name + suffix: spec for spec in metrics.SPECS.values() for suffix in SUFFIXES[spec.kind]}


def values() -> Counter[str]:
    found: Counter[str] = Counter()
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("gpu_align_") and not sample.name.endswith("_created"):
                labels = ",".join(v for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value  # type: ignore[assignment]
    return found


def moved(before: Counter[str]) -> dict[str, float]:
    return {
        name: value - before[name]
        for name, value in values().items()
        if value != before[name] and "_bucket{" not in name
    }


def test_a_request_moves_every_counter_by_what_happened() -> None:
    own = Collector()
    metrics.create()
    metrics.count_request(None)
    before = values()
    http = usage.http_request.set(usage.HttpRequest(wire.Prediction()))
    own.follow("a", wire.Prediction(b"\1\0\0\0" * 30))
    own.follow("b", wire.Prediction(b"\1\0\0\0" * 30))  # another choice of it
    usage.http_request.reset(http)
    steps = [
        Step(0, 0, 0, 0),  # the prefill
        Step(1, 8, 8, 5),
        Step(0, 0, 0, 0),  # nothing found
        Step(0, 0, 0, 0),
        Step(1, 8, 0, 0),  # no slots
        Step(2, 2, 2, 1),
        Step(1, 4, 4, 4),  # back in the prediction
        Step(1, 4, 4, 4),
    ]
    for step in steps:
        count(own, "a", message([step]), step.accepted + 1)
    refused = message([], own=False, refused=REFUSALS.index("tokens"))
    count(own, "b", refused, 1)
    own.end("a")
    own.end("b")
    assert moved(before) == pytest.approx(
        {  # what other tests have added is no binary fraction
            "gpu_align_requests_total{}": 1,
            "gpu_align_prediction_length_tokens_sum{}": 30,
            "gpu_align_prediction_length_tokens_count{}": 1,
            "gpu_align_steps_total{}": 8,
            "gpu_align_steps_lost_total{no_draft}": 2,
            "gpu_align_steps_lost_total{no_slots}": 1,
            "gpu_align_drafts_total{prediction}": 3,
            "gpu_align_drafts_total{context}": 1,
            "gpu_align_draft_tokens_total{prediction,accepted}": 13,
            "gpu_align_draft_tokens_total{prediction,rejected}": 3,
            "gpu_align_draft_tokens_total{context,accepted}": 1,
            "gpu_align_draft_tokens_total{context,rejected}": 1,
            "gpu_align_prediction_tokens_total{accepted}": 13,
            "gpu_align_prediction_tokens_total{rejected}": 3,
            "gpu_align_accepted_length_tokens_count{}": 4,
            "gpu_align_accepted_length_tokens_sum{}": 14,
            "gpu_align_acceptance_ratio_count{}": 1,
            "gpu_align_acceptance_ratio_sum{}": 13 / 16,
            "gpu_align_realignments_total{}": 1,
            "gpu_align_predictions_refused_total{truncated,tokens}": 1,
        }
    )


def test_rejected_again_is_not_back_and_what_a_stop_string_cut_is_not_accepted() -> None:
    own, before = Collector(), values()
    own.follow("a", wire.Prediction(token_ids=b"\1\0\0\0" * 9))
    for accepted, kept in ((1, 2), (0, 1), (4, 3)):
        count(own, "a", message([Step(1, 4, 4, accepted)]), kept)
    assert own.requests["a"].of_prediction == (4, 8)
    assert moved(before)["gpu_align_realignments_total{}"] == 1


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    found = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in found["templating"]["list"][1:]]
    shown = {name for query in queries for name in re.findall(r"\bgpu_align_\w+", query)}
    assert shown <= set(SAMPLES)
    assert {SAMPLES[name].name for name in shown} == {spec.name for spec in metrics.SPECS.values()}


@pytest.mark.parametrize(("level", "lines"), [(0, 0), (1, 2), (2, 6)])
def test_a_line_for_each_request_or_step_by_level(
    info_log: list[str], monkeypatch: pytest.MonkeyPatch, level: int, lines: int
) -> None:
    """GPU_ALIGN_VERBOSE: ids, escaped, and counts."""
    monkeypatch.setattr(usage, "_settings", lambda: Settings(verbose=level))
    collector = Collector()
    collector.follow("a", wire.Prediction(token_ids=b"\1\0\0\0" * 30))
    steps = [Step(0, 0, 0, 0), Step(1, 16, 16, 13), Step(1, 4, 0, 0), Step(2, 2, 2, 1)]
    # Three of them come with one output.
    for some, kept in ((steps[:3], 18), (steps[3:], 2)):
        count(collector, "a", message(some), kept)
    collector.follow("c\nERROR d", wire.Prediction(token_ids=b""))
    for req_id in ("a", "a", "c\nERROR d"):  # an id that a client chose
        collector.end(req_id, aborted="d" in req_id)
    assert len(info_log) == lines
    assert all(line.isprintable() for line in info_log)
    assert not level or "20 tokens in 4 steps" in info_log[-2]
    assert not level or r"c\nERROR d aborted" in info_log[-1]
