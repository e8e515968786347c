"""Whether two greedy answers are the same, and if not, whether rounding decided between two tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpu_align.bench.client import Alternatives

Verdict = Literal["yes", "near-tie", "no"]
#: A difference may begin a few tokens before its first character: "ab" + "c" and "a" + "bd".
_TOKENS_BACK = 3


def first_difference(a: str, b: str) -> int:
    """Return the index of the first character in which two different texts differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_near_tie(a: str, b: str, places: Sequence[Alternatives], margin: float) -> bool:
    """Whether, where `a` and `b` part, a token of each was about equally likely.

    Args:
        a, b: two different answers to one request.
        places: the tokens of a third answer to it, with the likeliest alternatives.
        margin: the largest difference of two log probabilities that counts as a tie.

    Returns:
        False also where it cannot be told, because the third answer leaves both before they part.
    """
    at = first_difference(a, b)
    written = "".join(place.text for place in places)
    before = [place for place in places if place.start <= at and written[: place.start] == a[: place.start]]
    return any(_tie_at(a, b, at, place, margin) for place in before[-_TOKENS_BACK:])


def _tie_at(a: str, b: str, at: int, place: Alternatives, margin: float) -> bool:
    rest_a, rest_b = a[place.start :], b[place.start :]
    fitting = {
        token: logprob
        for token, logprob in place.logprobs
        if token and (rest_a.startswith(token) or rest_b.startswith(token))
    }
    if place.start == at and not (
        rest_a and rest_b
    ):  # one answer ends here: any other token stands for its end
        ending = [logprob for token, logprob in place.logprobs if token not in fitting]
        return any(abs(x - y) <= margin for x in fitting.values() for y in ending)
    if place.start == at:  # the tokens must be of different answers
        of_a = [logprob for token, logprob in fitting.items() if rest_a.startswith(token)]
        of_b = [logprob for token, logprob in fitting.items() if rest_b.startswith(token)]
        return any(abs(x - y) <= margin for x in of_a for y in of_b)
    values = sorted(fitting.values(), reverse=True)
    return len(values) > 1 and values[0] - values[1] <= margin
