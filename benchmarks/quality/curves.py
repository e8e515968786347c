"""A drafter's trade-off as a curve: tokens a step over rejected drafts per accepted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


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

    Between two points on straight lines, behind the last one level. None left of the first point: the drafter has
    no setting with so few rejections.
    """
    if not points or rejected_per_accepted < points[0].rejected_per_accepted:
        return None
    for left, right in pairwise(points):
        if rejected_per_accepted < right.rejected_per_accepted:
            part = (rejected_per_accepted - left.rejected_per_accepted) / (
                right.rejected_per_accepted - left.rejected_per_accepted
            )
            return left.tokens_per_step + part * (right.tokens_per_step - left.tokens_per_step)
    return points[-1].tokens_per_step
