"""The step log of the V2 model runner. Only where `GPU_ALIGN_DEBUG_DIR` is set: it copies to the host."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from gpu_align import Recipes
from vllm_integration.wire import prediction as wire
from vllm_integration.wire.usage import SOURCES
from vllm_integration.worker.debug_log import DebugLog, Decode, tokenizer_of
from vllm_integration.worker.request_state import Proposal, RequestState, stop_rule


class StepLog:
    """Follows each request that is drafted for, and writes its file when it finishes.

    directory: of the files. num_draft_tokens: K. decode: token ids → text. recipes: of the drafter.

    One step: `settle` accounts for what was sampled, then `proposed` keeps what is drafted for the next.
    Both wait for the device.
    """

    def __init__(
        self,
        directory: str,
        num_draft_tokens: int,
        decode: Decode | None = None,
        recipes: Recipes | None = None,
    ) -> None:
        self._files = DebugLog(directory, decode)
        self._recipes = recipes
        self._num_draft_tokens = num_draft_tokens
        self._requests: dict[str, RequestState] = {}

    def add(
        self, req_id: str, prediction: wire.TokenIds | None, prompt_len: int, sampling_params: Any
    ) -> None:
        """A request that is drafted for arrives, or returns after a preemption, which lost its drafts."""
        state = self._requests.get(req_id)
        if state is None:
            state = RequestState(
                req_id, prediction, stop_rule(sampling_params), keep_steps=True, recipes=self._recipes
            )
            self._requests[req_id] = state
        state.prompt_len = prompt_len
        state.proposal = Proposal()

    def settle(self, batch: Any, num_sampled: Any, req_states: Any) -> None:
        """Record what each request of the batch has just sampled; the arguments are those of `propose`."""
        verified = batch.num_draft_tokens_per_req
        for index, (req_id, sampled) in enumerate(zip(batch.req_ids, num_sampled.tolist(), strict=True)):
            state = self._requests.get(req_id)
            if state is None or not sampled:
                continue
            row = int(batch.idx_mapping_np[index])
            total_len = int(req_states.total_len.gpu[row])
            ids, before = req_states.all_token_ids.gpu, total_len - sampled
            state.know_prompt(partial(_row, ids, row, before), self._num_draft_tokens, int(ids.shape[1]))
            tokens = ids[row, before:total_len].tolist()
            # Slots beyond the proposal were filled up by the runner; nobody proposed what is in them.
            drafts = state.proposal.token_ids[: 0 if verified is None else int(verified[index])]
            state.settle(tokens, drafts, total_len)

    def proposed(self, batch: Any, draft: Any, duration_us: int) -> None:
        """Keep what the drafter proposes for the next step."""
        rows = zip(
            batch.req_ids,
            draft.token_ids.tolist(),
            draft.confidence.tolist(),
            draft.length.tolist(),
            draft.source.tolist(),
            strict=True,
        )
        for req_id, token_ids, confidence, length, source in rows:
            state = self._requests.get(req_id)
            if state is not None:
                name = SOURCES[source] if length else SOURCES[0]
                state.proposal = Proposal(token_ids[:length], confidence[:length], name, duration_us)

    def finish(self, req_ids: Iterable[str]) -> None:
        """Write the files of requests that have finished."""
        for req_id in req_ids:
            state = self._requests.pop(req_id, None)
            if state is not None:
                self._files.write(
                    req_id,
                    num_draft_tokens=self._num_draft_tokens,
                    prompt_tokens=state.prompt_len,
                    prediction_tokens=0 if state.prediction is None else int(state.prediction.size),
                    usage=state.usage,
                    steps=state.steps,
                    tokens=state.tokens,
                )


def _row(token_ids: Any, row: int, end: int) -> list[int]:
    tokens: list[int] = token_ids[row, :end].tolist()
    return tokens


def open_step_log(
    directory: str | None, num_draft_tokens: int, vllm_config: Any, recipes: Recipes | None = None
) -> StepLog | None:
    """A log where one is asked for. Tensor-parallel ranks draft the same; one of them writes."""
    parallel = vllm_config.parallel_config
    if directory is None or int(parallel.rank) % int(parallel.tensor_parallel_size):
        return None
    return StepLog(directory, num_draft_tokens, tokenizer_of(vllm_config.model_config), recipes)
