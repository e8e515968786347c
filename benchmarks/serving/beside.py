"""Predictions beside the model's own drafter, on paper: ``python -m benchmarks.serving.beside``.

Requests with the old version of their file as prediction, and others that bring nothing, in one batch: either
drafter alone, and both. Step times are the serving model's. The model's drafter is an MTP layer: `TOKENS` drafts a
step, each accepted with `ACCEPTED` where those before it were. It runs once a draft, for every request of a batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import tables
from benchmarks.serving.main import SHOWN, ModelDrafts, simulate
from benchmarks.serving.rules import FixedK, Plugin
from benchmarks.serving.step_cost import Roofline, paper_costs
from benchmarks.serving.trace import Trace

BATCHES = (1, 64, 256)
#: One request in so many has a prediction; 0: none.
EVERY = (0, 4, 2, 1)
#: Our assumptions: an MTP layer's drafts, their acceptance, and what a pass of it costs whatever is in it.
TOKENS, ACCEPTED, PASS_MS = 3, 0.7, 0.05
DRAFTER_MS = 0.015
#: Setup and batch of the page; the JSON has all.
PAGE_SETUP, PAGE_BATCH = "H100, 8B bf16, context 2,000", 64


def layer_of(cost: Roofline) -> Roofline:
    """One layer of the model, with its head, as a step of its own."""
    model = cost.model
    head = model.embedding
    params = (model.params - 2 * head) / model.layers + 2 * head
    return replace(cost, model=model._replace(params=params, layers=1), overhead_ms=PASS_MS)


def speedups(trace: Trace, cost: Roofline, batch: int, every: int) -> dict[str, float]:
    """Throughput over that without drafts, by who drafts."""
    model = ModelDrafts(TOKENS, ACCEPTED)
    drafting_ms = TOKENS * float(layer_of(cost).ms(batch, batch))
    found = {}
    for name, ours, theirs in (("model", False, True), ("ours", True, False), ("both", True, True)):
        rule = Plugin(trace.num_draft_tokens, 1, beside=TOKENS if theirs else 0) if ours else FixedK(0)
        run = simulate(
            trace,
            rule,
            batch,
            every if ours else 0,
            warm_up=getattr(rule, "warm_up", 0),
            model=model if theirs else ModelDrafts(0, 0.0),
        )
        paid = DRAFTER_MS * ours + drafting_ms * theirs
        found[name] = round(run.speedup(cost, batch, paid), 2)
    return found


def table(results: dict[str, Any]) -> str:
    """A row a mixture, of one setup and batch."""
    shares = {0: "none", 4: "a quarter", 2: "half", 1: "all"}
    rows = []
    for every, batches in results["setups"][PAGE_SETUP].items():
        found = batches[str(PAGE_BATCH)]
        cells = (
            f"**{value:.2f}**" if value == max(found.values()) else f"{value:.2f}" for value in found.values()
        )
        rows.append([shares[int(every)], *cells])
    return tables.table(["requests with predictions", "the model's", "ours", "both"], rows)


def main(
    traces: Annotated[Path, typer.Option(help="folder of the traces of benchmarks.serving")] = Path(
        ".cache/serving"
    ),
    write: Annotated[bool, typer.Option(help="fill the table of the page")] = False,
) -> None:
    """Throughput of mixtures of requests with and without predictions, beside a model's own drafter."""
    trace = Trace.load(traces / "edit.npz")
    costs = [cost for context in (500, 2_000) for cost in paper_costs(context) if cost.name in SHOWN]
    found = {
        cost.name: {
            str(every): {str(batch): speedups(trace, cost, batch, every) for batch in BATCHES}
            for every in EVERY
        }
        for cost in costs
        if isinstance(cost, Roofline)
    }
    results = {"tokens": TOKENS, "accepted": ACCEPTED, "pass_ms": PASS_MS, "setups": found}
    (tables.RESULTS / "serving_beside.json").write_text(tables.as_json(results), encoding="utf-8")
    typer.echo(table(results))
    if write:
        tables.fill_file(tables.DOCS / "tuning.md", {"beside": table}, results)


if __name__ == "__main__":
    typer.run(main)
