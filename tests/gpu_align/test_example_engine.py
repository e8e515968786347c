"""`docs/examples/engine.py`: its output is that of the model, in fewer passes, whatever its requests bring."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("numba")  # plain Python is a hundred times slower

from gpu_align.predictors import TokenPredictor
from tests.gpu_align.engine import edited
from tests.gpu_align.test_policies import after_pair
from tests.gpu_align.tiny_models import VOCAB, reference, text, trained
from tests.modules import load

__all__ = ["after_pair"]  # the fixture

example = load("docs/examples/engine.py")


class Job:
    """A request and what the model writes for it."""

    def __init__(self, rng: random.Random, new: int) -> None:
        self.prompt, self.new = text(rng, rng.randrange(2, 40)), new
        done = reference(trained("llama"), self.prompt, max_new_tokens=new)
        self.expected: list[int] = done[0, len(self.prompt) :].tolist()
        self.edited = edited(rng, self.expected, VOCAB, new)

    def request(self, **more: Any) -> Any:
        return example.Request(self.prompt, self.new, **more)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    rng = random.Random(1)
    return [Job(rng, rng.randrange(40, 80)) for _ in range(24)]


def serve(requests: list[Any], **options: Any) -> Any:
    engine = example.Engine(trained("llama"), **{"max_slots": 8, "max_len": 128, **options})
    engine.run(requests)
    assert not engine.running
    assert sorted(engine.free) == list(range(8))
    return engine


def test_requests_of_every_kind_in_one_batch(
    jobs: list[Job], after_pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(TokenPredictor):
        def predict_tokens(self) -> list[int]:
            raise KeyError("x")

    kinds: list[dict[str, Any]] = [
        {}, {"predictor": after_pair.AfterPair}, {"max_draft_len": 3}, {"predictor": Fails}, {"temperature": 0.9},
        {"max_draft_len": 0},
    ]  # fmt: skip
    steps: dict[bool, int] = {}
    for drafts in (True, False):
        requests = []
        for i, job in enumerate(jobs):
            kind = dict(kinds[i % len(kinds)])
            if "predictor" in kind:
                kind["predictor"] = kind["predictor"]()
            requests.append(job.request(prediction=job.edited, **kind))
        passes: list[int] = []
        hook = trained("llama").register_forward_hook(lambda *_, passes=passes: passes.append(1))
        try:
            engine = serve(requests, drafts=drafts)
        finally:
            hook.remove()
        accepted = [0] * len(kinds)
        for i, (job, request) in enumerate(zip(jobs, requests, strict=True)):
            assert len(request.output) == job.new
            if not request.temperature:
                assert request.output == job.expected, kinds[i % len(kinds)]
            accepted[i % len(kinds)] += request.accepted
        steps[drafts] = engine.steps
        assert len(passes) == engine.steps
        assert [count > 15 for count in accepted] == [drafts and kind in (0, 1, 2, 4) for kind in range(6)]
        rate = engine.generated / engine.steps
        line = f"{engine.generated} tokens in {engine.steps} steps: {rate:.2f} tokens a step"
        assert capsys.readouterr().out.splitlines() == [line]
    assert 1.3 * steps[True] < steps[False]


def test_a_draft_model_for_requests_that_bring_nothing(jobs: list[Job]) -> None:
    """They have its drafts alone; with a prediction everything is as without it."""
    counts = {}
    for draft_model in (None, trained("llama")):
        requests = [job.request(prediction=job.edited if i % 2 else ()) for i, job in enumerate(jobs)]
        serve(requests, draft_model=draft_model)
        assert [request.output for request in requests] == [job.expected for job in jobs]
        counts[draft_model is None] = [(request.accepted, request.rejected) for request in requests]
    assert counts[False][1::2] == counts[True][1::2]
    assert all(rejected == 0 for _, rejected in counts[False][::2])  # it is the model itself
    assert sum(accepted for accepted, _ in counts[False][::2]) > 1.5 * sum(
        accepted for accepted, _ in counts[True][::2]
    )
