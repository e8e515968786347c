"""The drafter of vLLM's V1 model runner: `--speculative-config` names this class.

V1 keeps its tokens on the host and takes drafts as lists, so `gpu_align.Drafter` runs on the CPU here.
V1 tells a custom class neither which requests its rows are nor when they end; the wrapped
`_update_states` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_align.step_log import SOURCES

from ..seams.install import DraftingGuard, guarded, install, off_reason, seam, watch
from ..wire.reports import DraftReport, StepDrafts, attach
from .request_drafter import DRAFTING, RequestDrafter
from .requests import Proposal, RequestState, SlotTable, proposals_of, stop_rule, take_refusals
from .sampling_v1 import without_drafts


class PredictedOutputsProposer(RequestDrafter):
    """Drafts from each request's prediction, its own context and recipes; made by vLLM, once a worker.

    Memory: one int32 row of `max_model_len` a slot, touched only as far as requests reach. When a vLLM seam
    is missing it proposes nothing (or raises, with `GPU_ALIGN_STRICT=1`).
    """

    def __init__(self, vllm_config: Any) -> None:
        watch()  # harmless again; vLLM may have been told to load other plugins only
        install("v1")
        install("usage_v1")
        max_context_len = int(vllm_config.model_config.max_model_len)
        super().__init__(vllm_config, max_context_len, DraftingGuard(then=self._forget))
        max_slots = int(vllm_config.scheduler_config.max_num_seqs)
        self.slots = SlotTable(max_slots)
        self.requests: dict[str, RequestState] = {}
        self.token_ids = torch.zeros((max_slots, max_context_len), dtype=torch.int32)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32)
        self._token_rows = self.token_ids.numpy()
        self._lengths = self.total_len.numpy()
        self._batch: Any = None
        self._scheduled: dict[str, list[int]] = {}
        self._drafts: list[StepDrafts] = []
        try:
            self.make(vllm_config, max_slots, device="cpu")
        except Exception as error:
            self.guard.fail(DRAFTING, error)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        **kwargs: Any,
    ) -> list[list[int]]:
        """One list of at most K drafts a row; empty for a row without prediction, with parameters that V1
        does not apply to drafts, or still prefilling.

        sampled_token_ids: what each row sampled this step, accepted drafts first; [] while prefilling.
        num_tokens_no_spec: [≥ rows] tokens of each row, those just sampled included.
        token_ids_cpu: [≥ rows, max_model_len] the tokens themselves.
        """
        drafts: list[list[int]] | None = None
        if self._batch is not None:
            drafts = self.run(self._propose, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        return [[] for _ in sampled_token_ids] if drafts is None else drafts

    def report(self) -> Callable[[Any], None]:
        """Of what the last step proposed; of nothing when asked again."""
        drafts, self._drafts = self._drafts, []
        return partial(attach, report=DraftReport(drafts, {}, take_refusals(), off=off_reason() is not None))

    @guarded
    def observe(self, runner: Any, scheduler_output: Any) -> None:
        """What `_update_states` has just made of the scheduler's output: called once a step, before the
        forward pass, and also when nothing is scheduled."""
        self._batch = runner.input_batch
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        for req_id in scheduler_output.finished_req_ids:
            self._finish(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._admit(new.req_id, new.sampling_params)
        # Preempted, or not scheduled this step: the slot is worth more to somebody else, and a draft can
        # be rebuilt from the tokens whenever the request returns.
        for req_id in self.slots.holders():
            if req_id not in self._batch.req_id_to_index:
                self._release(req_id)

    def _admit(self, req_id: str, sampling_params: Any) -> None:
        if req_id in self.requests:  # a streaming-input request is sent again with a longer prompt
            self._finish(req_id)
        if sampling_params is None or without_drafts(sampling_params):
            return
        content = self.open(req_id, sampling_params)
        if content is not None:
            stop = stop_rule(sampling_params)
            self.requests[req_id] = RequestState(req_id, content, stop)

    def _finish(self, req_id: str) -> None:
        state = self.requests.pop(req_id, None)
        if state is None:
            return
        self._release(req_id)
        if self.miss_log is not None:
            self.miss_log.finish([req_id])
        if self.log is not None:
            self.log.write(state)

    def _release(self, req_id: str) -> None:
        slot = self.slots.release(req_id)
        if slot is None:
            return
        self.drafter.remove(slot)
        state = self.requests.get(req_id)
        if state is not None:
            state.synced = 0

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self.requests:
            return drafts
        rows: list[int] = []
        states: list[RequestState] = []
        rooms: list[int] = []
        for row, (req_id, sampled) in enumerate(zip(self._batch.req_ids, sampled_token_ids, strict=True)):
            state = self.requests.get(req_id)
            if state is None or not sampled:
                continue
            total_len = int(num_tokens_no_spec[row])
            state.prompt_len = int(self._batch.num_prompt_tokens[row])
            if self.log is not None:
                verified = self._scheduled.get(state.req_id, ())
                before = token_ids_cpu[row, : total_len - len(sampled)].tolist
                self.log.keep(state, before, sampled, verified, total_len)
            state.settle(sampled, total_len)
            room = state.room(total_len, self.num_draft_tokens, self.max_context_len)
            if room and self._sync(state, token_ids_cpu[row], total_len):
                rows.append(row)
                states.append(state)
                rooms.append(room)
        if states:
            num_sampled = [len(sampled_token_ids[row]) for row in rows]
            proposals = self._draft(states, num_sampled, rooms)
            for row, state, proposal in zip(rows, states, proposals, strict=True):
                state.proposal = proposal
                drafts[row] = proposal.token_ids
            self._drafts = [_step_drafts(states, proposals)]
        return drafts

    def _draft(self, states: list[RequestState], num_sampled: list[int], rooms: list[int]) -> list[Proposal]:
        slots = torch.tensor([self.slots.get(state.req_id) for state in states], dtype=torch.int64)
        started = time.perf_counter_ns()
        draft = self.drafter.propose(
            self.token_ids, self.total_len, slots, torch.tensor(num_sampled, dtype=torch.int32)
        )
        duration_us = (time.perf_counter_ns() - started) // 1000
        if self.miss_log is not None:
            self.miss_log.run(self._compare, states, draft)
        return proposals_of(draft, duration_us, rooms)

    def _compare(self, states: list[RequestState], draft: Any) -> None:
        """Let the misses know what has been written, and what is drafted behind it."""
        misses = self.miss_log
        assert misses is not None
        tails = np.zeros((len(states), misses.tail_len), dtype=np.int32)
        for tail, state in zip(tails, states, strict=True):
            misses.add(state.req_id, state.prompt_len)
            end = state.synced
            last = self._token_rows[self.slots.get(state.req_id), max(0, end - len(tail)) : end]
            tail[len(tail) - len(last) :] = last
        misses.take(
            [state.req_id for state in states],
            np.array([state.synced for state in states]),
            draft.source.numpy(),
            draft.length.numpy(),
            draft.token_ids.numpy(),
            tails,
        )

    def _sync(self, state: RequestState, row: npt.NDArray[np.int32], total_len: int) -> bool:
        """Bring the request's slot up to its tokens; False when the drafter refuses its prediction."""
        slot = self.slots.get(state.req_id)
        if slot is not None and total_len < state.synced:  # vLLM took tokens back (a failed KV transfer)
            self._release(state.req_id)
            slot = None
        if slot is None:
            slot = self.slots.acquire(state.req_id)
            held = self.add(slot, state.req_id, state.content, state.prompt_len)
            if held is None:
                self.slots.release(state.req_id)
                del self.requests[state.req_id]
                return False
            state.content = held
        self._token_rows[slot, state.synced : total_len] = row[state.synced : total_len]
        self._lengths[slot] = total_len
        state.synced = total_len
        return True

    def _forget(self) -> None:
        self.requests.clear()
        self._drafts = []


#: By this name a speculative configuration asks for it.
PredictedOutputs = PredictedOutputsProposer


def _step_drafts(states: list[RequestState], proposals: list[Proposal]) -> StepDrafts:
    return StepDrafts(
        [state.req_id for state in states],
        0,
        np.array([state.synced for state in states]),
        np.array([len(proposal.token_ids) for proposal in proposals]),
        np.array([SOURCES.index(proposal.source) for proposal in proposals]),
        np.zeros((len(states), 0), dtype=np.uint8),
    )


def _ours(runner: Any) -> PredictedOutputsProposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, PredictedOutputsProposer) else None


@seam("v1._update_states")
def update_states(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`GPUModelRunner._update_states`, after which our proposer looks at the result."""
    result = original(self, scheduler_output, *args, **kwargs)
    proposer = _ours(self)
    if proposer is not None:
        proposer.observe(self, scheduler_output)
    return result


@seam("v1._input_fits_in_drafter")
def input_fits_in_drafter(
    original: Callable[..., Any], self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any
) -> bool:
    """`GPUModelRunner._input_fits_in_drafter`: for us, whenever there is a batch to draft for; our drafts are
    cut at `max_model_len` request by request. Where K more tokens do not fit for one, the original has all
    verify K zeros."""
    fits = original(self, common_attn_metadata, *args, **kwargs)
    return bool(fits) if _ours(self) is None else common_attn_metadata is not None
