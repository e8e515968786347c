"""What a better choice could bring: ``python -m benchmarks.quality.headroom``.

Replays ``kinds-test`` three times with long drafts, K = 64: with our drafter, with suffix decoding, and with a
chooser that knows the output and takes, at each step, whichever of the two drafts is right for longer. No chooser
between the two does better, so the third column is what there is to gain by choosing; more takes other candidates.

Drafts count as far as they are right. That costs nothing here, so the lead is that at unlimited rejections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from benchmarks.processes import dealt
from benchmarks.quality.checks import K
from benchmarks.quality.kinds import LABELS, labels_of, quality_command
from benchmarks.quality.replays import bound
from benchmarks.quality.runs import Entry, Knowledge, knowledge, make_ready, read_entries
from benchmarks.tables import signed, table, write_json
from gpu_align import DrafterConfig
from gpu_align.predictors import PredictorLoop, TokenPredictor
from gpu_align.simulate import Record, make_policies
from gpu_align.tools.simulate.policies import OURS, SWEEP, our_drafter

PEER = "suffix_decoding_16_deep"
#: The longest drafts of the curve.
SETTING = SWEEP[-1]
COLUMNS = (OURS, PEER, "either")
Steps = dict[str, int]


def drafts_of(
    policies: Sequence[TokenPredictor], num_draft_tokens: int
) -> Callable[[Record], Callable[[int], Iterable[Sequence[int]]]]:
    """What these policies draft, side by side, as the candidates of `benchmarks.quality.replays.bound`.

    All of them see the same output, whichever draft is taken.
    """

    def begin(record: Record) -> Callable[[int], Iterable[Sequence[int]]]:
        loops = [
            PredictorLoop(p, num_draft_tokens=num_draft_tokens, strict=True, timeout=None) for p in policies
        ]
        for loop in loops:
            loop.start(record.prompt, record.prediction)
        seen = 0

        def drafts(done: int) -> Iterable[Sequence[int]]:
            nonlocal seen
            for loop in loops:
                loop.push(record.output[seen:done])
            seen = done
            return [loop.draft() for loop in loops]

        return drafts

    return begin


def steps_of(record: Record, ours: TokenPredictor, peer: TokenPredictor, num_draft_tokens: int) -> Steps:
    """Verification steps with `ours`, with `peer`, and with the better of both at each step."""
    sides = ([ours], [peer], [ours, peer])
    return {
        name: bound(record, num_draft_tokens, drafts_of(side, num_draft_tokens)).steps
        for name, side in zip(COLUMNS, sides, strict=True)
    }


def rows_of(entries: Sequence[Entry], steps: Sequence[Steps]) -> dict[str, dict[str, int]]:
    """Label → sums over its records: how many, output tokens, steps by column."""
    rows: dict[str, dict[str, int]] = {}
    for label in LABELS:
        chosen = [i for i, entry in enumerate(entries) if label in labels_of(entry)]
        if chosen:
            rows[label] = {
                "records": len(chosen),
                "output_tokens": sum(len(entries[i].record.output) for i in chosen),
                **{name: sum(steps[i][name] for i in chosen) for name in COLUMNS},
            }
    return rows


def measure(entries: Sequence[Entry], known: Mapping[str, Knowledge]) -> list[Steps]:
    """`steps_of` every entry, in their order."""
    found: list[Steps] = []
    for entry in entries:
        recipes = known[entry.tokens].recipes
        ours = our_drafter([entry.record], DrafterConfig(**SETTING), recipes)
        [peer] = make_policies([PEER], [entry.record], K)
        found.append(steps_of(entry.record, ours, peer, K))
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something could not be fetched)."""
    parser = quality_command("benchmarks.quality.headroom", __doc__, "kinds-test", "headroom")
    options = parser.parse_args(argv)
    if code := make_ready({"kinds-test": options.corpus, "tune": options.tune}):
        return code
    entries = read_entries(options.corpus)[:: options.one_in]
    work = partial(measure, known=knowledge(options.tune, ["tekken"], 1))
    rows = rows_of(entries, dealt(work, entries, options.jobs))
    cells = (
        [label, row["records"], *(f"{row['output_tokens'] / row[name]:.2f}" for name in COLUMNS),
         *(signed(row[PEER] / row[name] - 1) for name in (OURS, "either"))]
        for label, row in rows.items()
    )  # fmt: skip
    print(table(["", "records", *COLUMNS, "lead", "at most"], cells))
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
