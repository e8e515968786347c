"""The verified drafts of each step, and how they travel: in `EngineCoreOutput.trace_headers`, a text an output,
so that it reaches whichever front end the request came from. On both sides a batch is columns of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

#: Key in that mapping; the front end takes it out again before vLLM's tracing reads the headers.
HEADER = "x-gpu-align-steps"
#: Another one, with an output after which other parts of the plugin are off: JSON, part → why.
FAULTS = "x-gpu-align-faults"

Ints = npt.NDArray[np.integer[Any]]
Counts = TypeVar("Counts", int, Ints)

#: How a number travels. vLLM's mapping takes text alone: each byte is the character of its value (Latin-1).
_INT = np.dtype("<i2")


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
    """The messages of M outputs, decoded.

    steps: of all outputs, one output's after the other's. counts: [M] how many steps each output brought.
    own: [M] 1 where the last of them is the output's own step; a step whose draft is not reported yet comes with
    a later output. refused: [M] why the request's prediction is not used as it came, an index of
    `reports.REFUSALS`.
    """

    steps: Steps
    counts: Ints
    own: Ints
    refused: Ints


def count_verified(slots: Counts, length: Counts, sampled: Counts, kept: Counts) -> tuple[Counts, Counts]:
    """How many drafts a step verified, and how many of those were accepted; of numbers or of whole columns.

    slots: without those that a grammar ruled out or that the device trimmed. length: of the draft made at the
    request's tokens before the step; slots beyond it hold padding. sampled: tokens that came out. kept: those of
    them that are output.
    """
    verified = np.minimum(slots, length)
    return verified, np.minimum(np.minimum(sampled - 1, verified), kept)


#: Characters of a step, and of the flags behind the steps of a message.
_STEP, _FLAGS = len(Steps._fields) * _INT.itemsize, _INT.itemsize


def encode(steps: Steps, output: Ints, own: Ints, refused: Ints) -> list[str]:
    """M messages. output: [S] the place of the output, 0 ≤ place < M, that each step goes with. own, refused: [M].

    A message is the four numbers of each of its steps, in their order, then one of its flags.
    """
    in_order = np.array(steps)[:, np.argsort(output, kind="stable")]
    ends = np.cumsum(len(Steps._fields) * np.bincount(output, minlength=len(own)) + 1)
    numbers = np.empty(in_order.size + len(own), dtype=_INT)
    is_flag = np.zeros(len(numbers), dtype=np.bool_)
    is_flag[ends - 1] = True
    numbers[is_flag], numbers[~is_flag] = own + 2 * refused, in_order.T.ravel()
    text, until = numbers.tobytes().decode("latin-1"), (_INT.itemsize * ends).tolist()
    return list(map(text.__getitem__, map(slice, [0, *until], until)))


def decode(texts: Sequence[str]) -> Messages:
    """The inverse of `encode`. Raises `ValueError` where one of the texts is no message."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    counts, rest = np.divmod(sizes, _STEP)
    if (rest != _FLAGS).any():
        raise ValueError(
            f"expected messages of {_STEP} characters a step and {_FLAGS} more, got {texts!r:.80}"
        )
    numbers = np.frombuffer("".join(texts).encode("latin-1"), dtype=_INT).astype(np.int64)
    last = np.cumsum(sizes) // _INT.itemsize - 1
    steps, flags = np.delete(numbers, last).reshape(-1, len(Steps._fields)), numbers[last]
    return Messages(Steps(*steps.T), counts, flags & 1, flags >> 1)


def tell_faults(output: Any, faults: Mapping[str, str]) -> None:
    """Let an `EngineCoreOutput` say which parts of the plugin are off in the engine, and why."""
    output.trace_headers = {**(output.trace_headers or {}), FAULTS: json.dumps(faults)}
