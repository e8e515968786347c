"""From counts to curves: survival of every class, smoothed from the classes that say the same with less detail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu_align.ops.constants import (
    ALIGNMENT_CONTEXT,
    NUM_ADHERENCES,
    NUM_ALIGNMENTS,
    NUM_CLASSES,
    NUM_LENGTHS,
    NUM_MARGINS,
)
from gpu_align.ops.draft.tables import KNOTS, survival_units
from gpu_align.tune.observe import Array

#: A class starts from the curve of the classes that say the same with less detail, worth this many observations.
PRIOR = 15
#: A class of a table that is known is worth as many.
KNOWN_PRIOR = 100
_SHAPE = NUM_LENGTHS, NUM_MARGINS, NUM_ALIGNMENTS, NUM_ADHERENCES
#: A match in the prediction and one in the context have nothing in common but their length, and share nothing.
_TEXTS = slice(0, ALIGNMENT_CONTEXT), slice(ALIGNMENT_CONTEXT, NUM_ALIGNMENTS)


def learn(runs: Array) -> Array:
    """Survival at every k, [NUM_CLASSES, K]: counts, smoothed from the classes with less detail down.

    Matched length alone, then with the place, then with the margin, then with the adherence.
    """
    survived = np.flip(np.flip(runs, 1).cumsum(1), 1)
    seen, right = survived[:, 0].reshape(*_SHAPE, 1), survived[:, 1:].reshape(*_SHAPE, -1)
    curves = np.zeros_like(right)
    for places in _TEXTS:
        n, r = seen[:, :, places], right[:, :, places]
        curve = (r.sum((1, 2, 3), keepdims=True) + 0.3) / (n.sum((1, 2, 3), keepdims=True) + 1)
        for axes in ((1, 3), (3,), ()):
            curve = (r.sum(axes, keepdims=True) + PRIOR * curve) / (n.sum(axes, keepdims=True) + PRIOR)
        curves[:, :, places] = curve
    return _falling(curves)


def relearn(runs: Array, known: Array) -> Array:
    """Survival at every k, [NUM_CLASSES, K], from a table that is known and counts of other texts.

    ::

        for each group of classes, from all down to one class:
            curve *= (right + prior * mean curve) / (sum of what the curve promises + prior * mean curve)

    prior: `KNOWN_PRIOR`. The groups: one text, with the same matched length, with the same alignment, with the
    same margin, one class. A class that is not seen keeps its own form, and moves with those around it.

    known: [NUM_CLASSES, K], each 0 to 1.
    """
    survived = np.flip(np.flip(runs, 1).cumsum(1), 1)
    seen, right = survived[:, 0].reshape(*_SHAPE, 1), survived[:, 1:].reshape(*_SHAPE, -1)
    curves = known.reshape(*_SHAPE, -1).copy()
    for places in _TEXTS:
        n, r, curve = seen[:, :, places], right[:, :, places], curves[:, :, places]
        for axes in ((0, 1, 2, 3), (1, 2, 3), (1, 3), (3,), ()):
            promised = (n * curve).sum(axes, keepdims=True)
            count = np.maximum(n.sum(axes, keepdims=True), 1)
            # Where nothing is seen both are the prior's, and nothing changes.
            prior = KNOWN_PRIOR * np.maximum(np.where(promised > 0, promised / count, 1), 1e-3)
            curve = np.clip(curve * (r.sum(axes, keepdims=True) + prior) / (promised + prior), 1e-6, 1)
        curves[:, :, places] = curve
    return _falling(curves)


def _falling(curves: Array) -> Array:
    """[NUM_CLASSES, K] of curves by the parts of a class: none rises along its drafts."""
    # A sure match at the cursor is never weighed below one elsewhere: what the step count of a perfect prediction
    # rests on.
    curves[-1, :, 0] = np.maximum(curves[-1, :, 0], curves[-1].max((0, 1, 2)))
    return np.minimum.accumulate(np.clip(curves, 0, 1).reshape(NUM_CLASSES, -1), axis=1)


def calibrate(drafts: Array, known: Sequence[float] = ()) -> list[float]:
    """[NUM_BINS]: what to add to a confidence, by the bin that it falls in.

    The candidate that looks best is more often one that looks too good, and doubtful ones the more so: of the
    drafts that are chosen fewer are accepted than of all the places that look alike.

    drafts: [2, NUM_BINS], of `Observed`. known: another calibration, which counts as `PRIOR` drafts of each bin.
    """
    start = np.asarray(known if len(known) else np.zeros(drafts.shape[1]))
    return [round(float(p), 4) for p in (drafts[1] + PRIOR * start) / (drafts[0] + PRIOR)]


def rising(offsets: Array) -> list[float]:
    """[N]: offsets of N bins of equal width, with which what is promised rises with what was counted."""
    middles = (np.arange(len(offsets)) + 0.5) / len(offsets)
    promised = np.maximum.accumulate(middles + offsets + np.arange(len(offsets)) * 1e-4)
    return [round(float(offset), 4) for offset in promised - middles]


def at_knots(curves: Array) -> npt.NDArray[np.int64]:
    """[NUM_CLASSES, len(KNOTS)] in units of 1/`SURVIVAL_ONE`."""
    units = np.array([[survival_units(p) for p in row] for row in curves[:, np.array(KNOTS) - 1]])
    return np.minimum.accumulate(units, axis=1)
