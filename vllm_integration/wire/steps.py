"""The verified drafts of each step, and how they travel: a text in `EngineCoreOutput.trace_headers`, which reach
the front end that the request came from. On both sides a batch is columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .reports import Ints, Shorts

#: Key in that mapping; the front end takes it out again before vLLM's tracing reads the headers.
HEADER = "x-gpu-align-steps"
#: Another one, with an output after which other parts of the plugin are off: JSON, part → why.
FAULTS = "x-gpu-align-faults"

#: How a number travels. vLLM's mapping takes text alone: each byte is the character of its value (Latin-1).
_INT = np.dtype(np.int16)


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
    """The messages of M outputs.

    steps: of all outputs, one output's after the other's. counts: [M] how many steps each output brought.
    before: [M] tokens of the request's outputs since the one that brought the last message.
    own: [M] 1 where the last of them is the output's own step; a step whose draft is not reported yet comes with
    a later output. refused: [M] why the request's prediction is not used as it came, an index of
    `reports.REFUSALS`.
    """

    steps: Steps
    counts: Ints
    before: Ints
    own: Ints
    refused: Ints


def count_verified(slots: int, length: int, sampled: int, kept: int) -> tuple[int, int]:
    """How many drafts a step verified, and how many of those were accepted.

    slots: without those that a grammar ruled out or that the device trimmed. length: of the draft made at the
    request's tokens before the step; slots beyond it hold padding. sampled: tokens that came out. kept: those of
    them that are output.
    """
    verified = min(slots, length)
    return verified, min(sampled - 1, verified, kept)


#: Numbers of a step, and those at the end of a message: the four of each of its steps, then `before`, then both
#: flags, ``own + 2 * refused``.
_STEP, _END = len(Steps._fields), 2


def encode(numbers: Shorts, ends: Sequence[int]) -> list[str]:
    """A text for each message. numbers: [N] of all of them; ends: [M] where each ends."""
    text, bounds = numbers.tobytes().decode("latin-1"), [0, *(_INT.itemsize * end for end in ends)]
    return [text[start:end] for start, end in pairwise(bounds)]


def decode(texts: Sequence[str]) -> Messages:
    """The inverse of `encode`. Raises `ValueError` where one of the texts is no message."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    counts, rest = np.divmod(sizes - _END * _INT.itemsize, _STEP * _INT.itemsize)
    if rest.any() or counts.min(initial=0) < 0:
        raise ValueError(f"expected messages of {_STEP} numbers a step and {_END} more, got {texts!r:.80}")
    numbers = np.frombuffer("".join(texts).encode("latin-1"), dtype=_INT).astype(np.int64)
    ends = np.cumsum(sizes) // _INT.itemsize
    before, flags = numbers[ends - 2], numbers[ends - 1]
    steps = np.delete(numbers, np.concatenate([ends - 2, ends - 1])).reshape(-1, _STEP)
    return Messages(Steps(*steps.T), counts, before, flags & 1, flags >> 1)


def tell_faults(output: Any, faults: Mapping[str, str]) -> None:
    """Let an `EngineCoreOutput` say which parts of the plugin are off in the engine, and why."""
    output.trace_headers = {**(output.trace_headers or {}), FAULTS: json.dumps(faults)}
