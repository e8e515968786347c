"""Aborts at every phase: the others' outputs are the model's, and everything is given back.

A batch of requests of which most are to be aborted, each in a phase drawn for it; then, with nobody left:
outputs of the others == greedy by transformers      held: no slot, row, prediction, KV block, count
On V2 half of the texts are sampled with a seed: those that the engine wrote without a prediction.
The same few requests, served first and last, are served alike, step by step, and count alike, where the server
forgets which drafts it accepted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.sampling_oracle import Oracle
from tests.vllm.engines import VOCABULARY, Request, V2Engine, edited

pytestmark = pytest.mark.vllm

#: A KV cache that three long requests overflow, and 48 tokens a step: longer prompts come in chunks.
TIGHT: dict[str, Any] = {
    "num_draft_tokens": 8,
    "num_gpu_blocks_override": 10,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
}
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "5000"}
#: Runner → its settings; aborts in `make test` and requests of a batch; the phase in which no request is found
#: between two steps: on V1 no last chunk runs then, on V2 every request has placeholders for the next step.
ENGINES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "V1": ({"environment": DRAFTED_FROM}, 40, 60, "first"),
    "V2": (
        {
            "asynchronous": True,
            "delay_counts": 1,
            "environment": {**DRAFTED_FROM, "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"},
        },
        10,
        16,
        "decode",
    ),
}
#: What a server learns of its drafts is to outlive requests.
FORGET = """
from vllm_integration.scheduler.draft_budget import Calibration
budget = engine.scheduler.draft_budget
budget.calibration, budget._cost, found = Calibration(), 0.0, True
"""
#: The control's, whose drafts must be the same at the end: no earlier answers.
APART = {"memory": False}
#: Phase → the most times that a request is found in it before it is aborted, how often it is wished for.
PHASES = {
    "waiting": (3, 2),
    "prefill": (1, 2),
    "first": (1, 1),
    "drafts": (4, 4),
    "decode": (4, 2),
    "preempted": (2, 4),
    "finished": (1, 2),
}
PROMPT_LENS = 12, 60
MAX_TOKENS = 32


class Texts:
    """Prompts, and what the model writes after them."""

    def __init__(self, rng: random.Random, oracle: Oracle) -> None:
        self._rng = rng
        self.known: list[tuple[Request, list[int]]] = []
        for length in PROMPT_LENS:
            prompts = [rng.choices(VOCABULARY, k=length) for _ in range(6)]
            outputs = oracle.greedy(prompts, MAX_TOKENS)
            self.known += zip(map(Request, prompts), outputs, strict=True)

    def sample(self, engine: V2Engine) -> None:
        """And with a seed, as the engine writes it without a prediction."""
        params = {"temperature": 1.0, "top_k": 50}
        requests = [
            replace(request, max_tokens=MAX_TOKENS, extra=APART, params={**params, "seed": seed})
            for seed, (request, _) in enumerate(self.known)
        ]
        self.known += zip(requests, engine.run(requests).outputs, strict=True)

    def request(self, arrives: int = 0, aborted: tuple[str, int] | None = None) -> tuple[Request, list[int]]:
        """A request, with any prediction or none, and its answer."""
        known, output = self._rng.choice(self.known)
        length = self._rng.choice((1, 8, 20, MAX_TOKENS, MAX_TOKENS))
        kinds = None, output, edited(output, self._rng.randrange(10**6)), self._rng.choices(VOCABULARY, k=30)
        request = Request(
            known.prompt, self._rng.choice(kinds), length, arrives, aborted, params=known.params
        )
        return request, output[:length]


def served(engine: V2Engine, control: Sequence[tuple[Request, list[int]]]) -> list[Any]:
    """How the control is served: its answers, their usage and their steps."""
    assert engine.execute(FORGET)
    run = engine.run([request for request, _ in control])
    assert run.outputs == [output for _, output in control]
    steps = [step for step in run.steps if step]  # one may be left in flight of what was before
    return [[(answer["token_ids"], answer["usage"]) for answer in run.answers], steps]


@pytest.mark.parametrize("runner", ENGINES)
def test_an_abort_in_any_phase_leaves_nothing_and_changes_no_other_answer(
    runner: str, tiny_model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    settings, aborts, size, never = ENGINES[runner]
    texts, phases = Texts(rng, Oracle(tiny_model)), Counter[str]()

    def plan() -> tuple[str, int] | None:
        if rng.random() < 0.25:
            return None
        (phase,) = rng.choices(list(PHASES), [often for _, often in PHASES.values()])
        return phase, rng.randint(1, PHASES[phase][0])

    control = [
        (replace(request, extra=APART), output) for request, output in (texts.request() for _ in range(6))
    ]
    with V2Engine(tiny_model, tmp_path, runner=runner, **settings, **TIGHT) as engine:
        if runner == "V2":
            texts.sample(engine)
        before = served(engine, control)
        while phases.total() < count(aborts):
            planned = [texts.request(index // 4, plan()) for index in range(size)]
            run = engine.run([request for request, _ in planned])
            for index, (request, output) in enumerate(planned):
                answer = run.answers[index]
                phases.update([answer["aborted_in"]] if "aborted_in" in answer else [])
                if answer.get("aborted_in", "finished") == "finished":
                    assert answer["token_ids"] == output, request
                    assert counts_agree(answer, run.of(index)), (request, answer)
            assert not any((held := engine.ask("held")).values()), (held, planned)
        assert served(engine, control) == before
    assert phases.total() < 1000 or set(PHASES) - {*phases} <= {never}


def counts_agree(answer: dict[str, Any], steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the front end's counts of a request are possible with what the scheduler did for it."""
    usage = answer["usage"]
    if usage is None:  # nobody drafted for it
        return all(drafts == 0 for _, drafts, _ in steps)
    slots = sum(drafts for _, drafts, _ in steps)
    most = sum(max(0, sampled - 1) for _, _, sampled in steps)
    return bool(
        usage["output_tokens"] == len(answer["token_ids"])
        and usage["accepted"] + usage["rejected"] == usage["drafted"] <= slots
        and usage["accepted"] <= most
    )
