"""The step log of the V2 model runner. Only where `GPU_ALIGN_DEBUG_DIR` is set: it copies to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu_align import Recipes
from gpu_align.step_log import SOURCES
from vllm_integration.config import adaptive
from vllm_integration.config.settings import Settings
from vllm_integration.wire import prediction as wire
from vllm_integration.worker.accept import DEFAULT_TERMS, Terms
from vllm_integration.worker.debug_log import DebugLog, open_debug_log
from vllm_integration.worker.request_state import Proposal, RequestState, stop_rule
from vllm_integration.worker.warm_up import WarmUp


class StepLog:
    """Follows each request that is drafted for, and writes its file when it finishes.

    files: writes them. num_draft_tokens: K. recipes: of the drafter.

    In each step, `settle` counts what was sampled, then `proposed` keeps what is drafted for the next step. Both
    wait for the device.
    """

    def __init__(self, files: DebugLog, num_draft_tokens: int, recipes: Recipes | None = None) -> None:
        self._files = files
        self._recipes = recipes
        self._num_draft_tokens = num_draft_tokens
        self._requests: dict[str, RequestState] = {}

    @property
    def on(self) -> bool:
        """Whether the log has not failed."""
        return self._files.on

    def finish_warm_up(self, warm_up: WarmUp) -> None:
        """Wait for what the log runs; a log that would have to wait for it with a request is off."""
        self._files.guard(warm_up.finish)

    def add(
        self,
        req_id: str,
        prediction: wire.TokenIds | None,
        prompt_len: int,
        sampling_params: Any,
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        """A request that is drafted for arrives, or returns after a preemption, which lost its drafts."""
        self._files.guard(self._add, req_id, prediction, prompt_len, sampling_params, terms)

    def settle(self, batch: Any, num_sampled: Any, req_states: Any, *, trimmed: bool = False) -> None:
        """Record what each request of the batch has just sampled; the arguments are those of `propose`.

        trimmed: whether the device may have kept fewer drafts than were scheduled.
        """
        self._files.guard(self._settle, batch, num_sampled, req_states, trimmed)

    def proposed(self, batch: Any, draft: Any, duration_us: int) -> None:
        """Keep what the drafter proposes for the next step."""
        self._files.guard(self._proposed, batch, draft, duration_us)

    def finish(self, req_ids: Iterable[str]) -> None:
        """Write the files of requests that have finished."""
        self._files.guard(self._finish, req_ids)
        if not self._files.on:
            self._requests.clear()

    def _add(
        self,
        req_id: str,
        prediction: wire.TokenIds | None,
        prompt_len: int,
        sampling_params: Any,
        terms: Terms,
    ) -> None:
        state = self._requests.get(req_id)
        if state is None:
            stop = stop_rule(sampling_params)
            state = RequestState(req_id, prediction, stop, terms=terms, recipes=self._recipes)
            self._requests[req_id] = state
        state.prompt_len = prompt_len
        state.proposal = Proposal()

    def _settle(self, batch: Any, num_sampled: Any, req_states: Any, trimmed: bool) -> None:
        if trimmed:
            batch = adaptive.as_verified(batch)
        verified = batch.num_draft_tokens_per_req
        for index, (req_id, sampled) in enumerate(zip(batch.req_ids, num_sampled.tolist(), strict=True)):
            state = self._requests.get(req_id)
            if state is None or not sampled:
                continue
            row = int(batch.idx_mapping_np[index])
            total_len = int(req_states.total_len.gpu[row])
            ids, before = req_states.all_token_ids.gpu, total_len - sampled
            state.know_prompt(ids[row, :before].tolist, self._num_draft_tokens, int(ids.shape[1]))
            tokens = ids[row, before:total_len].tolist()
            # The runner fills slots beyond the proposal with padding; nobody proposed what is in them.
            drafts = state.proposal.token_ids[: 0 if verified is None else int(verified[index])]
            state.record(tokens, drafts, total_len)
            self._files.follow(state)
            state.settle(tokens, total_len)

    def _proposed(self, batch: Any, draft: Any, duration_us: int) -> None:
        columns = (draft.token_ids, draft.confidence, draft.length, draft.source)
        rows = zip(batch.req_ids, *(column.tolist() for column in columns), strict=True)
        for req_id, token_ids, confidence, length, source in rows:
            state = self._requests.get(req_id)
            if state is not None:
                name = SOURCES[source] if length else SOURCES[0]
                state.proposal = Proposal(token_ids[:length], confidence[:length], name, duration_us)

    def _finish(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            state = self._requests.pop(req_id, None)
            if state is not None:
                self._files.write(state)


def open_step_log(
    settings: Settings, num_draft_tokens: int, vllm_config: Any, recipes: Recipes | None = None
) -> StepLog | None:
    """A log where one is asked for."""
    files = open_debug_log(settings, num_draft_tokens, vllm_config)
    return None if files is None else StepLog(files, num_draft_tokens, recipes)
