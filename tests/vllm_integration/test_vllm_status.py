"""The line at the start, `gpu_align_info`, `GET /gpu_align/status`; what is 0 on `/metrics` from the start."""

from __future__ import annotations

import asyncio
import json
import os
import re
from argparse import Namespace
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import multiprocess

import gpu_align
from tests.vllm_integration.fakes import Step, engine_of, message
from vllm_integration.config import in_use
from vllm_integration.frontend import metrics, prediction, status
from vllm_integration.frontend import usage as usage_collector
from vllm_integration.frontend.usage import _BY_THE_WORKER, Collector
from vllm_integration.seams import install as compat
from vllm_integration.wire.reports import REFUSALS
from vllm_integration.wire.steps import FAULTS, HEADER

pytestmark = pytest.mark.usefixtures("plugin_on", "defaults")

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPU_ALIGN_") or name == "VLLM_API_KEY"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "off")
    monkeypatch.setattr(in_use, "_engine", engine_of(32, max_num_seqs=64))


def models() -> dict[str, str]:
    return {}


def app_with(keys: list[str] | None = None, plugins: str = "gpu_align") -> Any:
    """vLLM's own endpoint plugins and middleware around an application."""
    pytest.importorskip("vllm")
    from fastapi import FastAPI
    from vllm import envs
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
    from vllm.plugins.endpoint_plugins import interface

    from vllm_integration.frontend.middleware import init_entrypoints_middleware as ours

    args = Namespace(
        api_key=keys,
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        enable_request_id_headers=False,
        middleware=[],
    )
    app = FastAPI()
    app.add_api_route("/v1/models", models, methods=["GET"])
    section = re.search(r'\."(vllm.endpoint_plugins)"]\n(\w+) = "(\S+)"', PYPROJECT.read_text())
    assert section is not None
    group, name, value = section.groups()
    found = {group: [metadata.EntryPoint(name, value, group)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda group: found[group])
        patch.setattr(envs, "VLLM_PLUGINS", [plugins], raising=False)
        interface.attach_endpoint_plugins(app, ("generate",))
    ours(lambda *given: init_entrypoints_middleware(*given, ()), args, app)
    asyncio.run(interface.init_endpoint_plugins_state(None, app.state, args))
    return app


def get(app: Any, path: str = status.PATH, key: str | None = None, scheme: str = "Bearer") -> Any:
    from fastapi.testclient import TestClient

    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    return TestClient(app).get(path, headers=headers)


def test_a_setting_cannot_break_the_line_that_says_what_the_server_is(
    info_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", "/x\nERROR y" + "z" * 5000)
    app_with()
    (line,) = info_log
    assert r"/x\nERROR yzz" in line
    assert "GPU_ALIGN_SURE" not in line
    assert "\n" not in line
    assert len(line) < 2100


def test_the_models_own_drafter_is_in_the_line_and_in_the_status(
    info_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use.note_engine(engine_of(32, method="mtp", **{in_use.INNER: 3}))
    app = app_with()
    (line,) = info_log
    assert "K=32; other requests by mtp, 3 tokens; `prediction` on" in line
    assert get(app).json()["drafter"] == "mtp, 3 tokens"


def test_the_status_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_STRICT_LIMITS", "1")
    after = get(app_with()).json()
    vllm_version = after.pop("vllm")
    assert vllm_version
    assert after == {
        "version": gpu_align.__version__,
        "on": True,
        "off_reason": None,
        "faults": {},
        "runner": "V2",
        "num_draft_tokens": 32,
        "drafter": None,
        "max_num_seqs": 64,
        "endpoints": [*prediction.ENDPOINTS[:-1]],
        "recipes": [],
        "memory_tokens": 0,
        "settings": {"GPU_ALIGN_RECIPES": "off", "GPU_ALIGN_STRICT_LIMITS": True},
    }
    monkeypatch.setattr(compat, "_off_reason", "a seam is missing")
    off = get(app_with()).json()
    assert (off["on"], off["off_reason"]) == (False, "a seam is missing")


def test_a_worker_that_has_turned_drafting_off_is_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """And why, also of an extra. It comes with any request's output, and is on `/metrics` too."""
    app = app_with()
    monkeypatch.setattr(usage_collector, "collector", Collector())
    request, processor = SimpleNamespace(request_id="r"), SimpleNamespace(request_states={"r": None})
    told = []
    why = "RuntimeError at drafter.py:1 propose"
    for faults in ({}, {"drafting": why}, {"step log": why}, {}):
        header = {HEADER: message([Step(0, 0, 0, 0)]), FAULTS: json.dumps(faults)}
        output = SimpleNamespace(**vars(request), trace_headers=header, new_token_ids=[1], finished=False)
        usage_collector.process_outputs(lambda self, outputs: None, processor, [output])
        found = get(app).json()
        gauge = prometheus_client.REGISTRY.get_sample_value("gpu_align_enabled")
        assert output.trace_headers is None
        assert found["faults"] == faults
        for part in ("drafting", "step log"):
            labels = {"part": part, "reason": why}
            shown = prometheus_client.REGISTRY.get_sample_value("gpu_align_fault", labels)
            assert (shown or 0) == (part in faults)
        told.append((found["on"], found["off_reason"], gauge))
    assert told == [(True, None, 1), (False, why, 0), (True, None, 1), (True, None, 1)]
    for reason, gauge in (("a seam is missing", 0), (None, 1)):  # from its start
        monkeypatch.setattr(compat, "_off_reason", reason)
        app_with()
        assert prometheus_client.REGISTRY.get_sample_value("gpu_align_enabled") == gauge


def test_the_status_is_behind_the_servers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path that vLLM guards, with each way to give it keys."""
    app = app_with(["one", "two"])
    for path in (status.PATH, "/v1/models"):
        for key in (None, "", "three", "on", "one two"):
            answer = get(app, path, key)
            assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"}), (path, key)
        assert get(app, path, "one", scheme="Basic").status_code == 401
        assert [get(app, path, key).status_code for key in ("one", "two")] == [200, 200]
    monkeypatch.setenv("VLLM_API_KEY", "four")
    app = app_with()
    assert [get(app, key=key).status_code for key in (None, "one", "four")] == [401, 401, 200]
    assert get(app_with(["one"]), key="four").status_code == 401, "--api-key comes first"
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert get(app_with([""])).status_code == 200, "an empty key is none"


def test_without_its_name_and_without_our_drafter_there_is_no_status(
    info_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get(app_with(plugins="another")).status_code == 404
    assert len(info_log) == 1
    monkeypatch.setattr(in_use, "_engine", None)
    assert get(app_with()).status_code == 404
    assert len(info_log) == 1


def test_each_way_to_refuse_a_prediction_is_a_label() -> None:
    known = set(metrics.REFUSED)
    assert {_BY_THE_WORKER[name] for name in REFUSALS if name} <= known


def as_one_of_several(directory: Path) -> list[str]:
    """What a fresh process of a server reads: at first, and when two others have counted."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue()
    for metric in metrics._metrics.values():
        prometheus_client.REGISTRY.unregister(metric)
    metrics._metrics.clear()
    facts = dict.fromkeys(metrics._INFO, 1)
    metrics.set_info(**facts)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    first = prometheus_client.generate_latest(registry).decode()
    for made in (2, 3):
        if not os.fork():
            metrics.set_info(**facts)
            for _ in range(made):
                metrics.count_request(10)
            metrics.count_refused("room", "dropped")
            metrics.show_faults({} if made == 2 else {"drafting": "why"})
            os._exit(0)
        os.wait()
    return [first, prometheus_client.generate_latest(registry).decode()]


def test_several_processes_are_one_server_and_every_label_is_there_from_the_start(tmp_path: Path) -> None:
    answer, logs = tmp_path / "answer", tmp_path / "metrics"
    logs.mkdir()
    if not (child := os.fork()):
        try:
            answer.write_text(json.dumps(as_one_of_several(logs)))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    first, text = json.loads(answer.read_text())
    lines = text.splitlines()
    assert "gpu_align_enabled 0.0" in lines, "one of them has heard of a worker that is off"
    assert 'gpu_align_fault{part="drafting",reason="why"} 1.0' in lines
    for line in ("requests_total 5.0", "prediction_length_tokens_sum 50.0"):
        assert f"gpu_align_{line}" in lines
    assert 'gpu_align_predictions_refused_total{action="dropped",reason="room"} 2.0' in lines
    zeros = {line.removesuffix(" 0.0") for line in first.splitlines() if line.endswith(" 0.0")}
    for spec in metrics.SPECS.values():
        name = spec.name + {"Counter": "_total", "Histogram": "_sum"}.get(spec.kind, "")
        values = metrics.REFUSED if spec.name.endswith("_refused") else [*product(*spec.labels.values())]
        for each in values if spec.kind != "Gauge" else ():
            pairs = sorted(zip(spec.labels, each, strict=True))
            labels = ",".join(f'{label}="{value}"' for label, value in pairs)
            assert (f"{name}{{{labels}}}" if labels else name) in zeros
    (info,) = [line for line in lines if line.startswith("gpu_align_info{")]
    assert info.endswith("} 1.0")
    for name in ("version", "vllm", "runner", "num_draft_tokens", "max_num_seqs", "recipes"):
        assert f'{name}="' in info
    assert "pid=" not in info
