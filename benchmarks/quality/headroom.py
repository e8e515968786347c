"""What a better choice could bring: ``python -m benchmarks.quality.headroom``.

Replays ``kinds-test`` three times with long drafts, K = 64: with our drafter, with suffix decoding, and with a
chooser that knows the output and takes, at each step, whichever of the two drafts is right for longer. No chooser
between the two does better, so the third column is what there is to gain by choosing; more takes other candidates.

Drafts count as far as they are right. That costs nothing here, so the lead is that at unlimited rejections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context

from benchmarks.quality import build_suffix_peer
from benchmarks.quality.checks import K
from benchmarks.quality.kinds import LABELS, labels_of, quality_command
from benchmarks.quality.replays import bound
from benchmarks.quality.runs import Entry, Knowledge, knowledge, make_ready, read_entries
from benchmarks.tables import write_json
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


def measure(entries: Sequence[Entry], known: Mapping[str, Knowledge], jobs: int) -> list[Steps]:
    """`steps_of` every entry, in their order."""
    tasks = [entries[part :: jobs * 4] for part in range(jobs * 4)]
    with get_context("spawn").Pool(jobs) as pool:
        parts = pool.map(partial(_work, known=known), tasks, chunksize=1)
    return [parts[i % len(tasks)][i // len(tasks)] for i in range(len(entries))]


def _work(entries: Sequence[Entry], known: Mapping[str, Knowledge]) -> list[Steps]:
    import torch

    torch.set_num_threads(1)
    build_suffix_peer.add_to_path()
    found: list[Steps] = []
    for entry in entries:
        recipes = known[entry.tokens].recipes
        ours = our_drafter([entry.record], DrafterConfig(**SETTING), recipes)
        [peer] = make_policies([PEER], [entry.record], K)
        found.append(steps_of(entry.record, ours, peer, K))
    return found


def print_rows(rows: Mapping[str, Mapping[str, int]]) -> None:
    """A line a label: tokens a step, and the lead over the peer as it is and at most."""
    print(
        f"{'':<12}{'records':>8}" + "".join(f"{name:>26}" for name in COLUMNS) + f"{'lead':>8}{'at most':>9}"
    )
    for label, row in rows.items():
        speeds = "".join(f"{row['output_tokens'] / row[name]:>26.2f}" for name in COLUMNS)
        leads = [f"{row[PEER] / row[name] - 1:+.1%}" for name in (OURS, "either")]
        print(f"{label:<12}{row['records']:>8}{speeds}{leads[0]:>8}{leads[1]:>9}")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something could not be fetched)."""
    parser = quality_command("benchmarks.quality.headroom", __doc__, "kinds-test", "headroom")
    options = parser.parse_args(argv)
    if code := make_ready({"kinds-test": options.corpus, "tune": options.tune}):
        return code
    entries = read_entries(options.corpus)[:: options.one_in]
    rows = rows_of(entries, measure(entries, knowledge(options.tune, ["tekken"], 1), options.jobs))
    print_rows(rows)
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
