"""What a server tells: metrics, which count what they say and are all on the dashboard; the line at its start and
those of `GPU_ALIGN_VERBOSE`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import prometheus_client
import pytest

import gpu_align
from tests.vllm.clients import moved, samples_of
from tests.vllm_integration.fakes import Step, config, message
from vllm_integration.config import in_use
from vllm_integration.frontend import metrics, prediction, usage
from vllm_integration.frontend.middleware import announce
from vllm_integration.frontend.usage import Collector
from vllm_integration.seams import install as compat
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import REFUSALS
from vllm_integration.wire.steps import FAULTS, HEADER

pytestmark = pytest.mark.usefixtures("defaults")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "_engine", config(32, max_num_seqs=64, v2=True))


# --- metrics ---

DASHBOARD = ROOT / "docs" / "deploy" / "grafana" / "dashboards" / "gpu_align.json"
#: What Prometheus adds to the name of a metric of each kind.
SUFFIXES = {"Gauge": ("",), "Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count")}
SAMPLES = {spec.name + suffix: spec for spec in metrics.SPECS.values() for suffix in SUFFIXES[spec.kind]}


def metrics_now() -> Counter[str]:
    return samples_of(prometheus_client.generate_latest().decode())


def count(collector: Collector, req_id: str, text: str, tokens: int) -> None:
    """An output of so many tokens that came with a message."""
    output = SimpleNamespace(request_id=req_id, new_token_ids=[5] * tokens)
    collector.count([(output, text)], collector.requests)


def test_a_request_moves_every_counter_by_what_happened() -> None:
    own = Collector()
    metrics.create()
    metrics.count_request(None)
    before = metrics_now()
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
        Step(1, 4, 4, 0),  # rejected again
        Step(1, 4, 4, 4),  # back in the prediction
    ]
    for step in steps:
        count(own, "a", message([step]), step.accepted + 1)
    count(own, "a", message([Step(1, 4, 4, 4)]), 3)  # a stop string cuts two of its tokens
    count(own, "b", message([], own=False, refused=REFUSALS.index("tokens")), 1)
    own.end("a")
    own.end("b")
    found = moved(before, metrics_now())
    assert {n: by for n, by in found.items() if not re.search("_bucket{|_created", n)} == pytest.approx(
        {  # what other tests have added is no binary fraction
            "gpu_align_requests_total": 1,
            "gpu_align_prediction_length_tokens_sum": 30,
            "gpu_align_prediction_length_tokens_count": 1,
            "gpu_align_steps_total": 9,
            'gpu_align_steps_lost_total{reason="no_draft"}': 2,
            'gpu_align_steps_lost_total{reason="no_slots"}': 1,
            'gpu_align_drafts_total{source="prediction"}': 4,
            'gpu_align_drafts_total{source="context"}': 1,
            'gpu_align_draft_tokens_total{source="prediction",verdict="accepted"}': 12,
            'gpu_align_draft_tokens_total{source="prediction",verdict="rejected"}': 8,
            'gpu_align_draft_tokens_total{source="context",verdict="accepted"}': 1,
            'gpu_align_draft_tokens_total{source="context",verdict="rejected"}': 1,
            'gpu_align_prediction_tokens_total{verdict="accepted"}': 12,
            'gpu_align_prediction_tokens_total{verdict="rejected"}': 8,
            "gpu_align_accepted_length_tokens_count": 5,
            "gpu_align_accepted_length_tokens_sum": 13,
            "gpu_align_acceptance_ratio_count": 1,
            "gpu_align_acceptance_ratio_sum": 12 / 20,
            "gpu_align_realignments_total": 1,
            'gpu_align_predictions_refused_total{action="truncated",reason="tokens"}': 1,
        }
    )


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    found = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in found["templating"]["list"][1:]]
    shown = {name for query in queries for name in re.findall(r"\bgpu_align_\w+", query)}
    assert shown <= set(SAMPLES)
    assert {SAMPLES[name].name for name in shown} == {spec.name for spec in metrics.SPECS.values()}


@pytest.mark.parametrize(("level", "lines"), [(False, 0), (True, 2)])
def test_a_line_for_each_request_where_it_is_asked_for(info_log: list[str], level: bool, lines: int) -> None:
    """GPU_ALIGN_VERBOSE: ids, escaped, and counts."""
    collector = Collector(verbose=level)
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


# --- the line at the start ---


def test_a_setting_cannot_break_the_line_that_says_what_the_server_is(
    info_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", "/x\nERROR y" + "z" * 5000)
    announce()
    (line,) = info_log
    assert r"/x\nERROR yzz" in line
    assert "GPU_ALIGN_MAX_SLOWDOWN" not in line
    assert "\n" not in line
    assert len(line) < 2100


def test_a_server_says_what_it_is(info_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, and as labels of a metric; one of another drafter, or one that is off, says nothing."""
    import vllm

    monkeypatch.setenv("GPU_ALIGN_STRICT_LIMITS", "1")
    announce()
    endpoints = ", ".join(prediction.ENDPOINTS[:-1])
    (line,) = info_log
    assert line == (
        f"gpu_align {gpu_align.__version__} drafts on vLLM {vllm.__version__}, V2 model runner, K=32; "
        f"`prediction` on {endpoints}; recipes: off; no response memory; "
        "settings: GPU_ALIGN_STRICT_LIMITS=1 GPU_ALIGN_RECIPES=off"
    )
    labels = {"version": gpu_align.__version__, "vllm": vllm.__version__, "runner": "V2", "recipes": ""}
    labels |= {"num_draft_tokens": "32", "drafter": "", "max_num_seqs": "64"}
    assert prometheus_client.REGISTRY.get_sample_value("gpu_align_info", labels) == 1
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    announce()
    monkeypatch.setattr(compat, "_off_reason", None)
    monkeypatch.setattr(in_use, "_engine", None)
    announce()
    assert len(info_log) == 1


class Processor:
    """Of the outputs of one request."""

    request_states: ClassVar = {"r": None}


def test_a_worker_that_has_turned_drafting_off_is_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """And why, also of an extra. It comes with any request's output. What another engine of this process tells
    takes nothing of it away."""
    announce()
    other = Processor()
    request, processor = SimpleNamespace(request_id="r"), Processor()
    told = []
    why = "RuntimeError at drafter.py:1 propose"
    for faults in ({}, {"drafting": why}, {"step log": why}, {}):
        header = {HEADER: message([Step(0, 0, 0, 0)]), FAULTS: json.dumps(faults)}
        output = SimpleNamespace(**vars(request), trace_headers=header, new_token_ids=[1], finished=False)
        usage.process_outputs(lambda self, outputs: None, processor, [output])
        output_of_other = SimpleNamespace(**{**vars(output), "trace_headers": {FAULTS: "{}"}})
        usage.process_outputs(lambda self, outputs: None, other, [output_of_other])
        gauge = prometheus_client.REGISTRY.get_sample_value("gpu_align_enabled")
        assert output.trace_headers is None
        assert metrics.all_faults() == faults
        for part in ("drafting", "step log"):
            labels = {"part": part, "reason": why}
            shown = prometheus_client.REGISTRY.get_sample_value("gpu_align_fault", labels)
            assert (shown or 0) == (part in faults)
        told.append((metrics.off_reason(), gauge))
    assert told == [(None, 1), (why, 0), (None, 1), (None, 1)]
    for reason, gauge in (("a seam is missing", 0), (None, 1)):  # from its start
        monkeypatch.setattr(compat, "_off_reason", reason)
        announce()
        assert prometheus_client.REGISTRY.get_sample_value("gpu_align_enabled") == gauge


def test_each_way_to_refuse_a_prediction_is_a_label() -> None:
    reasons = {reason for reason, _ in metrics.REFUSED}
    assert {name for name in REFUSALS if name} <= reasons
