"""Nothing is compiled for a request: what drafters and the step log need is compiled while the server starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpu_align.ops import backend
from gpu_align.ops import jit as _jit
from gpu_align.ops.step import StepLaunch
from gpu_align.ops.step import reference as step_reference
from gpu_align.tools import explain as step_view
from tests.vllm_integration.fakes import FakeEngine, config, sampling, v1_alone
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker.proposer_v1 import PredictedOutputs

pytestmark = pytest.mark.usefixtures("plugin_on")
compiled_only = pytest.mark.skipif(not _jit.COMPILED, reason="needs Numba")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What `Entry` compiles, or loads, from now on, as in a process that has just started: function → times."""
    for entry in (step_reference.step_reference, step_view._look):
        monkeypatch.setattr(entry, "_run", None)
    counts: Counter[str] = Counter()
    compile_entry = _jit.Entry._compile

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self._function.__name__] += 1
        return compile_entry(self, *args, **kwargs)

    monkeypatch.setattr(_jit.Entry, "_compile", counted)
    return counts


@compiled_only
@pytest.mark.parametrize("logs", [True, False])
def test_the_first_request_of_v1_compiles_nothing(
    logs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    v1_alone(monkeypatch)
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path) if logs else "")
    ours = PredictedOutputs(config())
    at_start = {"step_reference": 1, **({"_look": 1} if logs else {})}
    assert compilations == at_start
    engine, output = FakeEngine(ours), [5, 6, 7, 8, 9, 10]
    engine.submit("a", [1, 2], output, sampling(PredictedOutputParams(token_ids=output).to_extra_args()))
    engine.step()
    assert engine.drafts["a"]
    engine.step()
    engine.step(finished=("a",))
    assert compilations == at_start
    if logs:
        log = " ".join((tmp_path / "a.yaml").read_text().split())
        assert "the output so far is the beginning of the prediction" in log


def test_the_first_request_of_v2_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    pytest.importorskip("vllm")
    from tests.vllm_integration.test_vllm_speculator import params_of, propose, speculators, write

    launches: list[StepLaunch] = []
    launch = StepLaunch.__call__

    def counted(self: StepLaunch, *args: Any) -> None:
        launches.append(self)
        launch(self, *args)

    monkeypatch.setattr(StepLaunch, "__call__", counted)
    make_speculator = speculators(monkeypatch)
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path))
    speculator = make_speculator()
    assert len(launches) == 2  # a step, which compiles the kernel, and a preparation
    kernels, at_start = dict(backend._compiled), dict(compilations)
    assert at_start == ({"_look": 1} if _jit.COMPILED else {})
    assert speculator.drafter.prediction_stats.num_predictions == 0
    params = params_of([5, 6, 7, 8, 9])
    vars(params).update(vars(sampling(params.extra_args)))
    write(speculator, 0, [1, 2, 5])
    speculator.add_request("r0", 0, 2, params)
    assert propose(speculator, [0])[0].tolist() == [6, 7, 8, 9]
    speculator.log.finish(["r0"])
    assert (tmp_path / "r0.yaml").exists()
    assert compilations == at_start
    assert backend._compiled == kernels
