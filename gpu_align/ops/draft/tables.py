"""Survival tables: how likely the first k drafts of a candidate are all accepted, given its class.

A class is what one can tell about a candidate before it is verified; README.md here lists them. The numbers
are learned offline (``python -m benchmarks.learn_survival``) and shipped as ``survival.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

#: Probabilities are integers over this, so that kernel and reference add them up to the same bits.
SURVIVAL_ONE = 1 << 16
#: A match this long is as good as certain; longer ones are not told apart.
MAX_MATCH = 64
#: Distance of a match in the prediction from the cursor: at it, one ahead, up to 16 ahead, more, behind.
NUM_DISTANCES = 5
#: Matched length -> bucket: the first length of each bucket; bucket 0 is "nothing matched".
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
NUM_LENGTHS = len(LENGTH_EDGES) + 1

#: No suffix matches anywhere in the prediction: go on at the cursor.
CLASS_CURSOR_ALONE = 0
#: A suffix matches elsewhere in the prediction, but go on at the cursor all the same.
CLASS_CURSOR_BESIDE_MATCH = 1
#: The whole output so far is the beginning of the prediction.
CLASS_WHOLE = 2
#: Classes of matches in the prediction: ``bucket * NUM_DISTANCES + distance``, from bucket 1 on.
#: Classes of matches in the request's own context: ``CLASS_CONTEXT + bucket``.
CLASS_CONTEXT = NUM_LENGTHS * NUM_DISTANCES
NUM_CLASSES = CLASS_CONTEXT + NUM_LENGTHS

SHIPPED = Path(__file__).with_name("survival.json")


def length_buckets() -> npt.NDArray[np.int32]:
    """[MAX_MATCH + 1] int32: matched length -> bucket, ``0 <= bucket < NUM_LENGTHS``."""
    return np.searchsorted(np.array(LENGTH_EDGES), np.arange(MAX_MATCH + 1), side="right").astype(np.int32)


@dataclass(frozen=True)
class SurvivalTables:
    """The tables of one drafter, on its device, for its K."""

    #: [MAX_MATCH + 1] int32: matched length -> bucket.
    bucket: torch.Tensor
    #: [NUM_CLASSES, K] int32 in units of 1/`SURVIVAL_ONE`: P(drafts 0..k are all accepted); never rises in k.
    survival: torch.Tensor
    #: [NUM_CLASSES, K] float32: P(draft k is accepted | the ones before it are), 0 < p <= 1.
    confidence: torch.Tensor

    @classmethod
    def load(
        cls, num_draft_tokens: int, device: torch.device | str, path: Path | str | None = None
    ) -> SurvivalTables:
        """Read a table and fit it to K: cut where it is longer, continued at its last rate where it is shorter.

        Args:
            num_draft_tokens: K >= 1.
            device: where the tensors live.
            path: a JSON file as ``benchmarks.learn_survival`` writes it; None is the shipped one.

        Raises:
            ValueError: the file does not hold ``NUM_CLASSES`` curves that start at or below 1 and never rise.
        """
        curves = read_survival(SHIPPED if path is None else Path(path))
        survival = np.rint(fit_curves(curves, num_draft_tokens) * SURVIVAL_ONE).astype(np.int32)
        survival = np.maximum(survival, 1)
        before = np.concatenate([np.full((NUM_CLASSES, 1), SURVIVAL_ONE), survival[:, :-1]], axis=1)
        return cls(
            bucket=torch.from_numpy(length_buckets()).to(device),
            survival=torch.from_numpy(survival).to(device),
            confidence=torch.from_numpy((survival / before).astype(np.float32)).to(device),
        )


@lru_cache(maxsize=4)
def read_survival(path: Path) -> npt.NDArray[np.float64]:
    """[NUM_CLASSES, k] float64 survival probabilities from a JSON file, checked."""
    curves = np.array(json.loads(path.read_text())["survival"], dtype=np.float64)
    if curves.ndim != 2 or curves.shape[0] != NUM_CLASSES or curves.shape[1] < 2:
        raise ValueError(f"{path}: expected survival [{NUM_CLASSES}, 2 or more], found {list(curves.shape)}")
    if not (curves.min() >= 0 and curves.max() <= 1 and (np.diff(curves, axis=1) <= 0).all()):
        raise ValueError(f"{path}: expected survival between 0 and 1 that never rises along a row")
    return curves


def fit_curves(curves: npt.NDArray[np.float64], num_draft_tokens: int) -> npt.NDArray[np.float64]:
    """[NUM_CLASSES, K] from curves of any length: cut, or continued at the mean rate of their second half."""
    known = curves.shape[1]
    if num_draft_tokens <= known:
        return curves[:, :num_draft_tokens]
    half = known // 2
    tail = np.maximum(curves[:, -1:], 1e-9)
    rate = (tail / np.maximum(curves[:, half - 1 : half], 1e-9)) ** (1 / (known - half))
    more = np.arange(1, num_draft_tokens - known + 1)
    return np.concatenate([curves, tail * np.minimum(rate, 1) ** more], axis=1)
