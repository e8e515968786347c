"""Throughput of drafting rules on paper: ``python -m benchmarks.serving``.

Replays real edits at batch 1 to 1,024: every place of a batch goes through the corpus, request after request; in
each step a rule grants draft slots (`rules`), what they bring is looked up in a trace of the drafter (`trace`),
and the step takes as long as its tokens need (`step_cost`). After a change of the drafter run it again: it fails
if the plugin's defaults (`vllm_integration.config.settings`) then lose by useless predictions or rejected drafts.
"""

from __future__ import annotations

import copy
import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

import gpu_align
from benchmarks.corpus import build as corpus
from benchmarks.processes import pool
from benchmarks.serving import page as tables
from benchmarks.serving.rules import Batch, Budget, FixedK, Lengths, Plugin, Rule, Worth
from benchmarks.serving.step_cost import LONGER, Graphs, StepCost, paper_costs, read_measured
from benchmarks.serving.trace import Trace, record_trace, sample, unrelated
from benchmarks.tables import RESULTS, as_json, fill_file
from gpu_align.simulate import read_records, recipes_for

BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
#: What is traced, and how many of its output tokens.
CORPUS, MAX_TOKENS = Path(".cache/corpus.jsonl.gz"), 30_000
CONTEXTS = (500, 2_000, 8_000)
#: Setups whose numbers are shown one by one; the worst case is over all of them.
SHOWN = (
    "H100, 8B bf16, context 2,000",
    "H100, 8B fp8, context 500",
    "H200, 70B fp8, context 500",
    "B200, 8B fp8, context 2,000",
)
#: Never worse than this share of the throughput without drafts, for useless predictions.
NEVER_BELOW = 0.99
#: Nor of a rule that is recommended worse than this, where every draft is rejected.
REJECTED_BELOW = 0.8


#: Nowhere a step without its graph takes longer.
NOTHING_LOST = Graphs()


class Mix(NamedTuple):
    """Who sends what. `every`: one request in so many has a prediction."""

    name: str
    trace: str
    every: int
    says: str


MIXES = (
    Mix("edit", "edit", 1, "every request has the old version of its file as prediction"),
    Mix("third", "edit", 3, "one request in three has, the others have none"),
    Mix("unrelated", "unrelated", 1, "every request has another file as prediction: useless"),
    Mix("rejected", "rejected", 1, "as unrelated, and the model agrees with no draft: the worst case"),
)


def rules(num_draft_tokens: int) -> list[Rule]:
    """What is compared, but for `Worth`, which is another rule on each setup."""
    grid = [Budget(fill=f, sure=s) for f in (64, 128, 256) for s in (2.0, 0.9, 0.8, 0.7, 0.5)]
    plain = [Budget(floor=d) for d in (4, 16, 64, 256, 1024, 4096)]
    return [
        *(FixedK(k) for k in (0, 4, 16, 32) if k <= num_draft_tokens),
        Lengths(),
        *plain,
        *grid,
        *(Plugin(num_draft_tokens, late) for late in (0, 1, 2)),
        *(Plugin(num_draft_tokens, late, learns=False) for late in (0, 1)),
    ]


class Run(NamedTuple):
    """What happened: tokens verified and tokens produced, one entry a step."""

    verified: npt.NDArray[np.int64]
    produced: npt.NDArray[np.int64]

    def speedup(self, cost: StepCost, batch: int, drafter_ms: float, graphs: Graphs = NOTHING_LOST) -> float:
        """Throughput over that of the same batch without drafts and without a drafter."""
        times = cost.ms(batch, self.verified) * graphs.factor(batch, self.verified) + drafter_ms
        without = cost.ms(batch, batch) * graphs.factor(batch, batch)
        return float(self.produced.mean() / times.mean() * without / batch)


class ModelDrafts(NamedTuple):
    """Drafts of a model's own drafter for places without a prediction: so many tokens, each accepted with this
    probability where those before it were."""

    tokens: int
    accepted: float


def simulate(
    trace: Trace,
    rule: Rule,
    batch: int,
    every: int = 1,
    min_steps: int = 120,
    max_steps: int = 10_000,
    warm_up: int = 0,
    model: ModelDrafts | None = None,
) -> Run:
    """Let `batch` requests decode side by side under `rule`.

    ::

        row[b] = the place of request b in the trace; at first spread evenly
        repeat until as many tokens are produced as the trace has rows, from min_steps to max_steps steps:
            granted = rule.grant(what the drafter says at row)
            accepted = min(granted, length[row], matched[row])
            produced = min(accepted + 1, what is left of the output)
            step: batch + sum(granted) tokens verified
            row += produced; behind a record's last row the next record begins, another request

    Before that come `warm_up` steps that are not counted, after which every request is back at its first place:
    the requests of a batch that runs are no new ones, and a rule that learns knows them. Those that begin later
    do so as new ones.

    Only places ``b`` with ``b % every == 0`` have a prediction. Nothing is random but the order of the places,
    which depends on `batch` alone. With `model` requests take turns at a place: the n-th has one where
    ``(b + n) % every == 0``, none where `every` is 0; the others have its drafts, all of which are verified.
    """
    if batch < 1:
        raise ValueError(f"batch: expected 1 or more, found {batch}")
    num_rows, num_draft_tokens = trace.survival.shape
    records = np.diff(trace.start)
    end = np.repeat(trace.start[1:], records)
    rng = np.random.default_rng(batch)
    row = ((np.arange(batch) + rng.random(batch)) * num_rows / batch).astype(np.int64)[rng.permutation(batch)]
    has = np.arange(batch) % max(every, 1) == 0
    request = np.zeros(batch, dtype=np.int64)
    first = row
    settle = getattr(rule, "settle", None)
    verified: list[int] = []
    produced: list[int] = []
    total = 0
    while warm_up or len(verified) < min_steps or (total < num_rows and len(verified) < max_steps):
        if model is not None:
            has = (np.arange(batch) + request) % max(every, 1) + (every == 0) == 0
        length = np.where(has, trace.length[row], 0).astype(np.int64)
        survival = np.where(has[:, None], trace.survival[row], 0).astype(np.uint16)
        granted = rule.grant(Batch(length, survival, request, has))
        if granted.min() < 0 or granted.max() > num_draft_tokens:
            raise ValueError(f"rule {rule.name!r}: expected 0 to {num_draft_tokens} slots, found {granted}")
        accepted = np.minimum(granted, np.minimum(length, trace.matched[row]))
        if model is not None:
            granted = np.where(has, granted, model.tokens)
            agreed = rng.random((batch, model.tokens)) < model.accepted
            accepted = np.where(has, accepted, np.cumprod(agreed, axis=1).sum(axis=1))
        new = np.minimum(accepted + 1, end[row] - row)
        if settle is not None:
            settle(granted, accepted)
        request = request + (row + new == end[row])
        row = (row + new) % num_rows
        if warm_up:
            warm_up -= 1
            row = row if warm_up else first
            continue
        verified.append(batch + int(granted.sum()))
        produced.append(int(new.sum()))
        total += produced[-1]
    return Run(np.array(verified), np.array(produced))


@lru_cache(maxsize=4)
def _trace(folder: Path, name: str) -> Trace:
    if name == "rejected":
        return _trace(folder, "unrelated").rejected()
    return Trace.load(folder / f"{name}.npz")


def _speedups(
    rule: Rule, mix: Mix, folder: Path, batches: Sequence[int], costs: Sequence[StepCost], drafter_ms: float
) -> list[list[float]]:
    """[setup][batch] speed-ups of one rule under one mix."""
    trace = _trace(folder, mix.trace)
    paid = 0.0 if rule == FixedK(0) else drafter_ms
    by_batch = []
    for batch in batches:
        run = simulate(trace, copy.deepcopy(rule), batch, mix.every, warm_up=getattr(rule, "warm_up", 0))
        by_batch.append([run.speedup(cost, batch, paid) for cost in costs])
    return [list(column) for column in zip(*by_batch, strict=True)]


def compare(
    folder: Path, costs: Sequence[StepCost], shown: Sequence[str], drafter_us: float, jobs: int
) -> dict[str, Any]:
    """Every rule under every mix.

    Returns ``{rule: {mix: {"worst": [batch], "gain": float, "shown": {setup: [batch]}}}}``: the least speed-up
    over all setups, the geometric mean over all setups and batches, and the shown setups one by one. A batch
    that does not fit in memory counts like any other: a shorter context would make it fit.
    """
    num_draft_tokens = _trace(folder, "edit").num_draft_tokens
    tasks: list[tuple[Rule, Mix, Sequence[StepCost]]] = [
        (rule, mix, costs) for rule in rules(num_draft_tokens) for mix in MIXES
    ]
    known = [cost for cost in costs if cost.name in shown]
    for cost in known:
        tasks += [(Worth(cost.ms), mix, [cost]) for mix in MIXES]
    args = [(rule, mix, folder, BATCHES, used, drafter_us / 1e3) for rule, mix, used in tasks]
    with pool(jobs) as workers:
        found = workers.starmap(_speedups, args, chunksize=1)
    table: dict[str, Any] = {}
    for (rule, mix, used), speedups in zip(tasks, found, strict=True):
        row = table.setdefault(rule.name, {}).setdefault(
            mix.name, {"worst": [math.inf] * len(BATCHES), "shown": {}}
        )
        row["worst"] = [
            min(a, *column) for a, column in zip(row["worst"], zip(*speedups, strict=True), strict=True)
        ]
        row["gain"] = statistics.geometric_mean(x for column in speedups for x in column)
        row["shown"] |= {c.name: s for c, s in zip(used, speedups, strict=True) if c.name in shown}
    return table


def lost_graphs(
    folder: Path, costs: Sequence[StepCost], shown: Sequence[str], drafter_us: float
) -> dict[str, dict[str, list[float]]]:
    """How much the plugin's speed-up, in asynchronous scheduling, depends on FULL CUDA graphs.

    Returns ``{"any length, 0.066": {"edit": [batch], …}}``, by what the graphs take and `LONGER`: the speed-up by
    edits, all or a third, on the first shown setup, and by useless predictions the least of all setups.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for mix in MIXES[:3]:
        trace = _trace(folder, mix.trace)
        used = costs if mix.name == "unrelated" else [cost for cost in costs if cost.name in shown][:1]
        for batch, any_length in product(BATCHES, (True, False)):
            rule = Plugin(trace.num_draft_tokens, 1, graphs="decode" if any_length else "backend")
            run = simulate(trace, rule, batch, mix.every, warm_up=rule.warm_up)
            for longer in LONGER:
                graphs = Graphs(longer, any_length)
                speedup = min(run.speedup(cost, batch, drafter_us / 1e3, graphs) for cost in used)
                row = found.setdefault(f"{'any' if any_length else 'one'} length, {longer:g}", {})
                row.setdefault(mix.name, []).append(speedup)
    return found


def recommend(table: dict[str, Any]) -> dict[str, str | None]:
    """The rules that never lose by useless predictions and gain most: of all budgets, and of plain ones."""

    def best(names: Iterable[str]) -> str | None:
        least = {"unrelated": NEVER_BELOW, "rejected": REJECTED_BELOW}
        safe = [n for n in names if all(min(table[n][mix]["worst"]) >= least[mix] for mix in least)]
        gain = {n: table[n]["edit"]["gain"] * table[n]["third"]["gain"] for n in safe}
        return max(gain, key=lambda n: gain[n]) if gain else None

    budgets = [n for n in table if n.startswith(("budget", "fill"))]
    return {"rule": best(budgets), "constant": best(n for n in budgets if n.startswith("budget"))}


#: What the schedulers do by default, and what each may lose by useless predictions and by rejected drafts.
DEFAULTS = ("plugin", "plugin, late by 1", "plugin, late by 2")


def losses(table: dict[str, Any]) -> list[str]:
    """What the plugin does by default and must not: one line for each of `DEFAULTS` that loses by useless
    predictions or where every draft is rejected, at its worst batch on its worst setup."""
    reasons = {"unrelated": "by useless predictions", "rejected": "where every draft is rejected"}
    return [
        f"{name}: {value:.3f} of the throughput without drafts {reason}, less than {NEVER_BELOW}"
        for name in DEFAULTS
        if name in table
        for mix, reason in reasons.items()
        if (value := min(table[name][mix]["worst"])) < NEVER_BELOW
    ]


def make_traces(corpus_path: Path, folder: Path, num_draft_tokens: int, jobs: int) -> None:
    """Record the traces of the drafter as it is served, with recipes; the corpus is fetched if it is not there."""
    if not corpus_path.exists() and corpus.main([str(corpus_path)]) != 0:
        raise typer.Exit(1)
    records = read_records(corpus_path, "tekken")
    recipes = recipes_for(records)
    for name, chosen in (("edit", records), ("unrelated", unrelated(records))):
        record_trace(sample(chosen, MAX_TOKENS), num_draft_tokens, jobs, recipes).save(folder / f"{name}.npz")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def main(
    corpus_path: Annotated[Path, typer.Option("--corpus", help="records; fetched where missing")] = CORPUS,
    traces: Annotated[Path, typer.Option(help="folder of the traces")] = Path(".cache/serving"),
    keep_traces: Annotated[bool, typer.Option(help="use the traces that are there")] = False,
    num_draft_tokens: Annotated[int, typer.Option(help="K", min=1)] = 32,
    drafter_us: Annotated[float, typer.Option(help="what a step of the drafter costs, µs", min=0)] = 15.0,
    curve: Annotated[
        list[Path] | None, typer.Option(help="measured step times instead of paper ones")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="results")] = RESULTS / "serving.json",
    write: Annotated[bool, typer.Option(help="fill the tables of the pages")] = False,
    jobs: Annotated[int, typer.Option(help="processes", min=1)] = 2,
) -> None:
    """Throughput of drafting rules on paper, from real edits and step-time curves."""
    costs: list[StepCost] = [cost for context in CONTEXTS for cost in paper_costs(context)]
    shown: Sequence[str] = SHOWN
    try:
        if curve:
            costs = list(map(read_measured, curve))
            shown = [cost.name for cost in costs]
        if not keep_traces:
            make_traces(corpus_path, traces, num_draft_tokens, jobs)
        trace = _trace(traces, "edit")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    table = compare(traces, costs, shown, drafter_us, jobs)
    results = {
        "made_by": "python -m benchmarks.serving",
        "versions": {"gpu_align": gpu_align.__version__, "python": platform.python_version()},
        "records": len(trace.start) - 1,
        "positions": len(trace.length),
        "num_draft_tokens": trace.num_draft_tokens,
        "drafter_us": drafter_us,
        "batches": list(BATCHES),
        "fits": {cost.name: [cost.fits(b) for b in BATCHES] for cost in costs if cost.name in shown},
        "setups": [cost.name for cost in costs],
        "recommended": recommend(table),
        "lost_graphs": _rounded(lost_graphs(traces, costs, shown, drafter_us)),
        "rules": _rounded(table),
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(as_json(results), encoding="utf-8")
    typer.echo(tables.text(results))
    typer.echo(f"wrote {json_path}")
    for path, blocks in tables.PAGES.items() if write else ():
        fill_file(path, blocks, results)
        typer.echo(f"filled {path}")
    for line in losses(table):
        typer.echo(f"error: {line}", err=True)
    if losses(table):
        raise typer.Exit(1)
