"""What a table and a pack are worth on requests that were held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_align.tune.observe import Observed


@dataclass(frozen=True)
class Point:
    """What a table and its settings come to on some requests.

    Attributes:
        tokens: output tokens.
        steps: verification steps.
        accepted: draft tokens.
        rejected: draft tokens.
        gap: how far confidences are off: the mean of |accepted − promised| over the drafts, by bins of 0.05.
    """

    tokens: int
    steps: int
    accepted: int
    rejected: int
    gap: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def rejected_per_accepted(self) -> float:
        return self.rejected / max(self.accepted, 1)


@dataclass(frozen=True)
class Report:
    """Before and after, on requests that were held back.

    Attributes:
        learned_from: requests.
        held_back: requests.
        before: the table that comes with the library, at the default settings; where a pack was learned, with the
            recipes that come with the library.
        after: the new table, and the pack if one was learned, at the settings chosen with them.
        equal: tokens a step of what is new at the rejections of `before`, between its settings; None where it
            does not reach so many, or so few.
        settings: of `after`.
        without_pack: the new table with the recipes of `before`, at the settings of `after`; None without a pack.
    """

    learned_from: int
    held_back: int
    before: Point
    after: Point
    equal: float | None
    settings: dict[str, float]
    without_pack: Point | None = None

    @property
    def gain(self) -> float | None:
        """By how much `equal` is above the tokens a step of `before`; 0.03 is 3 %."""
        return None if self.equal is None else self.equal / self.before.tokens_per_step - 1


def at_rejections(points: Sequence[Point], rejected: float) -> float | None:
    """Tokens a step at so many rejected drafts per accepted one, on the line through the best of these points;
    None outside."""
    best: list[tuple[float, float]] = []
    for x, y in sorted((p.rejected_per_accepted, p.tokens_per_step) for p in points):
        if not best or y > best[-1][1]:
            best.append((x, y))
    xs, ys = zip(*best, strict=True)
    if not xs[0] <= rejected:
        return None
    return float(np.interp(rejected, xs, ys)) if rejected <= xs[-1] else float(ys[-1])


def point_of(found: Observed) -> Point:
    tokens, steps, accepted, rejected = map(int, found.total)
    drafts = found.drafts + found.recipe_drafts
    gap = float(np.abs(drafts[1]).sum() / max(drafts[0].sum(), 1))
    return Point(tokens, steps, accepted, rejected, gap)
