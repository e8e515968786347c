"""The memory of earlier answers: who is given what, and who leaves what behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_integration.scheduler.schedulers import PredictedOutputsV1Scheduler, Recall, change_model
from vllm_integration.seams.guard import Guard
from vllm_integration.wire import request as wire
from vllm_integration.wire.request import KEY, Prediction
from vllm_integration.worker.requests import Refusals, open_request

EMPTY = Prediction(token_ids=b"")


def request_of(given: Any = EMPTY, output: Sequence[int] = (), prompt: Sequence[int] = (1,)) -> Request:
    """given: what it has under `KEY`; None: nothing."""
    params = SamplingParams(extra_args=None if given is None else {KEY: given})
    request = Request("r", [*prompt], params, None)
    request.append_output_token_ids([*output])
    return request


def given_to(recall: Recall, request: Any) -> list[int]:
    """What a request drafts from when it has arrived."""
    wire.put_back(request)
    recall.give(request)
    given = wire.brought_by(request.sampling_params)
    return [] if given is None or not given.token_ids else wire.decode_token_ids(given.token_ids).tolist()


@pytest.mark.parametrize(
    "given", [None, Prediction(b"\7\0\0\0"), Prediction(b"", memory=False), Prediction(None), 5]
)
def test_requests_with_a_prediction_or_without_memory_get_no_answers(given: Any) -> None:
    recall = Recall(max_tokens=100, most=100)
    recall.keep(request_of(output=[1, 2, 3]))
    request = request_of(given)
    recall.give(request)
    assert (request.sampling_params.extra_args or {}).get(KEY) == given


def test_answers_to_like_prompts_go_before_newer_ones() -> None:
    """As many whole ones as there is room for."""
    recall = Recall(max_tokens=100, most=3)
    prompts = {name: list(range(start, start + 50)) for name, start in (("a", 0), ("b", 100), ("c", 300))}
    for name, answer in (("c", [4, 5, 6, 7]), ("a", [1, 2]), ("b", [3])):
        recall.keep(request_of(output=answer, prompt=prompts[name]))
    for prompt, expected, kind in (
        (prompts["a"], [1, 2], wire.TextKind.RELATED_MEMORY),
        (list(range(200, 250)), [3, 1, 2], wire.TextKind.MEMORY),
    ):
        request = request_of(prompt=prompt)
        assert given_to(recall, request) == expected
        content = open_request("r", request.sampling_params, Refusals(), vocab_size=99, capacity=9)
        assert content is not None
        assert request.sampling_params.extra_args[KEY].kind == content.kind == kind


def test_requests_without_memory_leave_no_answer() -> None:
    recall = Recall(max_tokens=100, most=100)
    recall.keep(request_of(Prediction(token_ids=b"", memory=False), output=[1, 2, 3]))
    apart = request_of(None, output=[1, 2, 3])
    apart.sampling_params.extra_args = {"memory": False}
    recall.keep(apart)
    recall.keep(SimpleNamespace(sampling_params=None, cache_salt=None, output_token_ids=[4]))
    assert given_to(recall, request_of()) == []
    recall.keep(request_of(None, output=[5, 6]))  # also those that bring a prediction, or nothing
    assert given_to(recall, request_of()) == [5, 6]


#: Calls of the engine core, and whether the answers before them are forgotten.
CHANGES = {
    "collective_rpc": ("reload_weights", True),
    "set_weight_version": ("2", True),
    "add_lora": (SimpleNamespace(load_inplace=True), True),
    "add_lora ": (SimpleNamespace(load_inplace=False), False),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", [*CHANGES, "reset_prefix_cache"])
def test_another_model_has_no_earlier_answers(
    name: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that are under way; others that were cut by an error may be of it, too."""
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self: True)
    scheduler = object.__new__(PredictedOutputsV1Scheduler)
    scheduler._recall, scheduler.memory = Recall(max_tokens=100, most=100), Guard("response memory", "")
    begun, later = request_of(output=[3]), request_of(output=[4])
    begun.request_id, later.request_id, scheduler.requests = "begun", "later", {"begun": begun}
    scheduler._recall.keep(request_of(output=[1, 2]))
    what, forgets = CHANGES.get(name, (None, True))

    def original(core: Any, what: Any) -> None:
        if fails:
            raise RuntimeError

    with pytest.raises(RuntimeError) if fails and what else nullcontext():
        if what is None:
            assert scheduler.reset_prefix_cache()
        else:
            change_model(original, SimpleNamespace(scheduler=scheduler), what)
    scheduler._recall.keep(begun)
    assert given_to(scheduler._recall, request_of()) == ([] if forgets else [3, 1, 2])
    scheduler._recall.keep(later)
    assert given_to(scheduler._recall, request_of())[:1] == [4]
    change_model(lambda core, what: None, SimpleNamespace(), "before there is a scheduler")


def test_an_adapter_has_answers_of_its_own() -> None:
    recall = Recall(max_tokens=100, most=100)
    requests = [request_of(output=[number]) for number in range(3)]
    for request, path in zip(requests[1:], ("/a", "/b"), strict=True):
        request.lora_request = SimpleNamespace(lora_name="l", lora_path=path)
    for request in requests:
        recall.keep(request)
    for number, request in enumerate(requests):
        assert given_to(recall, request) == [number]


def test_only_whole_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_free_request", lambda self, request: None)
    scheduler = object.__new__(PredictedOutputsV1Scheduler)
    scheduler._recall, scheduler.memory = Recall(max_tokens=100, most=100), Guard("response memory", "")
    for number, status in enumerate(("STOPPED", "LENGTH_CAPPED", "ABORTED", "REPETITION")):
        request = request_of(output=[number])
        request.status = RequestStatus[f"FINISHED_{status}"]
        scheduler._free_request(request)
    assert given_to(scheduler._recall, request_of()) == [1, 0]
