"""vLLM's schedulers with four things added, see README.md. `engine_config` names them in `scheduler_cls`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, islice
from threading import Thread
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from gpu_align.drafter.memory import ResponseMemory

from ..budget.compiled import compile_loops
from ..config.in_use import drafts_predictions, inner_tokens
from ..config.settings import Settings
from ..seams.guard import Guard, faults, logger, shown_fault, strict
from ..seams.install import Original, install, missing, seam
from ..wire import reports
from ..wire import request as wire
from ..wire.reports import DRAFTING, INNER_DRAFTER, REPORTS, SLOTS, DraftReport, StepTime
from ..wire.steps import tell_faults
from .draft_budget import DraftBudget, DraftedRequests, Granted, room_for_drafts
from .verification_ledger import VerificationLedger


@seam("dump._dump_engine_exception")
def dump_engine_exception(
    original: Original, config: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`_dump_engine_exception`: draft tokens and predictions are printed as their number."""
    if drafts_predictions(config, even_if_off=True):
        scheduler_output = copy.copy(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output.scheduled_spec_decode_tokens = {r: f"{len(ids)} tokens" for r, ids in drafts.items()}
        scheduler_output.scheduled_new_reqs = list(map(copy.copy, scheduler_output.scheduled_new_reqs))
        for new in scheduler_output.scheduled_new_reqs:
            wire.put_back(new)
    return original(config, scheduler_output, *args, **kwargs)


class Recall:
    """The answers that finished requests leave behind, by tenant; `extra_args={"memory": False}` keeps one out.
    max_tokens: of all answers; the oldest go first. most: tokens that one request gets."""

    def __init__(self, max_tokens: int, most: int) -> None:
        self._memory = ResponseMemory(max_tokens)
        self._most = most
        #: Requests that began with another model.
        self._older: set[str] = set()

    def forget(self, req_ids: Iterable[str]) -> None:
        """The model is another one now, also for these requests, which have begun."""
        self._memory = ResponseMemory(self._memory.max_tokens)
        self._older = {*req_ids}

    def give(self, request: Any) -> None:
        """Let a request whose `Prediction` is empty have the answers of its tenant as one."""
        given = wire.brought_by(request.sampling_params)
        if given is None or not given.is_empty or given.memory is False:
            return
        found = self._memory.recall_for(_owner_of(request), _prompt_of(request), self._most)
        if len(found.token_ids):
            token_ids = wire.encode_token_ids("answers", found.token_ids)
            recalled = replace(given, token_ids=token_ids, kind=found.kind)
            request.sampling_params = wire.with_extra_args(request.sampling_params, {wire.KEY: recalled})

    def keep(self, request: Any) -> None:
        """Remember the answer of a request."""
        params = request.sampling_params
        if params is None or request.request_id in self._older:
            return
        given, extra_args = wire.brought_by(params), params.extra_args or {}
        if extra_args.get(wire.MEMORY_KEY) is False or (given is not None and given.memory is False):
            return
        self._memory.remember(_owner_of(request), list(request.output_token_ids), _prompt_of(request))


def _owner_of(request: Any) -> tuple[bytes, tuple[str, str] | None]:
    """The tenant whose answers these are, and the adapter that wrote them."""
    lora = getattr(request, "lora_request", None)
    return wire.sharing_key_of(request), lora and (lora.lora_name, lora.lora_path)


@seam("memory.collective_rpc", "memory.set_weight_version", "memory.add_lora")
def change_model(original: Original, self: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls of `EngineCore` that may change the weights. An adapter that comes beside others changes no answer."""
    try:
        return original(self, what, *args, **kwargs)
    finally:
        scheduler = getattr(self, "scheduler", None)
        if getattr(what, "load_inplace", True) and isinstance(scheduler, PredictedOutputsV1Scheduler):
            scheduler.forget_answers()


def _prompt_of(request: Any) -> list[int]:
    """The tokens of a request's prompt; none where it came as embeddings."""
    return getattr(request, "prompt_token_ids", None) or []


def _compile() -> None:
    try:
        compile_loops()
    except Exception as error:
        logger.warning("gpu_align schedules in plain Python, which is slow: %s", shown_fault(error))


#: How a request ends that has written its answer.
_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
#: Prompts that wait, of which a step takes account.
_MOST_PROMPTS = 16


class PredictedOutputsV1Scheduler(Scheduler):  # type: ignore[misc]  # vLLM is not typed for us
    """vLLM's scheduler with our budget and ledger; as it is for the V1 runner, whose drafts are lists."""

    num_spec_tokens: int  # vLLM's
    #: Whether reports are about the drafts that the next step verifies.
    _exact = True
    #: Whether vLLM may pad a request with placeholders for drafts.
    _pads = False
    draft_budget: DraftBudget | None = None
    #: Draft tokens of vLLM's own drafter for each request that is not ours.
    _inner_tokens = 0
    #: The memory of earlier answers, where there is one.
    _recall: Recall | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin(Settings.of(self.vllm_config))

    def _begin(self, settings: Settings) -> None:
        #: Drafts and their lengths, and the extras.
        self.slots = Guard(SLOTS, "schedules no drafts", core=True)
        self.usage = Guard("usage", "counts no usage")
        self.memory = Guard("response memory", "remembers no answers")
        self.times = Guard("step times", "uses no step times")
        #: Whether the table of this step may be wrong.
        self._failed = False
        #: Parts that are off in the worker, and what each front end was told.
        self._worker_faults: Mapping[str, str] = {}
        self._told: dict[int, dict[str, str]] = {}
        #: Requests that have `logprob_token_ids`.
        self._scored: set[str] = set()
        #: Steps that run and what they were granted, the oldest first.
        self._under_way: deque[tuple[Any, Granted]] = deque(maxlen=16)
        #: Steps in a row into which none of the prompts that wait came: they wait for something else than tokens.
        self._blocked = 0
        #: Where there are none, a step is vLLM's but for this test.
        self.drafted_requests = DraftedRequests(False)
        Thread(target=_compile, name="gpu_align compiles").start()
        try:
            self._use(settings)
        except Exception as error:
            self.slots.end(error)
        self.ledger: Any = self.usage.run(VerificationLedger, self.drafted_requests)
        if reason := missing("usage"):
            self.usage.end(reason)
        if settings.memory_tokens and not install("memory"):
            most = settings.prediction_capacity(int(self.vllm_config.model_config.max_model_len))
            self._recall = self.memory.run(Recall, settings.memory_tokens, most)

    def _use(self, settings: Settings) -> None:
        if self._pads:
            self._inner_tokens = inner_tokens(self.vllm_config)
        num_draft_tokens = int(self.vllm_config.speculative_config.num_speculative_tokens)
        others = self._inner_tokens > 0
        self.drafted_requests = DraftedRequests(settings.draft_without_prediction, num_draft_tokens, others)
        self.draft_budget = DraftBudget(
            self.drafted_requests,
            num_draft_tokens,
            captured=int(self.vllm_config.compilation_config.max_cudagraph_capture_size or 0),
            max_slowdown=settings.max_slowdown,
        )

    def add_request(self, request: Any) -> None:
        if getattr(request.sampling_params, "logprob_token_ids", None):
            self._scored.add(request.request_id)
        try:
            wire.put_back(request)
        except Exception as error:
            if strict():
                raise
            # It is served without its prediction: what cannot be made printable must not be printed.
            logger.error("gpu_align cannot pass a prediction on: %s", shown_fault(error))
            request.sampling_params = wire.with_extra_args(request.sampling_params, {wire.KEY: None})
        if self._recall is not None:
            self.memory.run(self._recall.give, request)
        super().add_request(request)
        self._attempt(self.drafted_requests.add, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """No drafts in a step that may hold a request with `logprob_token_ids`: the samplers that verify drafts
        answer none of these, and V1's may end the engine. And no placeholders where vLLM pads a request whose
        prompt is cached but for one token: on V1, which would verify them; on V2 in such a step, and if none is
        drafted for."""
        if self._scored:
            self._scored.intersection_update(self.requests)
        if self._scored:
            for request in self.running:
                request.spec_token_ids = []
        if self.draft_budget is not None:
            self.draft_budget.granted = None
        if not self._scored:
            self._cut()
        placeholders: int = self.num_spec_tokens
        if self._scored or not (self._pads and self.drafted_requests):
            self.num_spec_tokens = 0
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.num_spec_tokens = placeholders
        if self.draft_budget is not None and (granted := self.draft_budget.granted) is not None:
            self._under_way.append((output, granted))
            came = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
            self._blocked = self._blocked + 1 if self.waiting and not came else 0
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not (self.drafted_requests or self._told or hasattr(model_runner_output, reports.ATTRIBUTE)):
            return super().update_from_output(scheduler_output, model_runner_output)
        self._failed = False
        if (report := self._attempt(reports.take, model_runner_output)) is not None:
            self._worker_faults = report.faults
        report = report or DraftReport()
        step = scheduler_output, model_runner_output, report.trimmed
        # After a start that failed there is no ledger.
        begun = self.usage.run(lambda: self.ledger.begin(self.requests, *step))
        self._attempt(self._take, report, begun, scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if begun is not None:
            self.usage.run(self._settle, begun, outputs)
        self._attempt(self._forget)
        if not (self._pads or self._failed):  # nothing else is done with the table
            self.slots.succeeded()
        self._tell_faults(outputs)
        return outputs

    def _attempt(self, step: Callable[..., Any], *args: Any) -> Any:
        """A step of the table; if it fails, no request gets slots in the next step."""
        try:
            return step(*args)
        except Exception as error:
            self._failed = True
            self.slots.fail(error)

    def _forget(self) -> None:
        gone = self.drafted_requests.keep_only(self.requests)
        self.usage.run(lambda: self.ledger.forget(gone))

    def _tell_faults(self, outputs: Mapping[int, Any]) -> None:
        """Tell each front end which parts are off and why, with an output, when that has changed."""
        found = {**self._worker_faults, **faults()}
        if found or self._told:
            for client, of_client in outputs.items():
                if of_client.outputs and self._told.get(client, {}) != found:
                    tell_faults(of_client.outputs[0], found)
                    self._told[client] = found
                if not self._told.get(client, True):
                    del self._told[client]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recall is not None and request.status in _ANSWERED:
            self.memory.run(self._recall.keep, request)
        return super()._free_request(request, *args, **kwargs)

    def forget_answers(self) -> None:
        """The model is another one: nothing is drafted from answers that it did not write."""
        if self._recall is not None:
            self.memory.run(self._recall.forget, self.requests)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the answers, too: whatever changes the weights calls this, and so does `sleep`."""
        self.forget_answers()
        return super().reset_prefix_cache(*args, **kwargs)

    def _take(self, report: DraftReport, begun: Any, planned: Any = None) -> None:
        off = not self._worker_faults.keys().isdisjoint((DRAFTING, REPORTS))
        self.drafted_requests.off = off
        if INNER_DRAFTER in self._worker_faults:
            self._inner_tokens = 0
        self.drafted_requests.take(report)
        if self.draft_budget is None:
            return
        self._observe(self.draft_budget, report.times)
        granted = next((given for output, given in self._under_way if output is planned), None)
        while granted is not None and self._under_way.popleft()[1] is not granted:
            pass
        if begun is None:  # accepted drafts are not counted any more
            self.draft_budget.learns = False
        else:
            self.draft_budget.settle(begun, granted)

    def _observe(self, budget: DraftBudget, times: Sequence[StepTime]) -> None:
        budget.observe(times)
        if budget.times.is_usable == self.times.is_off:
            if budget.times.is_usable:
                self.times.succeeded()
                return
            reason = f"{budget.times.unusable} in a row are no times, the last of {times[-1].ms} ms"
            logger.warning("gpu_align uses no step times for now: %s", reason)
            self.times.end(reason)

    def _settle(self, begun: Any, outputs: Any) -> None:
        self.ledger.settle(begun, [output for client in outputs.values() for output in client.outputs])

    def _cut(self) -> None:
        """Cut the drafts of running requests to their slots; to none if the worker does not draft."""
        if not self.drafted_requests or self._failed or not self.slots.run(self._cut_to_slots):
            for request in self.running:
                if request.spec_token_ids:
                    request.spec_token_ids = request.spec_token_ids[: self._inner_tokens]

    def _cut_to_slots(self) -> bool:
        """False where the worker drafts nothing."""
        if self.drafted_requests.off or self.draft_budget is None:
            return False
        requests = [request for request in self.running if request.spec_token_ids]
        chunks = [request for request in self.running if request.is_prefill_chunk]
        size, prompts = len(self.running) - len(chunks), self._prompts(chunks)
        if self.drafted_requests.beside_model:
            theirs = self.drafted_requests.is_theirs([request.request_id for request in requests]).tolist()
            for request in compress(requests, theirs):
                request.spec_token_ids = request.spec_token_ids[: self._inner_tokens]
                size += self._inner_tokens
            requests = [request for request, is_theirs in zip(requests, theirs, strict=True) if not is_theirs]
        free = max(self.max_num_scheduled_tokens - size, 0)
        room, prefill = room_for_drafts(free, prompts), min(sum(prompts), free)
        slots = self.draft_budget.grant(
            requests, exact=self._exact, batch_size=max(size, len(requests)), prefill=prefill, room=room
        )
        for request, count in zip(requests, slots, strict=True):
            # A new list: asynchronous scheduling shares one list of placeholders between requests.
            request.spec_token_ids = request.spec_token_ids[:count] if count else []
        return True

    def _prompts(self, found: list[Any]) -> list[int]:
        """Tokens left of the prompts that may come into the next step, in their order: those `found` to run, and
        some that wait. Where none of these came into the last one, they wait for memory, and have a share in every
        fourth step."""
        seats = min(self.max_num_running_reqs - len(self.running), _MOST_PROMPTS)
        if seats > 0 and self.waiting and self._blocked % 4 == 0:
            found += islice(self.waiting, seats)
        return [max(request.num_tokens - request.num_computed_tokens, 1) for request in found]


class PredictedOutputsScheduler(PredictedOutputsV1Scheduler):
    """For the V2 runner, whose drafts are placeholders."""

    _pads = True


class PredictedOutputsAsyncScheduler(PredictedOutputsV1Scheduler, AsyncScheduler):  # type: ignore[misc]  # as above
    """The same for asynchronous scheduling, which plans a step before the one before it has ended."""

    _pads, _exact = True, False
