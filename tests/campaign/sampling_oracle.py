"""The distribution of a sampled token: transformers' logits, the documented filters in NumPy, chi-square.

A draw is a token that was verified: sampled at a position that held a draft. Its context is known, so that it has
a distribution of its own. With the vocabulary in some order that does not depend on the draw, and v uniform,

    u = expected(tokens before it) + v * expected(token)

is uniform in [0, 1) if `expected` is right, whatever came before. What the prediction has next comes first in
that order, the others follow from the likeliest: a draft that is accepted too often fills the first bins.
Chi-square over 20 bins of u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tests.vllm.engines import Request, Run

Floats = npt.NDArray[np.float64]
BINS = 20
#: Fewest draws that are expected in a bin.
LEAST = 5.0


@dataclass(frozen=True)
class Filters:
    """What a request asks for. 0 of `top_k` and `min_p`, 1 of `top_p`: everything is left."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Floats, slack: float = 0.0) -> Floats:
        """[..., V] logits → probabilities. `slack` widens the three limits, by more than rounding moves them."""
        scores = logits / self.temperature
        if self.min_p:
            probs = _softmax(scores)
            least = self.min_p * (1 - slack) * probs.max(-1, keepdims=True)
            scores = np.where(probs >= least, scores, -np.inf)
        if self.top_k:
            kth = np.sort(scores, axis=-1)[..., -self.top_k, None]
            scores = np.where(scores >= kth - slack, scores, -np.inf)
        if self.top_p < 1:
            probs = _softmax(scores)
            order = np.argsort(-probs, axis=-1, kind="stable")
            sorted_probs = np.take_along_axis(probs, order, -1)
            before = np.cumsum(sorted_probs, axis=-1) - sorted_probs
            kept = np.zeros(probs.shape, dtype=bool)
            np.put_along_axis(kept, order, before < self.top_p + slack, -1)
            scores = np.where(kept, scores, -np.inf)
        return _softmax(scores)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    result: Floats = powers / powers.sum(-1, keepdims=True)
    return result


class Oracle:
    """The model there, by transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import LlamaForCausalLM

        self._model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def logits(self, contexts: Sequence[Sequence[int]], last: int = 1) -> Floats:
        """[N, last, V] after the last tokens of N contexts of one length."""
        parts = torch.tensor(contexts).split(512)
        logits = torch.cat([self._model(part, logits_to_keep=last).logits for part in parts])
        return logits.double().numpy()

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """The likeliest n tokens after prompts of one length."""
        tokens = torch.tensor(prompts)
        for _ in range(n):
            best = self._model(tokens, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
        found: list[list[int]] = tokens[:, -n:].tolist()
        return found


def tilt_of(scores: Floats, probs: Floats, tokens: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Of N draws: by how much the inverse temperature is off, as a factor, and the standard error of that.

    scores, probs: [N, V]. The score test of probs ** (1 + tilt): what was drawn is more likely than was to be
    expected, or less, in standard errors.
    """
    logs = np.where(probs > 0, scores - scores.max(-1, keepdims=True), 0.0)
    mean = (probs * logs).sum(-1)
    variance = float(((probs * logs**2).sum(-1) - mean**2).sum())
    excess = float((logs[np.arange(len(tokens)), tokens] - mean).sum())
    return (excess / variance, variance**-0.5) if variance > 0 else (0.0, np.inf)


def bins_of(
    probs: Floats, tokens: npt.NDArray[np.int64], first: npt.NDArray[np.int64], rng: np.random.Generator
) -> float:
    """p of chi-square over u of N draws. probs: [N, V]. first: [N] the token that comes first."""
    bins = max(2, min(BINS, int(len(tokens) / LEAST)))
    rows = np.arange(len(tokens))
    rank = probs.copy()
    rank[rows, first] = 2.0
    own = probs[rows, tokens]
    before = np.where(rank > rank[rows, tokens, None], probs, 0.0).sum(-1)
    u = before + rng.random(len(tokens)) * own
    found = np.bincount(np.minimum((u * bins).astype(np.int64), bins - 1), minlength=bins)
    expected = len(tokens) / bins
    chi_square = float(((found - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(*torch.tensor([(bins - 1) / 2, chi_square / 2]).double()))


class Written(NamedTuple):
    """What became of a request. drafted: whether its tokens were sampled where a draft was."""

    request: Request
    tokens: list[int]
    drafted: list[bool]


def written(requests: Sequence[Request], run: Run) -> list[Written]:
    """The token after the drafts of a step is not one of them."""
    answers = []
    for index, (request, output) in enumerate(zip(requests, run.outputs, strict=True)):
        flags = [place < drafts for _, drafts, sampled in run.of(index) for place in range(sampled)]
        answers.append(Written(request, output, flags[: len(output)]))
    return answers


class Verdict(NamedTuple):
    """p of the test, draws outside of what the filters leave; by how much the inverse temperature is off, as a
    factor, and the standard error of that."""

    bins: float
    impossible: int
    tilt: float
    error: float


def judge(oracle: Oracle, filters: Filters, answers: Sequence[Written], seed: int) -> Verdict:
    texts = [[*w.request.prompt, *w.tokens] for w in answers]
    tokens = np.array([w.tokens for w in answers])
    logits = oracle.logits([text[:-1] for text in texts], tokens.shape[1])
    first = np.array([_next(w) for w in answers])
    flags = np.array([w.drafted for w in answers])
    logits, tokens, first = logits[flags], tokens[flags], first[flags]
    probs = filters(logits)
    impossible = int((filters(logits, slack=1e-4)[np.arange(len(tokens)), tokens] == 0).sum())
    bins = bins_of(probs, tokens, first, np.random.default_rng(seed))
    tilt = tilt_of(logits / filters.temperature, probs, tokens)
    return Verdict(bins, impossible, *tilt)


def _next(written: Written) -> list[int]:
    """What the prediction has next at each position: after its first place of the token before. Without
    one, a token that is never written."""
    prediction = written.request.prediction or [0]
    after = dict(reversed(list(pairwise(prediction))))
    return [prediction[0], *(after.get(token, prediction[0]) for token in written.tokens[:-1])]
