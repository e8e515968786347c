"""At a temperature every sampled token has the distribution that the model gives it, with drafts as without.

cell = (temperature, top_k, top_p, min_p, seeds, prediction)     requests of all cells share batches
expected = filters in NumPy (logits of transformers), for each context that was really written: `sampling_oracle`

The temperature of all draws together is estimated, too: one that is off by a tenth has to show, on V1 also by the
counts of `make test`. (V1 refuses min_p beside any drafter.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.campaign.sampling_oracle import Filters, Oracle, Written, judge, written
from tests.vllm.engines import VOCABULARY, Request, V2Engine

pytestmark = pytest.mark.vllm

PROMPT_LEN = 4
#: What a request writes; little is drafted after the first words of an unrelated prediction.
MAX_TOKENS = {"verbatim": 6, "edited": 6, "unrelated": 4, "memory": 6}
#: Tokens of each prediction: more than a request writes.
PREDICTED = 10
SIZES: dict[str, Any] = {"num_draft_tokens": 4, "max_model_len": 64, "num_gpu_blocks_override": 300}
#: As a server has them, and earlier answers.
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"}
ENGINES: dict[str, dict[str, Any]] = {
    "V1": {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "environment": DRAFTED_FROM},
    "V2": {"max_num_seqs": 32, "environment": {**DRAFTED_FROM, "GPU_ALIGN_MAX_PREDICTION_TOKENS": "16"}},
}
#: Of a cell, in `make test`.
DRAWS = {"V1": 200, "V2": 20}
#: A temperature is wrong if it is off by so many standard errors. A tenth has to be more, but of so few draws on
#: V2.
MOST_ERRORS, ERRORS_OF_A_TENTH = 4, 5
#: Of a cell in a batch.
MOST_REQUESTS = 400


class Cell(NamedTuple):
    filters: Filters
    prediction: str
    seeded: bool = False


CELLS = {
    "V1": [
        Cell(Filters(0.7), "verbatim"),
        Cell(Filters(1.0), "verbatim", True),
        Cell(Filters(0.7), "edited", True),
        Cell(Filters(1.0), "edited"),
        Cell(Filters(0.7), "unrelated"),
        Cell(Filters(1.0), "unrelated", True),
        Cell(Filters(0.7, top_p=0.9), "verbatim", True),
        Cell(Filters(1.0, top_p=0.8), "edited"),
        Cell(Filters(0.7, top_k=5), "verbatim"),
        Cell(Filters(1.0, top_k=12), "unrelated", True),
        Cell(Filters(0.7, top_k=20, top_p=0.9), "edited"),
        Cell(Filters(1.0, top_p=0.9), "unrelated"),
        Cell(Filters(1.0, top_k=3), "edited", True),
        Cell(Filters(1.0, top_k=8, top_p=0.95), "verbatim", True),
        Cell(Filters(0.7), "memory"),
        Cell(Filters(1.0, top_p=0.9), "memory", True),
    ],
    "V2": [
        Cell(Filters(0.7), "edited", True),
        Cell(Filters(1.0, top_p=0.8), "verbatim"),
        Cell(Filters(0.7, top_k=5), "verbatim"),
        Cell(Filters(1.0, min_p=0.05), "unrelated", True),
        Cell(Filters(0.7), "memory"),
    ],
}


#: Bonferroni: one test of a run fails with probability 0.01 though all distributions are right.
LIMIT = 0.01 / sum(map(len, CELLS.values()))


class Prompts:
    """Prompts of which the model is neither sure nor unsure how they go on, and what it most likely writes."""

    def __init__(self, oracle: Oracle, rng: random.Random, count: int) -> None:
        tried = [[rng.choice(VOCABULARY) for _ in range(PROMPT_LEN)] for _ in range(4000)]
        sure = Filters(1.0)(oracle.logits(tried)[:, 0]).max(-1) > 0.7
        tried = [tried[i] for i in np.flatnonzero(sure)[: 20 * count]]
        greedy = oracle.greedy(tried, PREDICTED)
        full = [prompt + tokens for prompt, tokens in zip(tried, greedy, strict=True)]
        best = Filters(1.0)(oracle.logits([tokens[:-1] for tokens in full], PREDICTED)).max(-1)
        likely = (best[:, 1:4] > 0.3).all(-1) & (best[:, 1:4] < 0.85).all(-1)
        self.chosen = [(tried[i], greedy[i]) for i in np.flatnonzero(likely)[:count]]
        assert self.chosen

    def request(self, cell: Cell, number: int, rng: random.Random) -> Request:
        prompt, likely = self.chosen[number % len(self.chosen)]
        prediction: list[int] | None = likely
        place = 1 + number % 3
        if cell.prediction == "edited":  # a word replaced, one more, or one left out
            other = rng.choice(VOCABULARY)
            word = [[other], [other, likely[place]], []][number // 3 % 3]
            prediction = [*likely[:place], *word, *likely[place + 1 :]]
        elif cell.prediction == "unrelated":  # but for its first word, or nothing would be drafted
            prediction = [likely[0], *rng.choices(VOCABULARY, k=PREDICTED - 1)]
        elif cell.prediction == "memory":  # of what was answered before
            prediction = None
        filters = cell.filters
        params: dict[str, Any] = {"temperature": filters.temperature, "top_p": filters.top_p}
        params |= {"top_k": filters.top_k, "min_p": filters.min_p}
        if cell.seeded:
            params["seed"] = rng.getrandbits(31)
        return Request(prompt, prediction, MAX_TOKENS[cell.prediction], params=params)


@dataclass
class Draws:
    """What a cell has written."""

    written: list[Written] = field(default_factory=list)
    count: int = 0

    def requests_for(self, least: int) -> int:
        """As many as will probably bring it there."""
        missing = max(0, least - self.count)
        return min(MOST_REQUESTS, math.ceil(1.05 * missing * (len(self.written) or 1) / (self.count or 2)))

    def add(self, answer: Written) -> None:
        self.written.append(answer)
        self.count += sum(answer.drafted)


def draw(
    engine: V2Engine, cells: list[Cell], least: int, prompts: Prompts, rng: random.Random
) -> dict[Cell, Draws]:
    """At least so many draws of each cell. One request in eight is greedy, and no draw."""
    found = {cell: Draws() for cell in cells}
    while any(draws.count < least for draws in found.values()):
        batch: list[tuple[Cell | None, Request]] = []
        for cell, draws in found.items():
            for _ in range(draws.requests_for(least)):
                batch.append((cell, prompts.request(cell, len(batch), rng)))
        batch += [(None, replace(r, params={})) for _, r in rng.sample(batch, len(batch) // 7)]
        rng.shuffle(batch)
        requests = [request for _, request in batch]
        for (cell, _), each in zip(batch, written(requests, engine.run(requests, 2700)), strict=True):
            if cell is not None:
                found[cell].add(each)
    return found


@pytest.mark.parametrize("runner", ENGINES)
def test_sampled_tokens_have_the_models_distribution(
    runner: str, tiny_model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    """A cell that fails is drawn again, alone, with other seeds and twice the draws."""
    oracle, least = Oracle(tiny_model), count(DRAWS[runner])
    prompts = Prompts(oracle, rng, 2 if least < 1000 else 24)
    verdicts = []
    with V2Engine(
        tiny_model, tmp_path, runner=runner, seed=rng.getrandbits(31), **SIZES, **ENGINES[runner]
    ) as engine:
        for cell, draws in draw(engine, CELLS[runner], least, prompts, rng).items():
            for repeats in (1, 0):
                verdict = judge(oracle, cell.filters, draws.written, rng.getrandbits(31))
                if verdict.bins > LIMIT and not verdict.impossible:
                    break
                assert repeats, (cell, verdict)
                draws = draw(engine, [cell], 2 * least, prompts, rng)[cell]
            verdicts.append(verdict)
    weights = np.array([verdict.error**-2 for verdict in verdicts])
    tilt = float((weights * [verdict.tilt for verdict in verdicts]).sum() / weights.sum())
    error = float(weights.sum() ** -0.5)
    assert abs(tilt) < MOST_ERRORS * error, "1 / temperature is off"
    assert ERRORS_OF_A_TENTH * error < 0.1 or (runner == "V2" and least == DRAWS["V2"])
