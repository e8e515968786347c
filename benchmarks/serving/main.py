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
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

import gpu_align
from benchmarks import tables
from benchmarks.corpus import build as corpus
from benchmarks.processes import pool
from benchmarks.serving.rules import WARM_UP, Batch, FixedK, Lengths, Plugin, Rule, Worth
from benchmarks.serving.step_cost import StepCost, paper_costs, read_measured
from benchmarks.serving.trace import Trace, record_trace, sample, unrelated
from gpu_align.simulate import read_records, recipes_for

BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
#: Batches of the tables; the JSON has all.
COLUMNS = (1, 8, 64, 256, 1024)
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
#: The plugin's defaults are never below this share of the throughput without drafts.
NEVER_BELOW = 0.99


#: Predictions: the old version of the file, another file, and such that the model agrees with no draft: the worst.
MIXES = ("edit", "unrelated", "rejected")
#: The rules' names → what they are, in the table.
RULES = {
    "fixed 32": "32 slots for all, as vLLM",
    "lengths": "every draft",
    "plugin": "default, synchronous",
    "plugin, late by 1": "default, asynchronous",
    "plugin, late by 2": "the same, its drafts' copies late",
    "known curve": "bound: knows the step times",
}
#: The rule of the table in docs/worth-it.md, as vLLM schedules by default.
SHOWN_RULE = "plugin, late by 1"


class Run(NamedTuple):
    """What happened: tokens verified and tokens produced, one entry a step."""

    verified: npt.NDArray[np.int64]
    produced: npt.NDArray[np.int64]

    def speedup(self, cost: StepCost, batch: int, drafter_ms: float) -> float:
        """Throughput over that of the same batch without drafts and without a drafter."""
        times = cost.ms(batch, self.verified) + drafter_ms
        return float(self.produced.mean() / times.mean() * cost.ms(batch, batch) / batch)


def simulate(trace: Trace, rule: Rule, batch: int, min_steps: int = 120, max_steps: int = 10_000) -> Run:
    """Let `batch` requests decode side by side under `rule`.

    ::

        row[b] = the place of request b in the trace; at first spread evenly
        repeat until as many tokens are produced as the trace has rows, from min_steps to max_steps steps:
            granted = rule.grant(what the drafter says at row)
            accepted = min(granted, length[row], matched[row])
            produced = min(accepted + 1, what is left of the output)
            step: batch + sum(granted) tokens verified
            row += produced; after a record's last row the next record begins, another request

    A rule that learns (it has a `settle`) first gets `WARM_UP` steps that are not counted. Then every request is
    back at its first place: the requests of a running batch are not new, and the rule knows them. Only the order
    of the places is random, and depends on `batch` alone.
    """
    num_rows, num_draft_tokens = trace.survival.shape
    end = np.repeat(trace.start[1:], np.diff(trace.start))
    rng = np.random.default_rng(batch)
    row = ((np.arange(batch) + rng.random(batch)) * num_rows / batch).astype(np.int64)[rng.permutation(batch)]
    request = np.zeros(batch, dtype=np.int64)
    first = row
    settle = getattr(rule, "settle", None)
    warm_up = WARM_UP if settle else 0
    verified: list[int] = []
    produced: list[int] = []
    total = 0
    while warm_up or len(verified) < min_steps or (total < num_rows and len(verified) < max_steps):
        length = trace.length[row].astype(np.int64)
        granted = rule.grant(Batch(length, trace.survival[row], request))
        if granted.min() < 0 or granted.max() > num_draft_tokens:
            raise ValueError(f"rule {rule.name!r}: expected 0 to {num_draft_tokens} slots, found {granted}")
        accepted = np.minimum(granted, np.minimum(length, trace.matched[row]))
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
    rule: Rule, mix: str, folder: Path, costs: Sequence[StepCost], drafter_ms: float
) -> list[list[float]]:
    """[setup][batch] speed-ups of one rule under one mix."""
    by_batch = []
    for batch in BATCHES:
        run = simulate(_trace(folder, mix), copy.deepcopy(rule), batch)
        by_batch.append([run.speedup(cost, batch, drafter_ms) for cost in costs])
    return [list(column) for column in zip(*by_batch, strict=True)]


def compare(
    folder: Path, costs: Sequence[StepCost], shown: Sequence[str], drafter_us: float, jobs: int
) -> dict[str, Any]:
    """Every rule under every mix.

    Returns ``{rule: {mix: {"worst": [batch], "shown": {setup: [batch]}}}}``: the least speed-up over all setups,
    and the shown setups one by one. A batch that does not fit in memory counts like any other: a shorter context
    would make it fit.
    """
    k = _trace(folder, "edit").num_draft_tokens
    rules: list[Rule] = [FixedK(k), Lengths(), *(Plugin(k, late) for late in (0, 1, 2))]
    tasks: list[tuple[Rule, str, Sequence[StepCost]]] = [
        (rule, mix, costs) for rule in rules for mix in MIXES
    ]
    known = [cost for cost in costs if cost.name in shown]
    tasks += [(Worth(cost.ms), mix, [cost]) for cost in known for mix in MIXES]
    args = [(rule, mix, folder, used, drafter_us / 1e3) for rule, mix, used in tasks]
    with pool(jobs) as workers:
        found = workers.starmap(_speedups, args, chunksize=1)
    table: dict[str, Any] = {}
    for (rule, mix, used), speedups in zip(tasks, found, strict=True):
        row = table.setdefault(rule.name, {}).setdefault(
            mix, {"worst": [math.inf] * len(BATCHES), "shown": {}}
        )
        row["worst"] = [
            min(a, *column) for a, column in zip(row["worst"], zip(*speedups, strict=True), strict=True)
        ]
        row["shown"] |= {c.name: s for c, s in zip(used, speedups, strict=True) if c.name in shown}
    return table


def losses(table: dict[str, Any]) -> list[str]:
    """A line for each of the plugin's rules that loses by useless predictions, or where every draft is rejected,
    at its worst batch on its worst setup."""
    reasons = {"unrelated": "by useless predictions", "rejected": "where every draft is rejected"}
    return [
        f"{name}: {value:.3f} of the throughput without drafts {reason}, less than {NEVER_BELOW}"
        for name in table
        if name.startswith("plugin")
        for mix, reason in reasons.items()
        if (value := min(table[name][mix]["worst"])) < NEVER_BELOW
    ]


def _numbers(row: list[float], fits: list[bool]) -> list[str]:
    at = [BATCHES.index(batch) for batch in COLUMNS]
    return [f"{row[i]:.2f}" + ("" if fits[i] else " ×") for i in at]


def one_setup(results: dict[str, Any]) -> str:
    """The speed-up over no drafts: edits on the first shown setup by batch, and the worst of all setups."""
    setup, fits = next(iter(results["fits"].items()))
    rows = []
    for name, rule in results["rules"].items():
        worst = (f"{min(rule[mix]['worst']):.3f}" for mix in ("unrelated", "rejected"))
        numbers = _numbers(rule["edit"]["shown"][setup], fits)
        rows.append([f"`{name}`", *numbers, *worst, RULES.get(name, "")])
    columns = [*(f"{batch:,}" for batch in COLUMNS), "worst, unrelated", "worst, rejected"]
    return tables.table(["rule", *columns, ""], rows, f"l{'r' * len(columns)}l")


def gains(results: dict[str, Any]) -> str:
    """The plugin's default on every shown setup, in asynchronous scheduling."""
    found = results["rules"][SHOWN_RULE]
    rows = [
        [setup if mix == "edit" else "", mix, *_numbers(found[mix]["shown"][setup], fits)]
        for setup, fits in results["fits"].items()
        for mix in ("edit", "unrelated")
    ]
    columns = [f"{batch:,}" for batch in COLUMNS]
    return tables.table(["setup", "predictions", *columns], rows, f"ll{'r' * len(columns)}")


#: Page → its blocks by name.
PAGES: dict[Path, dict[str, Callable[[dict[str, Any]], str]]] = {
    tables.DOCS / "worth-it.md": {"gains": gains},
    Path(__file__).with_name("README.md"): {"edit": one_setup},
}


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
    json_path: Annotated[Path, typer.Option("--json", help="results")] = tables.RESULTS / "serving.json",
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
        "rules": _rounded(table),
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(tables.as_json(results), encoding="utf-8")
    typer.echo(one_setup(results))
    typer.echo(f"wrote {json_path}")
    for path, blocks in PAGES.items() if write else ():
        tables.fill_file(path, blocks, results)
        typer.echo(f"filled {path}")
    for line in losses(table):
        typer.echo(f"error: {line}", err=True)
    if losses(table):
        raise typer.Exit(1)
