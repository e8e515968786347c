"""Nothing is compiled for a request: what drafters and the step log need is compiled while the server starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_align.ops import jit as _jit
from gpu_align.ops.reference import step as step_reference
from gpu_align.ops.step import StepLaunch
from gpu_align.tools import explain as step_view
from vllm_integration.seams import install as compat
from vllm_integration.worker import proposer_v1
from vllm_integration.worker import startup as warm_up

pytestmark = pytest.mark.usefixtures("plugin_on")
compiled_only = pytest.mark.skipif(not _jit.COMPILED, reason="needs Numba")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What `Entry` compiles, or loads, from now on, as in a process that has just started: function → times."""
    for entry in (step_reference.step, step_view._look):
        monkeypatch.setattr(entry, "_run", None)
    return count_compilations(monkeypatch)


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    compile_entry = _jit.Entry._compile

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self._function.__name__] += 1
        return compile_entry(self, *args, **kwargs)

    monkeypatch.setattr(_jit.Entry, "_compile", counted)
    return counts


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The plugin's log lines from INFO up."""
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = compat.logger.level
    compat.logger.addHandler(handler)
    compat.logger.setLevel(logging.INFO)
    yield found
    compat.logger.removeHandler(handler)
    compat.logger.setLevel(level)


def first_request_of_v1(
    directory: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> tuple[dict[str, int], dict[str, int], str]:
    """What was compiled when the runner had loaded its model, and when a request had finished; its step log."""
    from vllm_fakes import FakeEngine, config, sampling

    from vllm_integration.wire.request import PredictedOutputParams
    from vllm_integration.worker.proposer_v1 import PredictedOutputs

    monkeypatch.setattr(proposer_v1, "install", lambda group: "")
    monkeypatch.setattr(proposer_v1, "watch", lambda: None)
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(directory))
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "off")
    ours = PredictedOutputs(config(K=4))
    ours.load_model()
    at_start = dict(counts)
    engine = FakeEngine(ours)
    output = [5, 6, 7, 8, 9, 10]
    params = PredictedOutputParams(token_ids=output)
    engine.submit("a", [1, 2], output, sampling(params.to_extra_args()))
    for _ in range(3):
        engine.step()
    engine.step(finished=("a",))
    assert engine.usage["a"].drafted > 0
    return at_start, dict(counts), " ".join((directory / "a.yaml").read_text().split())


@compiled_only
def test_the_first_request_of_v1_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    at_start, in_all, log = first_request_of_v1(tmp_path, monkeypatch, compilations)
    assert at_start == {"step": 1, "_look": 1}
    assert in_all == at_start
    assert "the output so far is the beginning of the prediction" in log


@compiled_only
def test_without_a_step_log_its_part_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    from vllm_fakes import config

    monkeypatch.setattr(proposer_v1, "install", lambda group: "")
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "off")
    monkeypatch.delenv("GPU_ALIGN_DEBUG_DIR", raising=False)
    proposer_v1.PredictedOutputs(config()).load_model()
    assert compilations == {"step": 1}


def in_another_process(directory: Path, first: str = "", **environment: str) -> tuple[Any, Any, str]:
    code = f"""{first}
import json, sys, pytest
from pathlib import Path
from tests.vllm_integration.test_vllm_warm_up import count_compilations, first_request_of_v1
with pytest.MonkeyPatch.context() as patch:
    print(json.dumps(first_request_of_v1(Path(sys.argv[1]), patch, count_compilations(patch))))"""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "vllm_integration")))
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    at_start, in_all, log = json.loads(done.stdout)
    return at_start, in_all, log


@compiled_only
def test_nothing_is_compiled_after_the_start_with_an_empty_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    at_start, in_all, _ = in_another_process(tmp_path / "logs", NUMBA_CACHE_DIR=str(cache))
    assert in_all == at_start == {"step": 1, "_look": 1}
    assert len(list(cache.rglob("*.nbc"))) == 2


def test_without_numba_nothing_is_compiled_and_the_log_is_the_same(tmp_path: Path) -> None:
    without = "import sys; sys.modules['numba'] = None"
    at_start, in_all, log = in_another_process(tmp_path / "logs", without)
    assert at_start == in_all == {}
    assert "the output so far is the beginning of the prediction" in log


def test_the_first_request_of_v2_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: Counter[str]
) -> None:
    pytest.importorskip("vllm")
    from test_vllm_speculator import DEVICE, batch_of, params_of, write
    from test_vllm_speculator import make_speculator as fixture

    launches: list[StepLaunch] = []
    launch = StepLaunch.__call__

    def counted(self: StepLaunch, *args: Any) -> None:
        launches.append(self)
        launch(self, *args)

    monkeypatch.setattr(StepLaunch, "__call__", counted)
    make_speculator = fixture.__wrapped__(monkeypatch)
    monkeypatch.setenv("GPU_ALIGN_DEBUG_DIR", str(tmp_path))
    speculator = make_speculator()
    assert len(launches) == 1  # which compiles the kernel
    kernel = launches[0]._compiled
    speculator.init_cudagraph_manager(None)
    at_start = dict(compilations)
    assert at_start == ({"_look": 1} if _jit.COMPILED else {})
    assert speculator.drafter.prediction_stats.num_predictions == 0
    params = params_of([5, 6, 7, 8, 9])
    params.stop_token_ids, params.eos_token_id, params.max_tokens, params.min_tokens = [], None, None, 0
    write(speculator, 0, [1, 2, 5])
    speculator.add_request("r0", 0, 2, params)
    batch = batch_of([0])
    batch.num_draft_tokens_per_req = None
    drafts = speculator.propose(batch, num_sampled=torch.ones(1, dtype=torch.int32, device=DEVICE))
    assert drafts[0].tolist() == [6, 7, 8, 9]
    speculator.log.finish(["r0"])
    assert (tmp_path / "r0.yaml").exists()
    assert compilations == at_start
    assert launches[-1]._compiled is kernel


def test_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    with warm_up.compiling("nothing"):
        pass
    assert lines == []
    monkeypatch.setattr(warm_up, "QUIET", 0.01)
    with warm_up.compiling("the step"):
        while not lines:
            time.sleep(0.005)
        assert lines == ["gpu_align compiles the step; what is compiled is cached for the next start"]
    assert len(lines) == 2
    assert lines[1].startswith("gpu_align compiled the step in 0.")


@compiled_only
def test_who_needs_what_is_being_compiled_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _jit.Entry(lambda value: value)
    counts: list[bool] = []

    def slow(signature: Any, cache: bool) -> Any:
        counts.append(cache)
        time.sleep(0.05)
        return lambda value: value

    monkeypatch.setattr(entry, "_compile", slow)
    threads = [threading.Thread(target=entry, args=(1,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [True]
