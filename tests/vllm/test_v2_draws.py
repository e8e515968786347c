"""Verification by the request's own draw on the V2 model runner: its kernels, and rollouts. (Sampled answers
beside those of an engine without the plugin: `tests/campaign/test_greedy.py`.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.modules import ROOT
from tests.vllm.engines import Request, V2Engine, prompt_of

pytestmark = pytest.mark.vllm

N = 24
#: Kernels of vLLM's and ours that a step launches beside the model's, with their grids.
LAUNCHES = """
from triton.runtime.interpreter import GridExecutor
from vllm_integration.worker import own_draw
launched, call = [], GridExecutor.__call__
def counting(self, *args, **kwargs):
    launched.append((self.fn.__name__, len(self.grid)))
    return call(self, *args, **kwargs)
runner = engine.runner
verify = type(runner.rejection_sampler)._verify
def recording(self, *args):
    del launched[:]
    GridExecutor.__call__ = counting
    try:
        result = verify(self, *args)
    finally:
        GridExecutor.__call__ = call
    engine.launched = [*launched]
    return result
type(runner.rejection_sampler)._verify = recording
engine.undo = lambda: setattr(type(runner.rejection_sampler), "_verify", verify)
engine.apart = own_draw._runners.pop(runner.req_states) if {coin} else None
"""
UNDO = """
from vllm_integration.worker import own_draw
engine.undo()
if engine.apart is not None:
    own_draw._runners[engine.runner.req_states] = engine.apart
found = engine.launched
"""


def seeded(seed: int, prediction: list[int] | None = None, **params: Any) -> Request:
    given = {"temperature": 1.0, "seed": seed, **params}
    return Request(prompt_of(seed), prediction, N, params=given)


def test_no_more_kernels_go_over_the_vocabulary_than_in_vllms_verification(k16: V2Engine) -> None:
    """One that draws for all rows, in place of two: one for the sums of all rows, one that draws again."""
    plain = k16.run([seeded(seed) for seed in range(2)]).outputs
    found: dict[bool, list[tuple[str, int]]] = {}
    for coin in (False, True):
        k16.execute(LAUNCHES.format(coin=coin))
        outputs = k16.run([seeded(seed, output) for seed, output in enumerate(plain)]).outputs
        found[coin] = [tuple(each) for each in k16.execute(UNDO)]
        assert (outputs == plain) is not coin
    draws, coins = ([name for name, dims in found[coin] if dims == 2] for coin in (False, True))
    assert (draws, len(coins)) == (["_gumbel_sample_kernel"], 2)
    assert len(found[False]) < len(found[True])


def test_each_sample_of_a_seed_has_its_own_prediction(k16: V2Engine) -> None:
    """The same samples in another order are right for the one in the middle alone."""
    three = Request(prompt_of(8), None, N, params={"temperature": 1.0, "seed": 11, "n": 3})
    samples = k16.run([three]).answers[0]["all"]
    steps = []
    for predictions in (samples, samples[::-1]):
        run = k16.run([replace(three, prediction=predictions)])
        assert run.answers[0]["all"] == samples
        steps.append(len(run.steps))
    assert steps[0] < 8 < 20 < steps[1], steps


def test_the_example_samples_a_policy_whose_weights_change(k16: V2Engine) -> None:
    """Without a change all samples come back whole, in as few steps as can be; with one most tokens do."""
    prompts = [{"prompt_token_ids": prompt_of(seed)} for seed in (3, 4)]
    sampling = {"max_tokens": N, "temperature": 1.0, "ignore_eos": True}
    code = f"""
import runpy
weights = [weight.clone() for weight in engine.runner.model.parameters()]
train = runpy.run_path({str(ROOT / "docs" / "examples" / "rollouts.py")!r})["train"]
epochs = train(engine.llm, {prompts!r}, epochs=2, samples=2, change=change, **{sampling!r})
found = [epoch._asdict() for epoch in epochs]
for weight, old in zip(engine.runner.model.parameters(), weights):
    weight.data.copy_(old)
"""
    (first, second), changed = (k16.execute(f"change = {change}\n{code}") for change in (0.0, 0.002))
    assert (first["tokens_a_step"], first["whole"]) == (1.0, 0.0)
    assert (second["samples"], second["whole"], second["rejected_a_token"]) == (first["samples"], 1.0, 0.0)
    assert second["tokens_a_step"] == N / 2  # the first token and 17 more, then the others, all drafts
    assert second["logprob"] == pytest.approx(first["logprob"], abs=1e-4)
    assert first["samples"][0] != first["samples"][1]
    assert changed[1]["logprob"] != changed[0]["logprob"]
    assert changed[1]["tokens_a_step"] > 3
