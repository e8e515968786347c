"""Draft quality, all of it: ``python -m benchmarks.quality``.

Replays the test split of the corpus with every drafter at K = 64, 32 and 16, our own one all along its trade-off,
with the recipes that it comes with; then perfect, unrelated and slightly wrong predictions, and ten kinds of text
with predictions of every quality. Prints tables and what has to hold. Nothing of it is random or depends on time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.quality import cases, checks, kinds, plot
from benchmarks.quality.cases import Resumption
from benchmarks.quality.checks import Check, K, of_kind
from benchmarks.quality.kinds import quality_command
from benchmarks.quality.replays import Reliability
from benchmarks.quality.runs import (
    BOUNDS,
    CACHED,
    WITHOUT_RECIPES,
    Counts,
    Entry,
    Run,
    knowledge,
    make_ready,
    our_settings,
    read_entries,
    run_all,
    total,
)
from benchmarks.tables import write_json
from gpu_align.simulate import load_tokenizer, runnable_policy_names
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import PairResult

SIZES = (64, 32, 16)
#: Far from the curve and slow, or of interest at one K only.
ONLY_AT_64 = ("cursor", "myers", "input_lookup_node_llama_cpp", "prompt_lookup_transformers", *BOUNDS)
#: Kinds that `cases` adds to the corpus; only our drafter at K = 64 replays them, and a bound one of them.
CASES = ("perfect", "one_line", "unrelated_case", "nothing")
#: Drafters whose results are shown by kind of record.
BY_KIND = (OURS, "suffix_decoding_deep", "suffix_decoding_4_deep", "prompt_lookup", "clairvoyant")


def planned_runs() -> list[Run]:
    """Every drafter with every setting at every K."""
    runs = []
    for k in SIZES:
        settings = (*our_settings(k), dict(WITHOUT_RECIPES))
        runs += [Run(OURS, k, tuple(setting.items())) for setting in settings]
        names = [*runnable_policy_names(with_recipes=True), *CACHED, *BOUNDS]
        runs += [Run(name, k) for name in names if name != OURS and (k == K or name not in ONLY_AT_64)]
    return list(dict.fromkeys(runs))


def with_cases(entries: Sequence[Entry]) -> list[Entry]:
    """The corpus, and behind it the cases of `CASES`."""
    real = cases.real(entries)
    strangers = cases.unrelated(cases.hopeless(entries))
    return [
        *entries,
        *cases.perfect(real),
        *cases.one_line_edits(real, load_tokenizer("tekken")),
        *strangers,
        *cases.without_prediction(strangers),
    ]


def replays(run: Run, entry: Entry) -> bool:
    """Whether a run is over an entry."""
    if entry.kind not in CASES:
        return True
    return run == Run(OURS, K) or (run == Run("clairvoyant", K) and entry.kind == "one_line")


def resumption(entries: Sequence[Entry], jobs: int) -> Resumption:
    """`cases.resumption` of the real edits, in parallel."""
    records = [e.record for e in cases.real(entries)]
    parts = [(records[part :: jobs * 4], K) for part in range(jobs * 4)]
    with get_context("spawn").Pool(jobs, _one_thread) as pool:
        found = pool.starmap(cases.resumption, parts)
    return Resumption(*(sum(getattr(f, name) for f in found) for name in ("edits", "drafted", "right")))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def checks_of(
    test: Mapping[Run, Counts],
    five: Mapping[Run, Counts],
    pairs_of: Callable[[Run, str], list[PairResult]],
    seen: Resumption,
) -> list[Check]:
    """All rows with a verdict."""
    ours = Run(OURS, K)

    def counts(kind: str) -> Counts:
        return Counts.of(pairs_of(ours, kind))

    return [
        *checks.peer_checks(test, BOUNDS),
        *checks.five_checks(five),
        checks.perfect_check(pairs_of(ours, "perfect")),
        *checks.one_line_checks(pairs_of(ours, "one_line"), pairs_of(Run("clairvoyant", K), "one_line")),
        *checks.unrelated_checks(counts("unrelated_case"), counts("nothing")),
        *checks.resumption_checks(seen),
        checks.reliability_check(test[ours].reliability),
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something to compare with could not be fetched)."""
    parser = quality_command("benchmarks.quality", __doc__, "test", "quality")
    kinds_test = Path(".cache/corpus-kinds-test.jsonl.gz")
    said = "kinds of text, qualities of prediction; made if not there"
    parser.add_argument("--kinds", type=Path, default=kinds_test, help=said)
    parser.add_argument("--images", type=Path, default=Path("docs/img"), help="folder for the pictures")
    parser.add_argument("--strict", action="store_true", help="exit code 3 if a check fails")
    options = parser.parse_args(argv)
    began = time.monotonic()
    corpora = {"test": options.corpus, "tune": options.tune, "kinds-test": options.kinds}
    if code := make_ready(corpora):
        return code
    entries = with_cases(read_entries(options.corpus)[:: options.one_in])
    runs = planned_runs()
    known = knowledge(options.tune, sorted({e.tokens for e in entries}), options.jobs)

    console = Console(stderr=True)
    finished = [0]

    seconds: dict[Run, float] = {}

    def done(run: Run, tokens: int, took: float) -> None:
        finished[0] += tokens
        seconds[run] = seconds.get(run, 0.0) + took
        if console.is_terminal:
            console.print(f"{finished[0] / 1e6:8.1f} M tokens replayed, {run.name}", end="\r")

    results = run_all(runs, entries, options.jobs, replays, done, known)
    seen = resumption([e for e in entries if e.kind not in CASES], options.jobs)
    test = {run: total(found, entries, lambda e: e.kind not in CASES) for run, found in results.items()}
    five = {run: total(found, entries, lambda e: e.in_five) for run, found in results.items()}
    labels = sorted({label for e in entries for label in _labels(e)})
    by_kind = {
        run: {label: total(found, entries, lambda e, label=label: label in _labels(e)) for label in labels}
        for run, found in results.items()
        if run.num_draft_tokens == K and not run.setting and run.policy in BY_KIND
    }
    rows = kinds.measure(read_entries(options.kinds)[:: options.one_in], options.jobs, known, done)
    verdicts = checks_of(test, five, lambda run, kind: of_kind(results[run], entries, kind), seen)
    verdicts += kinds.checks_of(rows)
    reliability = test[Run(OURS, K)].reliability
    _print(test, five, by_kind, reliability, verdicts)
    kinds.print_rows(rows)
    found = {**as_json(test, five, by_kind, reliability, verdicts), "rows": kinds.as_json(rows)}
    write_json(options.json, found)
    plot.draw_stored(found, options.images)
    plot.draw_kinds(rows, options.images / "kinds")
    longest = sorted(seconds, key=lambda run: -seconds[run])[:5]
    console.print(
        f"{sum(seconds.values()):.0f} s of processor time in replays, most of it in: "
        + ", ".join(f"{run.name} K={run.num_draft_tokens} ({seconds[run]:.0f} s)" for run in longest)
    )
    failed = sum(not check.passed for check in verdicts)
    print(f"{len(verdicts) - failed} of {len(verdicts)} checks hold; {time.monotonic() - began:.0f} s")
    return 3 if failed and options.strict else 0


def _labels(entry: Entry) -> tuple[str, ...]:
    """What a record counts as in the table by kind."""
    return () if entry.kind in CASES else (entry.kind, f"tokens: {entry.tokens}")


def as_json(
    test: Mapping[Run, Counts],
    five: Mapping[Run, Counts],
    by_kind: Mapping[Run, Mapping[str, Counts]],
    reliability: Reliability,
    verdicts: Sequence[Check],
) -> dict[str, Any]:
    """What the documentation is filled from: integers, so that ratios are computed where they are shown."""
    return {
        "runs": [
            {
                "policy": run.policy,
                "setting": dict(run.setting),
                "num_draft_tokens": run.num_draft_tokens,
                "five": five[run].as_json(),
                "test": test[run].as_json(),
            }
            for run in test
        ],
        "kinds": {
            run.name: {kind: c.as_json() for kind, c in kinds.items()} for run, kinds in by_kind.items()
        },
        "reliability": [
            {
                "low": d.low,
                "drafts": d.drafts,
                "confidence": _rounded(d.confidence),
                "accepted": _rounded(d.accepted),
            }
            for d in reliability.deciles()
        ],
        "checks": [check._asdict() for check in verdicts],
    }


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 4)


def _print(
    test: Mapping[Run, Counts],
    five: Mapping[Run, Counts],
    by_kind: Mapping[Run, Mapping[str, Counts]],
    reliability: Reliability,
    verdicts: Sequence[Check],
) -> None:
    console = new_console(140)
    for k in SIZES:
        table = new_table(
            f"up to {k} drafts a step", "drafter", "tok/step", "rej/acc", "five: tok/step", "five: rej/acc"
        )
        runs = [run for run in test if run.num_draft_tokens == k]
        for run in sorted(runs, key=lambda run: -test[run].tokens_per_step):
            table.add_row(run.name, *_figures(test[run]), *_figures(five[run]))
        console.print(table)
    table = new_table(
        f"by kind of record, up to {K} drafts a step", "kind", "records", *(run.name for run in by_kind)
    )
    for kind in next(iter(by_kind.values()), {}):
        cells = [" at ".join(_figures(kinds[kind])) for kinds in by_kind.values()]
        table.add_row(kind, str(next(iter(by_kind.values()))[kind].records), *cells)
    console.print(table)
    table = new_table("confidence of gpu_align", "decile", "drafts", "share", "promised", "accepted", "gap")
    for d in reliability.deciles():
        if d.drafts:
            figures = f"{d.confidence:.3f}", f"{d.accepted:.3f}", f"{d.gap:+.3f}"
            table.add_row(f"{d.low:.1f}–{d.low + 0.1:.1f}", f"{d.drafts:,}", f"{d.share:.1%}", *figures)
    console.print(table)
    table = new_table("what has to hold", "check", "found", "wanted", "")
    for check in verdicts:
        table.add_row(check.name, check.value, check.wanted, "pass" if check.passed else "FAIL")
    console.print(table)


def new_console(width: int) -> Console:
    """width: of a pipe, which has none of its own."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    return console


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    return table


def _figures(counts: Counts) -> tuple[str, str]:
    if not counts.steps:
        return "–", "–"
    return f"{counts.tokens_per_step:.2f}", f"{counts.rejected_per_accepted:.3f}"
