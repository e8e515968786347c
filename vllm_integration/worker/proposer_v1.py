"""The drafter of vLLM's V1 model runner, which keeps its tokens on the host and takes drafts as lists: here
`gpu_align.Drafter` runs on the CPU. The wrapped `_update_states` tells it which requests its rows hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from ..seams.install import Original, install, seam, watch
from ..wire.reports import DraftReport, StepDrafts, survival_levels
from ..wire.request import RequestContent
from .request_drafter import RequestDrafter, ours
from .requests import StopRule, stop_rule


@dataclass
class _Request:
    content: RequestContent
    stop: StopRule
    prompt_len: int
    synced: int = 0  #: tokens of it that its slot's row holds


class PredictedOutputsProposer(RequestDrafter):
    """Drafts from each request's prediction, its own context and recipes; made by vLLM, once a worker. Without a
    seam it proposes nothing (or raises, with `GPU_ALIGN_STRICT=1`)."""

    def __init__(self, vllm_config: Any) -> None:
        watch()  # harmless again; vLLM may have been told to load other plugins only
        for group in ("v1", "usage_v1", "seeds"):
            install(group)
        super().__init__(vllm_config, int(vllm_config.model_config.max_model_len))
        max_slots = int(vllm_config.scheduler_config.max_num_seqs)
        self.requests: dict[str, _Request] = {}
        #: Of requests in the batch that have sampled a token.
        self.slots: dict[str, int] = {}
        self._free = list(range(max_slots))[::-1]
        self._batch: Any = None
        self._scheduled: dict[str, list[int]] = {}
        self._drafts: list[StepDrafts] = []
        self.start(partial(self._make_all, vllm_config, max_slots))

    def _make_all(self, vllm_config: Any, max_slots: int) -> None:
        token_ids = torch.zeros((max_slots, self.max_context_len), dtype=torch.int32)
        total_len = torch.zeros(max_slots, dtype=torch.int32)
        self._token_rows, self._lengths = token_ids.numpy(), total_len.numpy()
        self.make(vllm_config, token_ids, total_len)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        **kwargs: Any,
    ) -> list[list[int]]:
        """At most K drafts a row. sampled_token_ids: of each row in this step, accepted drafts first; [] while
        prefilling. num_tokens_no_spec: [≥ rows] tokens of each, these included. token_ids_cpu: [≥ rows, …]."""
        drafts: list[list[int]] | None = None
        if self.requests and self._batch is not None:
            drafts = self.guard.run(self._propose, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        return [[] for _ in sampled_token_ids] if drafts is None else drafts

    def has_nothing_to_report(self) -> bool:
        return not self.requests and not self._drafts

    def report(self) -> Callable[[], DraftReport]:
        """Of what the last step proposed; of nothing when asked again."""
        drafts, self._drafts = self._drafts, []
        return partial(DraftReport, drafts)

    def observe(self, runner: Any, scheduler_output: Any) -> None:
        """Read the requests that `_update_states` has just updated: once a step, also when it is empty."""
        self._batch = runner.input_batch
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        self._finish(scheduler_output.finished_req_ids)
        self.fit()
        for new in scheduler_output.scheduled_new_reqs:
            self.for_request(new.req_id, self._admit, new.req_id, new.sampling_params)
        # Preempted, or not scheduled this step: another request can use the slot, and a draft can
        # be rebuilt from the tokens whenever the request returns.
        for req_id in self.slots.keys() - set(self._batch.req_ids):
            self._release(req_id)

    def _admit(self, req_id: str, params: Any) -> None:
        if req_id in self.requests:  # a streaming-input request is sent again with a longer prompt
            self._finish([req_id])
        if params is None or self.drafter is None or params.thinking_token_budget is not None:
            return  # drafts would not be verified by its own distribution
        content = self.open(req_id, params)
        if content is not None:
            prompt_len = int(self._batch.num_prompt_tokens[self._batch.req_ids.index(req_id)])
            self.requests[req_id] = _Request(content, stop_rule(params), prompt_len)
            self.follow(req_id, content, prompt_len, params)

    def _finish(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._release(req_id)
            self.requests.pop(req_id, None)
        self.finish(req_ids)

    def _release(self, req_id: str) -> None:
        slot = self.slots.pop(req_id, None)
        if slot is not None:
            self._free.append(slot)
            self.requests[req_id].synced = 0
            self.for_request(req_id, self.drafter.remove, slot)

    def start_over(self) -> None:
        for req_id in [*self.slots]:
            self._release(req_id)

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        num_sampled = list(map(len, sampled_token_ids))
        if self.log is not None:
            scheduled = (self._scheduled.get(req_id, ()) for req_id in self._batch.req_ids)
            # −1 are placeholders that vLLM schedules to keep the batch uniform.
            slots = [sum(token >= 0 for token in tokens) for tokens in scheduled]
            rows = range(len(slots))
            self.log.settle(self._batch.req_ids, rows, slots, num_sampled, num_tokens_no_spec, token_ids_cpu)
        places: list[int] = []
        rooms: list[int] = []
        for row, (req_id, sampled) in enumerate(zip(self._batch.req_ids, sampled_token_ids, strict=True)):
            request = self.requests.get(req_id)
            if request is None or not sampled:
                continue
            given = req_id, request, sampled, token_ids_cpu[row], int(num_tokens_no_spec[row])
            room = self.for_request(req_id, self._room_of, *given)
            if room:
                places.append(row)
                rooms.append(room)
            elif room is None:
                self._finish([req_id])
        if places:
            req_ids = [self._batch.req_ids[row] for row in places]
            draft = self._draft(req_ids, [num_sampled[row] for row in places], rooms)
            lengths = draft.length.tolist()
            for row, length, token_ids in zip(places, lengths, draft.token_ids.tolist(), strict=True):
                drafts[row] = token_ids[:length]
        return drafts

    def _draft(self, req_ids: list[str], num_sampled: list[int], rooms: list[int]) -> Any:
        """The drafts of these requests, each cut to its room."""
        slots = torch.tensor([self.slots[req_id] for req_id in req_ids], dtype=torch.int64)
        started = time.perf_counter_ns()
        draft = self.drafter.propose(slots, torch.tensor(num_sampled, dtype=torch.int32))
        duration_us = (time.perf_counter_ns() - started) // 1000
        total_len = self._lengths[slots.numpy()]
        draft.length.clamp_(max=torch.tensor(rooms, dtype=torch.int32))
        draft.source.mul_(draft.length > 0)
        if self.log is not None:
            self.log.proposed(req_ids, draft, duration_us)
        lengths, sources = (np.array(column.tolist()) for column in (draft.length, draft.source))
        survival = survival_levels(np.cumprod(draft.confidence.numpy(), axis=1), lengths)
        self._drafts = [StepDrafts(req_ids, 0, total_len, lengths, sources, survival)]
        return draft

    def _room_of(
        self, req_id: str, request: _Request, sampled: list[int], row: npt.NDArray[np.int32], total_len: int
    ) -> int:
        """How many drafts of a request can become output; 0 where the drafter refuses it."""
        most = min(self.num_draft_tokens, self.max_context_len - total_len - 1)
        room = request.stop.room(sampled, total_len - request.prompt_len, most)
        return room if room and self._sync(req_id, request, row, total_len) else 0

    def _sync(self, req_id: str, request: _Request, row: npt.NDArray[np.int32], total_len: int) -> bool:
        """Bring the request's slot up to its tokens; False when the drafter refuses its prediction."""
        if total_len < request.synced:  # vLLM took tokens back (a failed KV transfer)
            self._release(req_id)
        slot = self.slots.get(req_id)
        if slot is None:
            slot = self._free[-1]
            held = self.add(slot, req_id, request.content, request.prompt_len)
            if held is None:
                del self.requests[req_id]
                return False
            request.content = held
            self.slots[req_id] = self._free.pop()
        self._token_rows[slot, request.synced : total_len] = row[request.synced : total_len]
        self._lengths[slot] = total_len
        request.synced = total_len
        return True


#: By this name a speculative configuration asks for it.
PredictedOutputs = PredictedOutputsProposer


@seam("v1._update_states")
def update_states(original: Original, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner._update_states`, which begins a step, and after which our proposer looks at the result."""
    if (proposer := ours(self)) is not None:
        proposer.timer.begin(scheduler_output, idle=proposer.has_nothing_to_report())
    result = original(self, scheduler_output, *args, **kwargs)
    if proposer is not None:
        come_or_gone = scheduler_output.scheduled_new_reqs or scheduler_output.finished_req_ids
        if proposer.requests or come_or_gone:
            proposer.observe(self, scheduler_output)
    return result


@seam("v1._input_fits_in_drafter")
def input_fits_in_drafter(
    original: Original, self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any
) -> bool:
    """`GPUModelRunner._input_fits_in_drafter`: for us, whenever there is a batch; our drafts are cut at
    `max_model_len` one by one. Where K more do not fit for one request, the original has all verify K zeros."""
    fits = original(self, common_attn_metadata, *args, **kwargs)
    return bool(fits) if ours(self) is None else common_attn_metadata is not None


@seam("v1._sample")
def sample(
    original: Original, self: Any, logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner._sample`: `logprob_token_ids` are answered by the ordinary sampler only. Our scheduler plans
    no drafts beside them, so that it can sample the step."""
    metadata = self.input_batch.sampling_metadata
    has_drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
    if spec_decode_metadata is None or has_drafts or not metadata.logprob_token_ids:
        return original(self, logits, spec_decode_metadata, *args, **kwargs)
    if (budgets := metadata.thinking_budget_state_holder) is None:
        return original(self, logits, None, *args, **kwargs)
    budgets.in_spec_mode = False  # one row a request; it would end the thinking of another one
    try:
        return original(self, logits, None, *args, **kwargs)
    finally:
        budgets.in_spec_mode = True


@seam("v1.apply_sampling_constraints")
def constraints(original: Original, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`apply_sampling_constraints` of [num_drafts, V] logits: of none, these. The original takes the largest
    `top_k` of the drafts, of which there are none, and the engine ends."""
    return original(logits, *args, **kwargs) if len(logits) else logits


@seam("v1.expand_batch_to_tokens")
def expand(
    original: Original,
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Any:
    """`expand_batch_to_tokens`: x[i], or `replace_to` where that is `replace_from`, as many times as request i has
    drafts, which end at cu_num_tokens[i]. On the CPU the original returns uninitialised memory."""
    if x.device.type != "cpu":
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


#: Generator of the CPU → its state at the end of the last step.
_states: WeakKeyDictionary[torch.Generator, torch.Tensor] = WeakKeyDictionary()


@seam("seeds._bookkeeping_sync")
def take_back_draws(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GPUModelRunner._bookkeeping_sync`, which takes back draws for prompts that have not ended, by the
    generator's offset. On the CPU, where generators have none, this sets the state from before the step."""
    generators = self.input_batch.generators
    if not generators or self.device.type != "cpu":
        return original(self, *args, **kwargs)
    unfinished = {row: generators.pop(row) for row in [*generators] if self.discard_request_mask.np[row]}
    for generator in unfinished.values():
        if (state := _states.get(generator)) is None:
            generator.manual_seed(generator.initial_seed())
        else:
            generator.set_state(state)
    try:
        return original(self, *args, **kwargs)
    finally:
        generators.update(unfinished)
        _states.update((generator, generator.get_state()) for generator in generators.values())
