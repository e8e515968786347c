"""What no drafter can beat: replays in which the choice of the draft knows the output.

`bound` replays a record with a chooser that sees what comes: of the candidates it is given it takes the one that
is right for longest, and drafts just the part that is right. With `everywhere` as candidates, any place in
prediction or output, that is the clairvoyant bound; with the candidates of a drafter, what a perfect choice among
those would be worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_align.simulate.records import Record
from gpu_align.simulate.replay import Drafted, PairResult, verification_steps

IntArray = NDArray[np.int64]
#: ``candidates(record)`` is asked once a record; what it returns is called with the number of output tokens so
#: far, which only grows, and gives the continuations to choose from. Only tokens before that point may be read.
Candidates = Callable[[Record], Callable[[int], Iterable[Sequence[int] | IntArray]]]
#: How far from the old cursor `suffixes_and_cursor` looks.
CURSOR_OFFSETS = range(-2, 17)
LONGEST_SUFFIX = 64


def bound(
    record: Record, num_draft_tokens: int, candidates: Candidates, draft_in_prefill: bool = False
) -> PairResult:
    """Replay with a perfect choice of candidate and length.

    ::

        while position < L:
            draft = the longest prefix of output[position:], up to K tokens, that a candidate starts with

    No draft is ever rejected. A longer draft is never worse than a shorter one for a set of candidates that only
    grows, so with `everywhere` no drafter that copies from prediction or output takes fewer steps.

    Args:
        record: what to replay.
        num_draft_tokens: K, at least 1.
        candidates: what there is to choose from.
        draft_in_prefill: let the prefill step verify drafts.
    """
    output = np.asarray(record.output)
    steps = verification_steps(record, num_draft_tokens, draft_in_prefill)
    at = candidates(record)
    position = 0
    try:
        position += len(next(steps))
        while True:
            truth = output[position : position + num_draft_tokens]
            right = max((_equal(candidate, truth) for candidate in at(position)), default=0)
            position += len(steps.send(Drafted(truth[:right].tolist())))
    except StopIteration as finished:
        result: PairResult = finished.value
        return result


def everywhere(record: Record) -> Callable[[int], Iterable[IntArray]]:
    """Every place in prediction, prompt and output so far; looks ahead, and gives the best of each alone."""
    prediction, prompt, output = _arrays(record)
    context = np.concatenate([prompt, output])

    def best(done: int) -> list[IntArray]:
        truth = output[done:]
        texts = prediction, context[: len(prompt) + done]
        return [text[start:] for text in texts if (start := _longest_at(text, truth)) is not None]

    return best


def suffixes_and_cursor(record: Record) -> Callable[[int], Iterable[IntArray]]:
    """The longest suffix matches in prediction and context, all of them, and places near the old cursor.

    The old cursor is behind the last token of the prediction that the output followed; `CURSOR_OFFSETS` around it
    stand for a token or two inserted, replaced or deleted.
    """
    prediction, prompt, output = _arrays(record)
    context = np.concatenate([prompt, output])
    cursor = seen = 0

    def candidates(done: int) -> list[IntArray]:
        nonlocal cursor, seen
        now = context[: len(prompt) + done]
        ends, length = _suffix_ends(prediction, now)
        for token in output[seen:done]:
            cursor += int(cursor < len(prediction) and prediction[cursor] == token)
        seen = done
        if length >= 2 and cursor not in ends:
            cursor = int(ends[np.abs(ends - cursor).argmin()])
        places = [cursor + offset for offset in CURSOR_OFFSETS if cursor + offset >= 0]
        own, _ = _suffix_ends(now, now)
        return [prediction[p:] for p in [*places, *ends.tolist()]] + [now[p:] for p in own.tolist()]

    return candidates


def _arrays(record: Record) -> tuple[IntArray, IntArray, IntArray]:
    texts = (np.asarray(tokens, np.int64) for tokens in (record.prediction, record.prompt, record.output))
    prediction, prompt, output = texts
    return prediction, prompt, output


def _equal(candidate: Sequence[int] | IntArray, truth: IntArray) -> int:
    """Length of the longest common prefix."""
    found = np.asarray(candidate[: len(truth)])
    wrong = found != truth[: len(found)]
    return int(wrong.argmax()) if wrong.any() else len(found)


def _longest_at(text: IntArray, truth: IntArray) -> int | None:
    """A start in `text` of the longest prefix of `truth` that occurs in it; None where no token does."""
    starts: IntArray = np.flatnonzero(text == truth[0]) if len(truth) else np.zeros(0, np.int64)
    if not len(starts):
        return None
    for length in range(1, len(truth)):
        longer = starts[starts + length < len(text)]
        longer = longer[text[longer + length] == truth[length]]
        if not len(longer):
            break
        starts = longer
    return int(starts[0])


def _suffix_ends(text: IntArray, context: IntArray) -> tuple[IntArray, int]:
    """All ends in `text`, the very last excluded, of the longest suffix of `context` up to `LONGEST_SUFFIX`."""
    if not len(context):
        return np.zeros(0, np.int64), 0
    ends = np.flatnonzero(text[:-1] == context[-1]) + 1
    length = min(1, len(ends))
    while len(ends) and length < min(LONGEST_SUFFIX, len(context)):
        longer = ends[ends > length]
        longer = longer[text[longer - 1 - length] == context[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length
