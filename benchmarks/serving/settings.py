"""Which settings of the drafter serve most, over all kinds of text: ``python -m benchmarks.serving.settings``.

The default should be a setting with the highest throughput, not the one with the most tokens a step. Each is
traced on a sample of the ten kinds of text, outputs like a model's and predictions of every quality
(`benchmarks.corpus.kinds`), and served as the plugin serves it, on synchronous and on asynchronous scheduling, at
batch 1, 64 and 256, by the serving model's step times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tables
from benchmarks.quality.runs import make_corpora
from benchmarks.serving.main import SHOWN, Jobs, simulate
from benchmarks.serving.rules import Plugin
from benchmarks.serving.step_cost import paper_costs
from benchmarks.serving.trace import Trace, record_trace, sample
from gpu_align import DrafterConfig
from gpu_align.simulate import read_records, recipes_for
from gpu_align.tools.simulate.policies import setting_name

BATCHES = (1, 64, 256)
#: Of a step; output tokens that are traced; what a step of the drafter costs.
NUM_DRAFT_TOKENS, MAX_TOKENS, DRAFTER_US = 32, 12_000, 15.0
#: Steps that asynchronous scheduling plans ahead.
LATE = (0, 1)
#: From few rejected drafts to few steps; the empty one is the default.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"length_factor": 1, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 1, "min_survival": 0.3},
    {"length_factor": 2, "min_survival": 0.2},
    {"length_factor": 3, "min_survival": 0.1},
    {"length_factor": 6, "min_survival": 0.08},
    {},
    {"length_factor": 12, "min_survival": 0.02},
    {"length_factor": 64, "min_survival": 0.02},
)


def speedups(trace: Trace) -> dict[str, float]:
    """``"batch, late"`` → throughput over that without drafts, the geometric mean over `SHOWN` where it fits."""
    costs = [cost for context in (500, 2_000) for cost in paper_costs(context) if cost.name in SHOWN]
    found = {}
    for late in LATE:
        for batch in BATCHES:
            rule = Plugin(trace.num_draft_tokens, late)
            run = simulate(trace, rule, batch, warm_up=rule.warm_up)
            ratios = [run.speedup(cost, batch, DRAFTER_US / 1000) for cost in costs if cost.fits(batch)]
            found[f"{batch}, {late}"] = round(float(np.exp(np.mean(np.log(ratios)))), 3)
    return found


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """One row a setting."""
    columns = [f"{batch}, {late}" for late in LATE for batch in BATCHES]
    names = [f"{batch}{', late' if late else ''}" for late in LATE for batch in BATCHES]
    best = {column: max(row[column] for row in results.values()) for column in columns}
    rows = (
        [setting, *(f"**{row[c]:.2f}**" if row[c] == best[c] else f"{row[c]:.2f}" for c in columns)]
        for setting, row in results.items()
    )
    return tables.table(["setting", *names], rows)


def main(
    write: Annotated[bool, typer.Option(help="fill the table of the page")] = False,
    jobs: Jobs = 2,
) -> None:
    """Throughput of the drafter's settings on paper, over all kinds of text."""
    corpus = Path(".cache/corpus-kinds-test.jsonl.gz")
    if make_corpora({"kinds-test": corpus}):
        raise typer.Exit(1)
    records = sample(read_records(corpus, "tekken"), MAX_TOKENS)
    recipes = recipes_for(records)
    results = {}
    for setting in SETTINGS:
        name = setting_name(setting).partition(" ")[2] or "default"
        trace = record_trace(records, NUM_DRAFT_TOKENS, jobs, recipes, DrafterConfig(**setting))
        results[name] = speedups(trace)
        typer.echo(f"{name}: {results[name]}")
    found = {"records": len(records), "num_draft_tokens": NUM_DRAFT_TOKENS, "settings": results}
    (tables.RESULTS / "serving_settings.json").write_text(tables.as_json(found), encoding="utf-8")
    if write:
        tables.fill_file(tables.DOCS / "developer" / "serving-rules.md", {"settings": table}, results)


if __name__ == "__main__":
    typer.run(main)
