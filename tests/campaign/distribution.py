"""At a temperature every sampled token has the distribution that the model gives it, with drafts as without.

cell = (temperature, top_k, top_p, min_p, seeds, prediction)     requests of all cells share batches
expected = filters in NumPy (logits of transformers), for each context that was really written

A draw is a token that was verified: sampled at a position that held a draft. Its context is known, so that it has
a distribution of its own. With the vocabulary in some order that does not depend on the draw, and v uniform,

    u = expected(tokens before it) + v * expected(token)

is uniform in [0, 1) if `expected` is right, whatever came before. What the prediction has next comes first in that
order, the others follow from the likeliest: a draft that is accepted too often fills the first bins. Chi-square
over 20 bins of u, and over the first two tokens of each prompt as pairs, those with fewer than 5 expected in one
bin. On V1 a request with min_p gets no drafts, and each of its tokens is a draw. The temperature of all draws
together is estimated, too: one that is off by a tenth has to be told, also by the counts of `make test`.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_llama import build
from v2_harness import VOCABULARY, Request, Run, V2Engine

from tests.campaign.campaign import Campaign, Row, main
from tests.campaign.sampling_oracle import Filters, Oracle, bins_of, pairs_of, tilt_of

PROMPT_LEN = 4
#: What a request writes; little is drafted after the first words of an unrelated prediction.
MAX_TOKENS = {"verbatim": 6, "edited": 6, "unrelated": 4, "memory": 6}
#: Tokens of each prediction: more than a request writes.
PREDICTED = 10
K = 4
SIZES = {"max_model_len": 64, "num_gpu_blocks_override": 300}
#: As a server has them, and earlier answers.
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"}
OF_V1: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "environment": DRAFTED_FROM}
OF_V2 = {"max_num_seqs": 32, "environment": {**DRAFTED_FROM, "GPU_ALIGN_MAX_PREDICTION_TOKENS": "16"}}
#: Of a cell.
LEAST_DRAWS = 5000
DRAWS = {"V1": 12_000, "V2": LEAST_DRAWS}
QUICK_DRAWS = {"V1": 200, "V2": 20}
#: A temperature is wrong if it is off by so many standard errors. A tenth has to be more, but in V2's quick run.
MOST_ERRORS, ERRORS_OF_A_TENTH = 4, 5
#: Of a cell in a batch.
MOST_REQUESTS = 400


class Cell(NamedTuple):
    filters: Filters
    prediction: str
    seeded: bool = False

    def __str__(self) -> str:
        return f"{self.filters}, {self.prediction}{', seeds' * self.seeded}"


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
        Cell(Filters(0.7, min_p=0.05), "verbatim", True),
        Cell(Filters(1.0, min_p=0.1), "edited"),
        Cell(Filters(0.7, top_k=20, top_p=0.9), "edited"),
        Cell(Filters(1.0, top_p=0.9), "unrelated"),
        Cell(Filters(1.0, top_k=3), "edited", True),
        Cell(Filters(1.0, top_k=8, top_p=0.95, min_p=0.02), "verbatim", True),
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
LIMIT = 0.01 / (2 * sum(map(len, CELLS.values())))


class Written(NamedTuple):
    """What became of a request. drafted: whether its tokens were sampled where a draft was."""

    request: Request
    tokens: list[int]
    drafted: list[bool]


def drafted(steps: Sequence[tuple[int, int]], num_tokens: int) -> list[bool]:
    """steps: drafts verified, tokens sampled. The token after the drafts of a step is not one of them."""
    flags = [place < drafts for drafts, sampled in steps for place in range(sampled)]
    return flags[:num_tokens]


def written(requests: Sequence[Request], run: Run) -> list[Written]:
    steps: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in run.steps:
        for index, (_, drafts, sampled) in step.items():
            steps[index].append((drafts, sampled))
    outputs = zip(requests, run.outputs, strict=True)
    return [
        Written(request, output, drafted(steps[index], len(output)))
        for index, (request, output) in enumerate(outputs)
    ]


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
    """What a cell has written. undrafted: its requests get no drafts, and each of their tokens is a draw."""

    undrafted: bool
    written: list[Written] = field(default_factory=list)
    count: int = 0

    def requests_for(self, least: int) -> int:
        """As many as will probably bring it there."""
        missing = max(0, least - self.count)
        return min(MOST_REQUESTS, math.ceil(1.05 * missing * (len(self.written) or 1) / (self.count or 2)))

    def add(self, written: Written) -> None:
        self.written.append(written)
        self.count += len(written.tokens) if self.undrafted else sum(written.drafted)


class Verdict(NamedTuple):
    """p of the two tests, draws outside of what the filters leave, draws that are what the prediction has next;
    by how much the inverse temperature is off, as a factor, and the standard error of that."""

    bins: float
    pairs: float
    impossible: int
    predicted: int
    tilt: float
    error: float

    def holds(self) -> bool:
        return min(self.bins, self.pairs) > LIMIT and not self.impossible


def judge(oracle: Oracle, filters: Filters, draws: Draws, seed: int) -> Verdict:
    texts = [[*w.request.prompt, *w.tokens] for w in draws.written]
    tokens = np.array([w.tokens for w in draws.written])
    logits = oracle.logits([text[:-1] for text in texts], tokens.shape[1])
    first = np.array([_next(w) for w in draws.written])
    flags = np.array([w.drafted for w in draws.written]) | draws.undrafted
    logits, tokens, first = logits[flags], tokens[flags], first[flags]
    probs = filters(logits)
    impossible = int((filters(logits, slack=1e-4)[np.arange(len(tokens)), tokens] == 0).sum())
    bins = bins_of(probs, tokens, first, np.random.default_rng(seed))
    pairs: defaultdict[tuple[int, ...], Counter[tuple[int, int]]] = defaultdict(Counter)
    for w in draws.written:
        pairs[tuple(w.request.prompt)][w.tokens[0], w.tokens[1]] += 1
    tilt = tilt_of(logits / filters.temperature, probs, tokens)
    return Verdict(bins, pairs_of(oracle, filters, pairs), impossible, int((tokens == first).sum()), *tilt)


def _next(written: Written) -> list[int]:
    """What the prediction has next at each position: after its first place of the token before. Without
    one, a token that is never written."""
    prediction = written.request.prediction or [0]
    after = dict(reversed(list(pairwise(prediction))))
    return [prediction[0], *(after.get(token, prediction[0]) for token in written.tokens[:-1])]


class Distribution:
    """The cells of one runner."""

    def __init__(
        self, c: Campaign, oracle: Oracle, prompts: Prompts, runner: str, serve: Callable[..., Run]
    ) -> None:
        self._rng, self._oracle, self._runner, self._serve = c.rng, oracle, runner, serve
        self._prompts, self._cells = prompts, CELLS[runner]
        self._draws = c.count(DRAWS[runner], QUICK_DRAWS[runner])
        least, quick = LEAST_DRAWS * len(self._cells), QUICK_DRAWS[runner] * len(self._cells)
        self._tally = c.tally(f"sampled tokens have the model's distribution, {runner}", least, quick)

    def row(self) -> Row:
        """Two tests a cell. A cell that fails one is run again, alone, with other seeds and twice the draws."""
        found = self._draw(self._cells, self._draws)
        verdicts = {cell: self._judge(cell, draws) for cell, draws in found.items()}
        repeated = 0
        for cell, verdict in verdicts.items():
            draws, again = found[cell], verdict
            if not verdict.holds():
                repeated += 1
                draws = self._draw([cell], 2 * self._draws)[cell]
                again = self._judge(cell, draws)
            case = {"cell": str(cell), "first": verdict._asdict(), "then": again._asdict()}
            self._tally.check(again.holds(), case, count=draws.count)
        least = min(min(verdict.bins, verdict.pairs) for verdict in verdicts.values())
        predicted = sum(verdict.predicted for verdict in verdicts.values())
        told = f"{len(verdicts)} cells, smallest p {least:.2g} (limit {LIMIT:.1g}), {repeated} repeated"
        told += f", {predicted / sum(draws.count for draws in found.values()):.0%} as predicted"
        weights = np.array([verdict.error**-2 for verdict in verdicts.values()])
        tilt = float((weights * [verdict.tilt for verdict in verdicts.values()]).sum() / weights.sum())
        error = float(weights.sum() ** -0.5)
        enough = ERRORS_OF_A_TENTH * error < 0.1 or (self._tally.campaign.quick and self._runner == "V2")
        right = abs(tilt) < MOST_ERRORS * error and enough
        self._tally.check(right, {"inverse temperature off by": tilt, "standard error": error}, count=0)
        return self._tally.row(f"{told}; 1 / temperature times {1 + tilt:.3f}, standard error {error:.3f}")

    def _draw(self, cells: Sequence[Cell], least: int) -> dict[Cell, Draws]:
        """At least so many draws of each cell. One request in eight is greedy, and no draw."""
        found = {cell: Draws(self._runner == "V1" and cell.filters.min_p > 0) for cell in cells}
        while any(draws.count < least for draws in found.values()):
            batch: list[tuple[Cell | None, Request]] = []
            for cell, draws in found.items():
                for _ in range(draws.requests_for(least)):
                    batch.append((cell, self._prompts.request(cell, len(batch), self._rng)))
            batch += [(None, replace(r, params={})) for _, r in self._rng.sample(batch, len(batch) // 7)]
            self._rng.shuffle(batch)
            requests = [request for _, request in batch]
            for (cell, _), each in zip(batch, written(requests, self._serve(requests)), strict=True):
                if cell is not None:
                    found[cell].add(each)
        return found

    def _judge(self, cell: Cell, draws: Draws) -> Verdict:
        return judge(self._oracle, cell.filters, draws, self._rng.getrandbits(31))


def run(c: Campaign) -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = build(Path(directory) / "model", max_len=SIZES["max_model_len"])
        oracle = Oracle(model)
        v2 = V2Engine(
            model, Path(directory) / "V2", num_draft_tokens=K, seed=c.rng.getrandbits(31), **SIZES, **OF_V2
        )
        # It starts meanwhile.
        v1 = V2Engine(
            model, Path(directory) / "V1", num_draft_tokens=K, seed=c.rng.getrandbits(31), runner="V1",
            **SIZES, **OF_V1,
        )  # fmt: skip
        prompts = Prompts(oracle, c.rng, c.size(24, 2))
        with v1:
            yield Distribution(c, oracle, prompts, "V1", partial(v1.run, seconds=2700)).row()
        with v2:
            yield Distribution(c, oracle, prompts, "V2", partial(v2.run, seconds=2700)).row()


if __name__ == "__main__":
    main(run)
