"""What one verification step of one request verified, and how it travels: in `EngineCoreOutput.trace_headers`.

The steps of a whole batch are columns of numbers on both sides. On the way each output of the engine carries a
short text of its own, so that it reaches whichever front end the request came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

#: Key in `EngineCoreOutput.trace_headers`, vLLM's one open mapping from the engine to the front end. The front
#: end takes it out again before vLLM's tracing reads the headers.
HEADER = "x-gpu-align-steps"

Ints = npt.NDArray[np.integer[Any]]
Counts = TypeVar("Counts", int, Ints)

#: A number n ≥ 0 travels as the character of code n + 48: a digit where it is below 10.
_ZERO = ord("0")
#: Stands behind each message while a batch of them is read: below 0, as no number of a message is.
_END = ord("\n") - _ZERO


class Steps(NamedTuple):
    """S verification steps; every field [S].

    source: values of `gpu_align.Source`: who proposed. length: drafts proposed.
    verified: those of them that the engine verified, ≤ length. accepted: those of these that are output.
    """

    source: Ints
    length: Ints
    verified: Ints
    accepted: Ints


class Messages(NamedTuple):
    """What came with M outputs.

    steps: of all outputs, one output's after the other's. counts: [M] how many steps each output brought.
    own: [M] 1 where the last of them is the output's own step; a step whose draft is not reported yet comes with
    a later output. off: [M] 1 where the worker drafts no more. refused: [M] why the request's prediction is not
    used as it came, an index of `reports.REFUSALS`.
    """

    steps: Steps
    counts: Ints
    own: Ints
    off: Ints
    refused: Ints


def count_verified(slots: Counts, length: Counts, sampled: Counts, kept: Counts) -> tuple[Counts, Counts]:
    """How many drafts a step verified, and how many of those were accepted; of numbers or of whole columns.

    slots: draft slots of the step, without those that a grammar ruled out or that the device trimmed.
    length: of the draft made at the request's tokens before the step. Slots beyond it hold padding that nobody
    proposed. sampled: tokens that came out. kept: those of them that are output; fewer where the output ends
    within them.
    """
    verified = np.minimum(slots, length)
    return verified, np.minimum(np.minimum(sampled - 1, verified), kept)


def encode(steps: Steps, own: Ints, refused: Ints, off: bool = False) -> list[str]:
    """One message a step: four characters of the step, then one of `own`, `off` and `refused`.

    Messages are joined by `message[:-1] + later_message`; a message without its step is `message[-1]`.
    """
    numbers = np.array([*steps, own + 2 * off + 4 * refused]) + _ZERO
    # NumPy's strings are code points of four bytes.
    text = numbers.T.astype("<u4", order="C").view(f"<U{len(numbers)}")
    messages: list[str] = text[:, 0].tolist()
    return messages


def decode(texts: Sequence[str]) -> Messages:
    """The inverse of `encode`. Raises `ValueError` where one of the texts is no message."""
    width = len(Steps._fields)
    joined = "\n".join([*texts, ""])
    numbers = np.frombuffer(joined.encode("utf-32-le"), dtype="<i4") - np.int64(_ZERO)
    ends = np.flatnonzero(numbers < 0)  # of each text, if there is nothing else below 0
    sizes = ends.copy()
    sizes[1:] -= ends[:-1] + 1
    counts, rest = np.divmod(sizes, width)
    if len(ends) != len(texts) or (rest != 1).any() or (numbers[ends] != _END).any():
        raise ValueError(f"expected messages of {width} characters a step and one more, got {texts!r:.80}")
    is_step = numbers >= 0
    is_step[ends - 1] = False
    steps, last = numbers[is_step].reshape(-1, width), numbers[ends - 1]
    return Messages(Steps(*steps.T), counts, last & 1, last >> 1 & 1, last >> 2)
