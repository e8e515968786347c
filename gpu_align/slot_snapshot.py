"""What a drafter knows of one request, on the host: for engines that move requests between workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .ops import constants as c
from .ops.state import StepState

IntArray = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class SlotSnapshot:
    """A request as `Drafter.export_slot` gives it and `Drafter.import_slot` takes it. Can be pickled.

    It holds the prediction and says what the output was like: protect it as you protect requests.

    Attributes:
        prediction: [n] int32.
        prompt_len: tokens of its prompt.
        recipes: names of the recipe packs that it uses; None is all.
        memory: whether the prediction is a text of earlier answers.
        related: of a memory: whether they are answers to requests like this one.
        align_state, lcs_row, edits, context_index: its rows of the drafter's state, `gpu_align.ops.constants`.
    """

    prediction: npt.NDArray[np.int32]
    prompt_len: int
    recipes: tuple[str, ...] | None
    memory: bool
    align_state: IntArray
    lcs_row: IntArray
    edits: IntArray
    context_index: IntArray
    related: bool = False

    def __repr__(self) -> str:
        """One line: sizes, and nothing of the request."""
        return f"SlotSnapshot(num_prediction={len(self.prediction)}, prompt_len={self.prompt_len})"


_ROWS = ("align_state", "lcs_row", "edits", "context_index")


def take(state: StepState, slot: int, names: tuple[str, ...]) -> SlotSnapshot:
    """Copy a slot to the host, which waits for it. names: of the recipe packs.

    Raises:
        ValueError: the slot holds no request.
    """
    meta = state.slot_meta[slot].tolist()
    if meta[c.OUTPUT_START] == c.VACANT:
        raise ValueError(f"slot: expected one that holds a request, found {slot}, which is vacant")
    base, packs = meta[c.PREDICTION_BASE], meta[c.RECIPE_PACKS]
    rows = {name: getattr(state, name)[slot].cpu().numpy().copy() for name in _ROWS}
    return SlotSnapshot(
        prediction=state.prediction_tokens[base : base + meta[c.PREDICTION_LEN]].cpu().numpy().copy(),
        prompt_len=meta[c.OUTPUT_START],
        recipes=None if packs == c.ALL_PACKS else tuple(n for i, n in enumerate(names) if packs >> i & 1),
        memory=meta[c.ADHERENCE_PRIOR] > 0,
        related=meta[c.ADHERENCE_PRIOR] == c.RELATED_PRIOR,
        **rows,
    )


def check(state: StepState, snapshot: SlotSnapshot) -> None:
    """Raise where a snapshot is of a drafter with other sizes.

    Raises:
        ValueError: its rows have other shapes.
    """
    for name in _ROWS:
        expected, found = tuple(getattr(state, name).shape[1:]), getattr(snapshot, name).shape
        if found != expected:
            raise ValueError(
                f"snapshot.{name}: expected {list(expected)}, as of this drafter's max_context_len, "
                f"found {list(found)}"
            )


def put(state: StepState, slot: int, snapshot: SlotSnapshot) -> None:
    """Write the rows of a snapshot to an occupied slot."""
    for name in _ROWS:
        row = getattr(state, name)[slot]
        row.copy_(torch.from_numpy(getattr(snapshot, name)))
