"""The serving model: the trace says what the drafter does, the rules grant what they say, the sums are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.serving import beside
from benchmarks.serving import main as serving
from benchmarks.serving import page as tables
from benchmarks.serving.main import MIXES, ModelDrafts, Run, losses, simulate
from benchmarks.serving.rules import Batch, Budget, FixedK, Lengths, Plugin
from benchmarks.serving.step_cost import GPUS, MODELS, Measured, Roofline
from benchmarks.serving.trace import ONE, Trace, record_trace
from benchmarks.tables import DOCS, fill, read
from gpu_align.simulate import Record, make_policies, replay
from vllm_integration.config.settings import FILL_TOKENS, SURE

K = 4


def make_trace(lengths: list[int], matched: list[int]) -> Trace:
    """A trace by hand; survival falls by a tenth a draft."""
    n = len(lengths)
    curve = np.rint(0.9 ** np.arange(1, K + 1) * ONE)
    survival = np.where(np.arange(K) < np.array(lengths)[:, None], curve, 0).astype(np.uint16)
    return Trace(np.array([0, n]), np.array(lengths, np.int16), np.array(matched, np.int16), survival)


def edit_pair(length: int = 90) -> Record:
    rng = np.random.default_rng(length)
    prediction = rng.integers(0, 30, length).tolist()
    return Record("a", [], prediction, [*prediction[:40], 99, 98, *prediction[45:]])


def batch_of(survival: list[list[float]]) -> Batch:
    table = np.array([[round(p * ONE) for p in row] for row in survival], dtype=np.uint16)
    size = len(table)
    return Batch((table > 0).sum(axis=1), table, np.zeros(size, np.int64), np.ones(size, bool))


def test_a_trace_is_the_replay_of_the_drafter() -> None:
    record = edit_pair()
    trace = record_trace([record], K)
    [policy] = make_policies(["gpu_align"], [record], K)
    counted = replay(policy, record, K)
    run = simulate(trace, Lengths(), batch=1, min_steps=1)
    # One request starts anywhere; walk it from the first row instead.
    row, steps, accepted = 0, 1, 0
    while row < len(trace.length):
        taken = min(int(trace.length[row]), int(trace.matched[row]))
        accepted += taken
        row, steps = row + taken + 1, steps + 1
    assert (steps, accepted) == (counted.steps, counted.accepted)
    assert run.produced.sum() >= len(trace.length)


def test_survival_is_the_product_of_the_confidences() -> None:
    trace = record_trace([edit_pair()], K)
    assert trace.length.max() == K
    for length, row in zip(trace.length, trace.survival, strict=True):
        assert (row[:length] > 0).all()
        assert (row[length:] == 0).all()
        assert (np.diff(row[:length].astype(int)) <= 0).all()


def test_fill_bounds_the_tokens_of_the_step_and_sure_ones_come_on_top() -> None:
    batch = batch_of([[0.95, 0.9, 0.2], [0.3, 0.2, 0.1]])
    assert Budget(fill=5).grant(batch).tolist() == [2, 1]
    assert Budget(fill=2).grant(batch).tolist() == [0, 0]
    assert Budget(fill=2, sure=0.9).grant(batch).tolist() == [2, 0]
    assert Budget(floor=1, fill=2).grant(batch).tolist() == [1, 0]
    assert Budget(floor=1, fill=64, sure=0.9).name == "budget 1, fill 64, sure 0.9"


def test_the_plugin_is_the_plugin() -> None:
    """As its own docstring has it: exact lengths; a few more of an older report; 0 without."""
    batch = batch_of([[0.9, 0.8, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])
    batch = batch._replace(has_prediction=np.array([True, True, False]))
    assert Plugin(4).grant(batch).tolist() == [2, 1, 0]
    for steps in (1, 2):
        late = Plugin(16, late=steps)
        for _ in range(steps):
            assert late.grant(batch).tolist() == [16, 16, 0]
        assert late.grant(batch).tolist() == [6, 5, 0]
        assert late.grant(batch._replace(request=np.array([0, 1, 0]))).tolist() == [6, 16, 0]
    assert Plugin(4, budget=2).grant(batch).sum() == 2
    assert [Plugin(4, late).name for late in (0, 2)] == ["plugin", "plugin, late by 2"]


def test_the_plugin_is_the_rule_it_documents() -> None:
    """On random survivals it grants what `Budget` does, but for its coarser units."""
    rng = np.random.default_rng(1)
    rule = Budget(fill=FILL_TOKENS, sure=SURE)
    for size in (1, 8, 100, 300):
        confidence = rng.uniform(0.7, 1.0, (size, 16)) * (np.arange(16) < rng.integers(0, 17, (size, 1)))
        levels = np.floor(np.cumprod(confidence, axis=1) * 255) / 255
        batch = batch_of(levels.tolist())
        assert Plugin(16, budget=10_000, captured=0).grant(batch).tolist() == rule.grant(batch).tolist(), size


def test_without_drafts_a_step_is_a_token_a_request() -> None:
    run = simulate(make_trace([4] * 9, [4] * 9), FixedK(0), batch=5)
    assert (run.verified == 5).all()
    assert (run.produced == 5).all()
    cost = Roofline(GPUS["H100"], MODELS["8B"], "bf16", 500)
    assert run.speedup(cost, 5, 0.0) == pytest.approx(1.0)


def test_a_models_own_drafter_drafts_for_the_others() -> None:
    """All of whose drafts are verified; those with a prediction have their own. Requests take turns at a place."""
    trace = make_trace([3] * 60, [2] * 60)
    for accepted in (0.0, 1.0):
        run = simulate(trace, Lengths(), batch=1, every=0, min_steps=20, model=ModelDrafts(4, accepted))
        assert (run.verified == 5).all()
        assert run.produced.max() == 1 + 4 * accepted
    mixed = simulate(trace, Lengths(), batch=1, every=2, min_steps=60, model=ModelDrafts(5, 1.0))
    assert set(mixed.verified) == {4, 6}


def test_the_page_has_what_was_found_beside_a_models_drafter() -> None:
    page = (DOCS / "tuning.md").read_text(encoding="utf-8")
    assert fill(page, {"beside": beside.table}, read("serving_beside")) == page


def test_slots_cost_and_accepted_drafts_pay() -> None:
    # Rows of one request, all alike: two of three drafts are right.
    trace = make_trace([3] * 60, [2] * 60)
    run = simulate(trace, FixedK(4), batch=1, min_steps=20)
    assert (run.verified == 5).all()
    assert (run.produced[:-1] <= 3).all()
    assert run.produced.max() == 3
    assert simulate(trace, Lengths(), batch=1).verified.max() == 4
    cost = Measured("m", (1, 10), (1.0, 10.0))
    assert Run(np.array([5]), np.array([3])).speedup(cost, 1, 0.5) == pytest.approx(3 / 5.5)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [edit_pair(60), edit_pair(80)]
    corpus = tmp_path / "c.jsonl"
    lines = [{"id": str(i), "prediction": r.prediction, "output": r.output} for i, r in enumerate(records)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = tmp_path / "curve.json"

    def cost(ms: int) -> None:
        """Of 64 tokens; one takes 1 ms."""
        points = [{"tokens": 1, "ms": 1}, {"tokens": 64, "ms": ms}]
        curve.write_text(json.dumps({"name": "mine", "points": points}))

    cost(1)
    out, pages = tmp_path / "out.json", {}
    for path, blocks in tables.PAGES.items():
        pages[tmp_path / path.name] = blocks
        marks = (f"<!-- {name}:begin -->\nstale text\n<!-- {name}:end -->\n" for name in blocks)
        (tmp_path / path.name).write_text("".join(marks))
    monkeypatch.setattr(tables, "PAGES", pages)
    rules = [FixedK(4), Lengths(), Budget(floor=4), Budget(fill=64, sure=0.8)]
    monkeypatch.setattr(serving, "BATCHES", (1, 8))
    monkeypatch.setattr(serving, "rules", lambda k: [*rules, Plugin(k, 1)])
    app = Typer()
    app.command()(serving.main)
    files = {"corpus": corpus, "traces": tmp_path / "t", "json": out, "curve": curve}
    args = [f"--{name}={path}" for name, path in files.items()]
    args += ["--write", "--jobs=1", "--num-draft-tokens=8", "--drafter-us=0"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())
    assert results["num_draft_tokens"] == 8
    assert list(results["rules"]) == [*(r.name for r in rules), "plugin, late by 1", "known curve"]
    for row in results["rules"].values():
        assert set(row) == {mix.name for mix in MIXES}
        assert all(len(mix["shown"]["mine"]) == 2 for mix in row.values())
    filled = "".join(path.read_text() for path in pages)
    assert "stale text" not in filled
    assert "| `lengths` |" in filled
    assert CliRunner().invoke(app, ["--keep-traces", "--traces", str(tmp_path / "none")]).exit_code == 2
    # On a machine where every token costs the plugin's defaults lose. All is written, and that is said.
    cost(64)
    steep = CliRunner().invoke(app, [*args, "--keep-traces"])
    assert steep.exit_code == 1
    assert "error: plugin, late by 1: 0." in steep.output
    assert json.loads(out.read_text()) != results


RESULTS = read("serving")


@pytest.mark.parametrize(
    ("path", "blocks"), tables.PAGES.items(), ids=lambda value: getattr(value, "name", "")
)
def test_the_pages_show_the_stored_results(path: Path, blocks: dict[str, Callable[[Any], str]]) -> None:
    text = path.read_text(encoding="utf-8")
    assert fill(text, blocks, RESULTS) == text, "run: make serving-model"


def test_neither_the_recommended_budget_nor_the_plugin_loses() -> None:
    """At any batch on any setup; the plugin synchronously and told late, even where every draft is rejected."""
    table = RESULTS["rules"]
    assert min(table[RESULTS["recommended"]["rule"]]["unrelated"]["worst"]) >= serving.NEVER_BELOW
    assert {"plugin", "plugin, late by 1", "plugin, late by 2"} <= set(table)
    assert losses(table) == []
