"""Whether the time of `Drafter.add` tells that another requester sent the same prediction.

Each round adds a prediction under one sharing key and a few others after it, as a server does, and then times
three calls on the CPU, in an order drawn anew::

    new             nobody has sent this text
    other key       the prediction of this round, under another sharing key
    same key        the prediction of this round, under the key that holds it

`other key` is to take the time of `new`. `same key` shows that the measurement would see a shared copy. The test
is a sign test over the rounds: p is the probability of a split at least as uneven if the time tells nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.tables import command
from gpu_align import Drafter

CASES = ("new", "other key", "same key")
VOCABULARY, NUM_ROUNDS, NUM_TOKENS = 131_072, 1000, 4096
#: Predictions of others between two calls that are timed.
OTHERS = 3


def rounds() -> Iterator[dict[str, float]]:
    """Microseconds of each case, round by round."""
    drafter = Drafter(
        max_slots=2, max_context_len=64, max_prediction_len=NUM_TOKENS, num_draft_tokens=16,
        vocab_size=VOCABULARY, device="cpu", max_prediction_tokens=64 * NUM_TOKENS,
    )  # fmt: skip
    draw, order = np.random.default_rng(0), random.Random(0)
    keys = {"new": "a", "other key": "b", "same key": "a"}

    def fresh() -> npt.NDArray[np.int32]:
        return draw.integers(0, VOCABULARY, NUM_TOKENS, dtype=np.int32)

    for number in range(NUM_ROUNDS + 20):
        held, took = fresh(), {}
        texts = {"new": fresh(), "other key": held.copy(), "same key": held.copy()}
        drafter.add(0, held, 0, sharing_key="a")
        for case in order.sample(CASES, len(CASES)):
            for _ in range(OTHERS):
                drafter.add(1, fresh(), 0)
            started = time.perf_counter_ns()
            drafter.add(1, texts[case], 0, sharing_key=keys[case])
            took[case] = (time.perf_counter_ns() - started) / 1000
        if number >= 20:  # the first rounds warm up
            yield took


def sign_test(slower: int, pairs: int) -> float:
    """Two-sided probability of a split at least as uneven, by the normal approximation."""
    return math.erfc(abs(slower - pairs / 2) / math.sqrt(pairs / 4) / math.sqrt(2))


def main() -> None:
    command("benchmarks.speed.sharing_time", __doc__).parse_args()
    measured = list(rounds())
    for case in CASES:
        times = sorted(took[case] for took in measured)
        quarter = len(times) // 4
        print(
            f"{case:10} median {median(times):7.1f} us, quartiles {times[quarter]:.1f} to {times[-quarter]:.1f}"
        )
    slower = sum(took["other key"] > took["new"] for took in measured)
    p = sign_test(slower, len(measured))
    print(f"other key slower than new in {slower} of {len(measured)} rounds, p = {p:.2f}")


if __name__ == "__main__":
    main()
