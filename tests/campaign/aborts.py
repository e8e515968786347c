"""Aborts and disconnects at every phase: the others' outputs are the model's, and everything is given back.

A batch of requests of which most are to be aborted, each in a phase drawn for it; then, with nobody left:
outputs of the others == greedy by transformers      held: no slot, row, prediction, KV block, count
The same few requests, served first and last, are served alike, step by step, and count alike.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_llama import build
from v2_harness import VOCABULARY, Request, V2Engine, edited

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.disconnects import disconnects
from tests.campaign.sampling_oracle import Oracle

K = 8
#: A KV cache that three long requests overflow, and 48 tokens a step: longer prompts come in chunks.
TIGHT: dict[str, Any] = {
    "num_gpu_blocks_override": 10,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
}
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "5000"}
OF_V2: dict[str, Any] = {
    "asynchronous": True,
    "delay_counts": 1,
    "environment": {**DRAFTED_FROM, "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64"},
}
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

    def __init__(self, c: Campaign, oracle: Oracle) -> None:
        self._rng = c.rng
        self.known: list[tuple[list[int], list[int]]] = []
        for length in PROMPT_LENS:
            prompts = [c.rng.choices(VOCABULARY, k=length) for _ in range(c.size(40, 6))]
            self.known += zip(prompts, oracle.greedy(prompts, MAX_TOKENS), strict=True)

    def request(self, arrives: int = 0, aborted: tuple[str, int] | None = None) -> tuple[Request, list[int]]:
        """A request, with any prediction or none, and its answer."""
        prompt, output = self._rng.choice(self.known)
        length = self._rng.choice((1, 8, 20, MAX_TOKENS, MAX_TOKENS))
        kinds = None, output, edited(output, self._rng.randrange(10**6)), self._rng.choices(VOCABULARY, k=30)
        request = Request(prompt, self._rng.choice(kinds), length, arrives, aborted)
        return request, output[:length]


class Aborts:
    """One engine's. never: the phase in which it can find no request between two steps."""

    def __init__(self, tally: Tally, texts: Texts, engine: V2Engine, never: str) -> None:
        self._tally, self._texts, self._engine, self._never = tally, texts, engine, never
        self._rng = tally.campaign.rng
        self._phases = Counter[str]()
        self._survivors = self._preemptions = 0

    def row(self, batch: int) -> Row:
        control = [self._texts.request() for _ in range(6)]
        control = [(replace(request, extra=APART), output) for request, output in control]
        before = self._control(control)
        while self._tally.goes_on():
            self._batch(batch)
        after = self._control(control)
        self._tally.check(before == after, {"control, before and after": [before, after]}, count=0)
        if not self._tally.campaign.quick:
            missing = set(PHASES) - set(self._phases) - {self._never}
            self._tally.check(not missing, {"phases without an abort": sorted(missing)}, count=0)
        phases = ", ".join(f"{name} {self._phases[name]}" for name in PHASES if self._phases[name])
        told = f"{phases}; {self._survivors} others, {self._preemptions} preemptions, nothing held after any batch"
        return self._tally.row(told)

    def _control(self, control: Sequence[tuple[Request, list[int]]]) -> list[Any]:
        run = self._engine.run([request for request, _ in control])
        wrong = [answer for answer, (_, output) in zip(run.outputs, control, strict=True) if answer != output]
        self._tally.check(not wrong, {"control": wrong}, count=0)
        steps = [step for step in run.steps if step]  # one may be left in flight of what was before
        return [[(answer["token_ids"], answer["usage"]) for answer in run.answers], steps]

    def _batch(self, size: int) -> None:
        planned = [self._texts.request(index // 4, self._plan()) for index in range(size)]
        requests = [request for request, _ in planned]
        run = self._engine.run(requests)
        aborted = [answer["aborted_in"] for answer in run.answers if "aborted_in" in answer]
        self._phases.update(aborted)
        self._preemptions += run.preemptions
        wrong: list[Any] = []
        for index, (request, output) in enumerate(planned):
            answer = run.answers[index]
            if answer.get("aborted_in", "finished") == "finished":
                self._survivors += 1
                if answer["token_ids"] != output or not counts_agree(answer, run.of(index)):
                    wrong.append({"request": request.as_json(), "answer": answer, "expected": output})
        held = {name: count for name, count in self._engine.held().items() if count}
        case = {"wrong": wrong, "held": held, "requests": [request.as_json() for request in requests]}
        self._tally.check(not wrong and not held, case, count=len(aborted))

    def _plan(self) -> tuple[str, int] | None:
        if self._rng.random() < 0.25:
            return None
        (phase,) = self._rng.choices(list(PHASES), [often for _, often in PHASES.values()])
        return phase, self._rng.randint(1, PHASES[phase][0])


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


def run(c: Campaign) -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = build(Path(directory) / "model", max_len=512)
        oracle = Oracle(model)
        texts = Texts(c, oracle)
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            # The server and V2 start while V1 is at work.
            server = pool.submit(stack.enter_context, disconnects(c, oracle, model, Path(directory)))
            v2 = V2Engine(model, Path(directory) / "V2", num_draft_tokens=K, **TIGHT, **OF_V2)
            of_v1: dict[str, Any] = {"runner": "V1", "environment": DRAFTED_FROM, **TIGHT}
            v1 = V2Engine(model, Path(directory) / "V1", num_draft_tokens=K, **of_v1)
            with v1:
                tally = c.tally("aborts in the engine, V1", 2000, 40)
                # No last chunk runs between two steps.
                yield Aborts(tally, texts, v1, never="first").row(c.size(100, 60))
            with v2:
                tally = c.tally("aborts in the engine, V2, asynchronous scheduling", 250, 10)
                # Every request has placeholders for the next step, until that is planned.
                yield Aborts(tally, texts, v2, never="decode").row(c.size(60, 16))
            tally = c.tally("clients that disconnect from a server", 800, 30)
            yield server.result().row(tally)


if __name__ == "__main__":
    main(run)
