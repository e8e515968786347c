"""What to measure and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gpu_align.bench.errors import BenchError
from gpu_align.bench.predictions import Choice

#: In the order of tables. `ngram` is vLLM's own drafter, on a server of its own.
MODES = ("none", "prediction", "unrelated", "ngram")
MAX_CONCURRENCY = 4096


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        concurrency: requests in flight, a measurement each.
        modes: a selection of `MODES`, in their order.
        rounds: how often each combination is measured.
        requests: requests of one combination in one round; 0: the pairs once, and at least two each stream.
        max_tokens: the most output tokens of a request.
        prediction: which predictions to send, see `predictions.make_predictions`.
        tie_margin: the largest difference of two log probabilities that counts as a near tie.
        timeout_s: the longest wait for a piece of an answer.
        fresh_prefix: whether each request is prefilled anew.
    """

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    modes: tuple[str, ...] = MODES[:3]
    rounds: int = 3
    requests: int = 0
    max_tokens: int = 1024
    prediction: Choice = "auto"
    tie_margin: float = 0.25
    timeout_s: float = 600.0
    fresh_prefix: bool = True

    def requests_at(self, concurrency: int, pairs: int) -> int:
        """Return the number of requests of one turn."""
        return self.requests or max(pairs, 2 * concurrency)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as they are written to a file."""
        return asdict(self)


class Turn(NamedTuple):
    """One measurement: a mode at a concurrency, in a round."""

    round: int
    concurrency: int
    mode: str


def turns(modes: Sequence[str], concurrency: Sequence[int], rounds: int) -> Iterator[Turn]:
    """Every mode at every concurrency in every round.

    The modes of one concurrency run one after another, so that a slow minute hits all of them. The first of them
    changes from round to round, so that none is always the first.
    """
    for number in range(rounds):
        for place, streams in enumerate(concurrency):
            shift = (number + place) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                yield Turn(number, streams, mode)


def parse_modes(text: str) -> tuple[str, ...]:
    """Read ``none,prediction``.

    Raises:
        BenchError: a name is none of `MODES`, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in MODES]:
        raise BenchError(f"--modes: expected some of {','.join(MODES)}, found {unknown[0]!r}", usage=True)
    if not names:
        raise BenchError(f"--modes: expected some of {','.join(MODES)}, found {text!r}", usage=True)
    return tuple(mode for mode in MODES if mode in names)


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Read ``1,8,32``.

    Raises:
        BenchError: something is no number from 1 to `MAX_CONCURRENCY`.
    """
    numbers = []
    for word in text.split(","):
        number = int(word) if word.strip().isascii() and word.strip().isdigit() and len(word) < 9 else 0
        if not 1 <= number <= MAX_CONCURRENCY:
            raise BenchError(
                f"--concurrency: expected numbers from 1 to {MAX_CONCURRENCY} as in 1,8,32, found {text!r}",
                usage=True,
            )
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def check_url(option: str, url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        BenchError: it is no HTTP URL that ends in ``/v1``.
    """
    found = url.strip().rstrip("/")
    if (
        not found.startswith(("http://", "https://"))
        or not found.endswith("/v1")
        or len(found.split("/")) < 4
    ):
        raise BenchError(
            f"{option}: expected a URL that ends in /v1, such as http://localhost:8000/v1, found {url!r}",
            usage=True,
        )
    return found
