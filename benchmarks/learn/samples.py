"""Learn drafts from samples: ``python -m benchmarks.learn.samples [OUT.json]``.

Each sample of a prompt is replayed, with `N` of the others as its prediction. At every position every candidate is
compared with what came next. The log odds that a draft is accepted are a sum of parts: by text and length of the
match, by dissent, by where it is, by agreement, and by the temperature and how many drafts are before it. Of those
that the drafter chooses fewer are accepted; the confidences say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.real_model.model import K
from benchmarks.real_model.rollouts import SAMPLES, TEMPERATURES, replays_of, rollouts, unchanged
from benchmarks.tables import command
from gpu_align import DrafterConfig
from gpu_align.drafter import survival
from gpu_align.drafter.admission import rules_of
from gpu_align.ops import choose
from gpu_align.ops.files import write_at_once
from gpu_align.ops.layout import FIRST_GAP, TEXT_RULES, TextKind, pack_rules, unpack_rules
from gpu_align.tools.simulate.records import Record
from gpu_align.tools.tune.fit import CandidateReplay

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
#: The first draft of each bucket but the first one.
DEPTH_EDGES = (2, 3, 4, 6, 9, 13, 21)
#: Draws of the others: each sample is replayed so often.
DRAWS = 2
#: Log odds are drawn towards 0 by this much.
RIDGE = 1.0
NEWTON_STEPS = 12
_TEXTS = 2  # the prediction, the context
#: Log odds by part, and the shapes of their numbers.
PARTS = {
    "length": (_TEXTS, choose.NUM_LENGTHS), "dissent": (choose.NUM_MARGINS,),
    "alignment": (choose.NUM_ALIGNMENTS,), "agreement": (choose.NUM_ADHERENCES,),
    "depth": (len(TEMPERATURES), len(DEPTH_EDGES) + 1),
}  # fmt: skip


class Replay(CandidateReplay):
    """Records of samples, drafted from as such at a temperature."""

    def __init__(self, records: Sequence[Record], temperature: float) -> None:
        longest = max(len(r.prompt) + len(r.output) for r in records)
        super().__init__(records, K, DrafterConfig(), longest)
        for slot, record in enumerate(records):
            rules = rules_of(TextKind.PREDICTION, np.array(record.prediction), temperature)
            self.state.slot_meta[slot, TEXT_RULES] = pack_rules(rules)
        self.is_several = [max(record.prediction) >= FIRST_GAP for record in records]

    def positions(self) -> Iterator[tuple[Integers, Integers, Any]]:
        """``(slots, done, view)`` after each token of all outputs, where a prediction is several texts."""
        for length in range(1, self.num_output.max()):
            slots = np.flatnonzero((self.num_output > length) & self.is_several)
            if slots.size:
                done = np.full(len(slots), length)
                yield slots, done, self.look(slots, self.num_prompt[slots] + done)


class Counted(NamedTuple):
    """Drafts of candidates by class and number, [NUM_CLASSES, K] both: how many were reached, and accepted."""

    reached: Array
    accepted: Array


def observe(replay: Replay) -> Counted:
    found = Counted(np.zeros((choose.NUM_CLASSES, K)), np.zeros((choose.NUM_CLASSES, K)))
    for slots, done, view in replay.positions():
        right = replay.right(view, slots, done)
        most = np.minimum(view.remaining, (replay.num_output[slots] - done)[:, None])
        live = view.class_id >= 0
        rows = view.class_id[live]
        runs, ahead = right[live][:, None], np.arange(K)
        np.add.at(found.accepted, rows, ahead < runs)
        np.add.at(found.reached, rows, (ahead <= runs) & (ahead < most[live][:, None]))
    return found


def fit(counts: Sequence[Counted]) -> dict[str, Array]:
    """The log odds of each part, from the counts at each of `TEMPERATURES`: logistic regression, by Newton."""
    t, class_id, ahead = np.nonzero(np.stack([each.reached for each in counts]))
    reached, accepted = (np.stack(each)[t, class_id, ahead] for each in zip(*counts, strict=True))
    length, dissent, alignment, agreement = choose.unpack_class(class_id)
    depth = np.searchsorted(DEPTH_EDGES, ahead + 1, side="right")
    is_context = (alignment == choose.ALIGNMENT_CONTEXT).astype(int)
    places = ((is_context, length), (dissent,), (alignment,), (agreement,), (t, depth))
    sizes = [int(np.prod(shape)) for shape in PARTS.values()]
    starts = np.cumsum([0, *sizes])
    design = np.zeros((len(t), starts[-1]), np.float32)
    for start, place, shape in zip(starts[:-1], places, PARTS.values(), strict=True):
        design[np.arange(len(t)), start + np.ravel_multi_index(place, shape)] = 1
    odds = newton(design, reached, accepted)
    parts = zip(starts[:-1], starts[1:], PARTS.items(), strict=True)
    found = {name: odds[begin:end].reshape(shape) for begin, end, (name, shape) in parts}
    # A longer match is never less likely; few are very long.
    found["length"][:, 1:] = np.maximum.accumulate(found["length"][:, 1:], axis=1)
    return found


def newton(design: npt.NDArray[Any], reached: Array, accepted: Array) -> Array:
    """Log odds of the columns, of which a row's sum is that of its accepted among its reached ones."""
    odds = np.zeros(design.shape[1])
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-design @ odds))
        slope = design.T @ (accepted - reached * p) - RIDGE * odds
        curvature = design.T @ (design * (reached * p * (1 - p))[:, None]) + RIDGE * np.eye(len(odds))
        odds += np.linalg.solve(curvature, slope)
    return odds


def chosen(replay: Replay) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Of the drafts that are chosen and reached after any token: what is promised, and whether it is accepted."""
    promised, accepted = [], []
    for slots, done, view in replay.positions():
        left = replay.num_output[slots] - done
        ahead = np.arange(K)
        at = np.minimum((replay.num_prompt[slots] + done)[:, None] + ahead, replay.token_ids.shape[1] - 1)
        drafted = np.minimum(view.length, left)[:, None]
        wrong = (view.draft != replay.token_ids[slots[:, None], at]) | (ahead >= drafted)
        taken = np.where(wrong.any(axis=1), wrong.argmax(axis=1), K)[:, None]
        reached = (ahead <= taken) & (ahead < drafted)
        rules = replay.state.slot_meta[slots, TEXT_RULES]
        limits = np.array([unpack_rules(int(packed)).limits for packed in rules])
        block = limits - choose.SAMPLES + 2
        rows = view.class_id[np.arange(len(slots)), np.maximum(view.lane, 0)] + block * choose.NUM_CLASSES
        promised.append(replay.tables.confidence[rows][reached].astype(float))
        accepted.append((ahead < taken)[reached])
    return np.concatenate(promised), np.concatenate(accepted)


def scaled(promised: Array, accepted: npt.NDArray[np.bool_]) -> list[float]:
    """Slope and shift of the log odds of what is promised, with which it holds."""
    below = np.clip(promised, 1e-4, 0.9999)
    design = np.stack([np.log(below / (1 - below)), np.ones(len(below))], axis=1)
    return [round(float(x), 4) for x in newton(design, np.ones(len(below)), accepted.astype(float))]


def write(path: Path, parts: dict[str, Array], confidence: Sequence[Sequence[float]]) -> None:
    """Write a file of odds, and let replays from here on use it."""
    about = {"made_by": "python -m benchmarks.learn.samples", "depth_edges": DEPTH_EDGES}
    odds = {name: np.round(each, 3).tolist() for name, each in parts.items()}
    write_at_once(path, [json.dumps(about | odds | {"confidence": confidence}, indent=1).encode()])
    survival.SAMPLED = path


def main() -> None:
    parser = command("benchmarks.learn.samples", __doc__)
    parser.add_argument(
        "out", nargs="?", type=Path, default=survival.SAMPLED, help="default: the shipped file"
    )
    out = parser.parse_args().out
    prompts, _, known = rollouts([unchanged(t) for t in TEMPERATURES], SAMPLES)
    records = [
        [record for record, _ in replays_of(prompts, known[unchanged(t)]["samples"], "learned", DRAWS)]
        for t in TEMPERATURES
    ]
    as_promised = [[1.0, 0.0]] * len(TEMPERATURES)
    with TemporaryDirectory() as folder:  # what is learned from has files of its own
        write(Path(folder) / "none", {name: np.zeros(shape) for name, shape in PARTS.items()}, as_promised)
        parts = fit([observe(Replay(each, t)) for each, t in zip(records, TEMPERATURES, strict=True)])
        write(Path(folder) / "odds", parts, as_promised)
        confidence = [scaled(*chosen(Replay(each, t))) for each, t in zip(records, TEMPERATURES, strict=True)]
    write(out, parts, confidence)
    print(f"wrote {out}; confidence {confidence}")


if __name__ == "__main__":
    main()
