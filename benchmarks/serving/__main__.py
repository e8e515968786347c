"""Throughput of drafting rules on paper: ``python -m benchmarks.serving``; README.md has the assumptions.

Replays real edits at batch 1 to 1,024: every place of a batch goes through the corpus, request after request; in
each step a rule grants draft slots (`loops`), what they bring is looked up in a trace of the drafter (`traces`),
and the step takes as long as its tokens need (`machines`). After a change of the drafter run it again: it fails if
the plugin's defaults (`vllm_integration.config.settings`) then lose by useless predictions or rejected drafts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import tables
from benchmarks.serving import loops
from benchmarks.serving.loops import BATCHES, CLOSED_BATCHES, HALF, MIXES, OPEN_BATCHES, RULES, SHOWN_RULE
from benchmarks.serving.machines import H200, SETUPS, SHOWN, SMALL, Roofline
from benchmarks.serving.traces import K, load_trace, make_traces

#: The plugin's defaults are never below this share of the throughput without drafts; from 64 requests on.
NEVER_BELOW, IN_LARGE = 0.97, 0.99
#: What edits and half a batch gain at least: setup, what, batch → speed-up. Of the dense one 0.99 of what the
#: fixed rule of commit 22d4d3af gained. Of lone requests on mixtures of experts 0.97 of what this rule gains with
#: late reports where it knows the machine's curve, 1.76 and 2.27; with reports in time 1.94 and 2.53.
LEAST = {
    (0, "edit"): {1: 8.07, 16: 6.91, 64: 3.03, 256: 1.68},
    (0, "half"): {64: 2.58, 256: 1.56},
    (4, "edit"): {1: 2.22, 16: 7.7, 64: 8.3, 256: 3.9},
    (4, "half"): {256: 3.4},
    (6, "edit"): {1: 1.7, 16: 5.1, 64: 9.0, 256: 6.4},
    (6, "half"): {256: 4.8},
}


def losses(results: dict[str, Any]) -> list[str]:
    """A line for each batch in which one of the plugin's rules loses by useless predictions, or where every draft
    is rejected, and for each gain that is less than `LEAST`, or than `CLOSED_LEAST` of a closed batch."""
    found, table = [], results["rules"]
    for batch, mix in product(CLOSED_BATCHES, (MIXES[0], HALF)):
        if (value := results["closed"][str(batch)][mix]) < loops.CLOSED_LEAST:
            found.append(f"a closed batch of {batch}, {mix}: {value:.3f}, less than {loops.CLOSED_LEAST}")
    for name, mix in product((name for name in table if name.startswith("plugin")), MIXES[1:]):
        for batch, value in zip(BATCHES, table[name][mix]["worst"], strict=True):
            if value < (least := IN_LARGE if batch >= 64 else NEVER_BELOW):
                found.append(f"{name}, {mix}, batch {batch}: {value:.3f} of no drafts, less than {least}")
    for (setup, mix), gains in LEAST.items():
        row = table[SHOWN_RULE][mix]["shown"][SETUPS[setup].name]
        for batch, least in gains.items():
            if (value := row[BATCHES.index(batch)]) < least:
                found.append(f"{SETUPS[setup].name}, {mix}, batch {batch}: {value:.3f}, less than {least}")
    return found


def _numbers(row: list[float], fits: list[bool]) -> list[str]:
    return [f"{value:.2f}" + ("" if fits_in else " ×") for value, fits_in in zip(row, fits, strict=True)]


def one_setup(results: dict[str, Any]) -> str:
    """The speed-up over no drafts: edits on the first shown setup by batch, and the worst of all setups."""
    setup, fits = next(iter(results["fits"].items()))
    rows = []
    for name, rule in results["rules"].items():
        worst = (f"{min(rule[mix]['worst']):.3f}" for mix in ("unrelated", "rejected"))
        rows.append([f"`{name}`", *_numbers(rule["edit"]["shown"][setup], fits), *worst, RULES[name][1]])
    columns = [*(f"{batch:,}" for batch in BATCHES), "worst, unrelated", "worst, rejected"]
    return tables.table(["rule", *columns, ""], rows, f"l{'r' * len(columns)}l")


def gains(results: dict[str, Any]) -> str:
    """The plugin's default on the shown setups, in asynchronous scheduling."""
    found, rows = results["rules"][SHOWN_RULE], []
    for setup in SHOWN:
        shown = {mix: found[mix]["shown"] for mix in ("edit", "unrelated", HALF)}
        shown["others"] = found[HALF]["others"]
        fits = results["fits"][setup]
        rows += [[f"{setup}: {mix}", *_numbers(of[setup], fits)] for mix, of in shown.items()]
        rows[-1][1] = "–"  # a batch of one has no others
    return tables.table(["", *(f"{batch:,}" for batch in BATCHES)], rows)


def machines(results: dict[str, Any]) -> str:
    """Edits by the default rule on the shown setups; the least that another file as prediction gives."""
    found, rows = results["rules"][SHOWN_RULE], []
    for setup in SHOWN:
        least = min(found["unrelated"]["shown"][setup])
        rows.append([setup, *_numbers(found["edit"]["shown"][setup], results["fits"][setup]), f"{least:.2f}"])
    return tables.table(["", *(f"{batch:,}" for batch in BATCHES), "another file, least"], rows)


def open_loop(results: dict[str, Any]) -> str:
    """Requests that come and go, without drafts and with the plugin."""
    found = results["arrivals"]
    names = ("requests at a time", "ms a token, edits", "ms a token, the others")
    rows = [[name, *(" → ".join(f"{row[i]:.{min(i, 1)}f}" for row in one.values()) for one in found.values())]
            for i, name in enumerate(names)]  # fmt: skip
    return tables.table(["batch without drafts", *found], rows)


def begun_together(results: dict[str, Any]) -> str:
    """Closed batches, by batch size."""
    found = results["closed"]
    rows = [[mix, *(f"{one[mix]:.2f}" for one in found.values())] for mix in (MIXES[0], HALF)]
    return tables.table(["", *found], rows)


def captured(results: dict[str, Any]) -> str:
    """Edits and half a batch, by the tokens of the largest CUDA graph."""
    found, rows = results["rules"][SHOWN_RULE], []
    for cost, name in ((SETUPS[1], f"up to {SETUPS[1].captured} tokens"), (SETUPS[0], "of any size")):
        for mix in (MIXES[0], HALF):
            shown = found[mix]["shown"][cost.name]
            rows.append([f"{name}: {mix}", *(f"{shown[BATCHES.index(b)]:.2f}" for b in CLOSED_BATCHES)])
    return tables.table(["graphs", *map(str, CLOSED_BATCHES)], rows)


def checked(results: dict[str, Any]) -> str:
    """Milliseconds of a step of 8B in bf16 on an H200, as measured and by `Roofline`."""
    measured = {row["name"]: row for row in tables.read("gpu")["throughput"]["rows"]}
    cost = Roofline(H200, SMALL, "bf16", context=450)
    batches, rows = (1, 16, 64, 256), []
    for case, tokens in (("none, no drafts", 1), ("ngram, exact text in the prompt", 17)):
        found = ((measured[f"batch {b}: {case}"]["step_ms"], float(cost.ms(b, b * tokens))) for b in batches)
        rows.append([f"{tokens} a request", *(f"{ms:.1f} / {model:.1f}" for ms, model in found)])
    return tables.table(["tokens, measured / model", *map(str, batches)], rows)


def main(
    keep_traces: Annotated[bool, typer.Option("--keep-traces", help="use the traces that are there")] = False,
    write: Annotated[bool, typer.Option("--write", help="into benchmarks/results and the pages")] = False,
) -> None:
    """Throughput of drafting rules on paper, from real edits and step-time curves."""
    if not keep_traces:
        make_traces()
    trace, mixes = load_trace("edit"), (*MIXES, HALF)
    table = {rule: {mix: loops.speedups(rule, mix) for mix in mixes} for rule in RULES}
    results = {
        "made_by": "python -m benchmarks.serving",
        "records": len(trace.start) - 1,
        "positions": len(trace.length),
        "num_draft_tokens": K,
        "fits": {cost.name: [cost.fits(b) for b in BATCHES] for cost in SETUPS if cost.name in SHOWN},
        "rules": table,
        "arrivals": {str(batch): loops.arrivals(batch) for batch in OPEN_BATCHES},
        "closed": {str(batch): loops.closed(batch) for batch in CLOSED_BATCHES},
    }
    typer.echo(one_setup(results))
    if write:
        tables.write_json(tables.RESULTS / "serving.json", results)
        tables.fill_file(
            tables.DOCS / "worth-it.md",
            {"gains": gains, "open": open_loop, "closed": begun_together},
            results,
        )
        tables.fill_file(tables.DOCS / "tuning.md", {"captured": captured}, results)
        tables.fill_file(tables.ROOT / "README.md", {"machines": machines}, results)
        fill = {"edit": one_setup, "checked": checked}
        tables.fill_file(Path(__file__).with_name("README.md"), fill, results)
    found = losses(results)
    for line in found:
        typer.echo(f"error: {line}", err=True)
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
