"""Requirements on draft quality, a row with a verdict each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.cases import least_steps
from benchmarks.quality.runs import CLAIRVOYANT, Counts, Run
from gpu_align.tools.simulate.policies import OURS
from gpu_align.tools.simulate.replay import PairResult


class Point(NamedTuple):
    """One setting of a drafter."""

    rejected_per_accepted: float
    tokens_per_step: float


def curve(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both figures, by rising rejections."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.rejected_per_accepted, -p.tokens_per_step)):
        if not best or point.tokens_per_step > best[-1].tokens_per_step:
            best.append(point)
    return best


def height(points: Sequence[Point], rejected_per_accepted: float) -> float | None:
    """Most tokens a step that a drafter with this `curve` reaches with no more rejections than that.

    Between two points on straight lines, after the last one level. None left of the first point: the drafter has
    no setting with so few rejections.
    """
    if not points or rejected_per_accepted < points[0].rejected_per_accepted:
        return None
    return float(np.interp(rejected_per_accepted, *zip(*points, strict=True)))


#: Ahead of every peer by this factor, at no more rejections than the peer's.
LEAD = 1.10
MAX_STEPS_ABOVE = 3
MAX_UNRELATED_REJECTED = 0.05
MAX_GAP = 0.05
#: K of the checks that name none.
K = 64


class Check(NamedTuple):
    """One row: what was measured, what it has to be, and whether it is."""

    name: str
    value: str
    wanted: str
    passed: bool


def point(counts: Counts) -> Point:
    """A run's place in the picture."""
    return Point(counts.rejected_per_accepted, counts.tokens_per_step)


def our_curve(counts: Mapping[Run, Counts], num_draft_tokens: int) -> list[Point]:
    """The curve through all settings of our drafter at one K, with recipes."""
    return curve(
        point(c)
        for run, c in counts.items()
        if run.policy == OURS and run.num_draft_tokens == num_draft_tokens and not run.without_recipes
    )


class Lead(NamedTuple):
    """Ours over one peer at no more rejections than the peer's; None where ours has no such setting."""

    peer: str
    point: Point
    reached: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.reached is None else self.reached / self.point.tokens_per_step


def leads(counts: Mapping[Run, Counts], num_draft_tokens: int) -> list[Lead]:
    """Ours over each peer at one K."""
    ours = our_curve(counts, num_draft_tokens)
    return [
        Lead(run.policy, point(c), height(ours, point(c).rejected_per_accepted))
        for run, c in counts.items()
        if run.num_draft_tokens == num_draft_tokens and run.policy not in (OURS, CLAIRVOYANT)
    ]


def peer_checks(counts: Mapping[Run, Counts]) -> list[Check]:
    """A row for each peer at each K: ten per cent over it at K = 64; at other K no peer is above our curve."""
    rows = []
    for k in sorted({run.num_draft_tokens for run in counts}, reverse=True):
        factor = LEAD if k == K else 1.0
        for lead in leads(counts, k):
            at, ratio = lead.point, lead.ratio
            name = f"K={k}: over {lead.peer} ({at.tokens_per_step:.2f} at {at.rejected_per_accepted:.3f})"
            value = f"{lead.reached:.2f} (x {ratio:.2f})" if ratio else "no setting with so few rejections"
            rows.append(Check(name, value, f"x {factor:.2f}", bool(ratio and ratio >= factor)))
    return rows


def perfect_check(pairs: Sequence[PairResult]) -> Check:
    """A perfect prediction takes the least possible number of steps."""
    least = sum(p.steps == least_steps(p.output_tokens, K) for p in pairs)
    value = f"{least} of {len(pairs)} outputs at the exact minimum"
    return Check("perfect prediction", value, "all", 0 < len(pairs) == least)


def one_line_checks(pairs: Sequence[PairResult], clairvoyant: Sequence[PairResult]) -> list[Check]:
    """Steps above the minimum after a one-line edit: that of a perfect prediction, and of a choice that knows all.

    New tokens that are nowhere before have to be generated one by one by any drafter; the second row allows for
    them.
    """
    rows, steps = [], np.array([p.steps for p in pairs], dtype=int)
    for name, least in (
        ("above a perfect prediction's", [least_steps(p.output_tokens, K) for p in pairs]),
        ("above the clairvoyant bound's", [p.steps for p in clairvoyant]),
    ):
        above = steps - np.array(least, dtype=int)
        within, mean = int((above <= MAX_STEPS_ABOVE).sum()), above.sum() / max(len(above), 1)
        value = f"{within} of {len(above)} edits, mean {mean:.2f}, most {above.max(initial=0)}"
        name = f"one-line edit in 1,000 tokens: steps {name}"
        rows.append(Check(name, value, f"all at most {MAX_STEPS_ABOVE}", 0 < len(above) == within))
    return rows


def unrelated_checks(unrelated: Counts, without: Counts) -> list[Check]:
    """The cost of a prediction that has nothing to do with the output."""
    share = unrelated.rejected_from_prediction / max(unrelated.output_tokens, 1)
    rejected = "unrelated prediction: rejected drafts from it per output token"
    steps = f"{unrelated.steps:,} : {without.steps:,}"
    few = unrelated.steps > 0 and share <= MAX_UNRELATED_REJECTED
    fewer = 0 < unrelated.steps <= without.steps
    return [
        Check(rejected, f"{share:.4f}", f"at most {MAX_UNRELATED_REJECTED}", few),
        Check("unrelated prediction: steps, beside none at all", steps, "no more", fewer),
    ]


def reliability_check(deciles: Sequence[Mapping[str, Any]]) -> Check:
    """Confidence against acceptance, in every decile that holds one per cent of the drafts."""
    drafts = sum(decile["drafts"] for decile in deciles)
    large = (each for each in deciles if each["drafts"] and each["drafts"] >= 0.01 * drafts)
    gap = max((abs(each["accepted"] - each["confidence"]) for each in large), default=0.0)
    value, passed = f"{gap:.3f} ({drafts:,} drafts)", drafts > 0 and gap <= MAX_GAP
    return Check("confidence: worst |accepted - promised| of a decile", value, f"at most {MAX_GAP}", passed)
