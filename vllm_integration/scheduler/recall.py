"""Earlier answers as something to draft from: a request that predicts nothing gets those of its tenant.

A tenant is who sends the same `cache_salt`; all requests without one are one tenant. Answers to prompts like the
request's go before newer ones. What a request gets is
decided once, when it arrives, and travels with it as its `wire.prediction.Prediction`: all ranks have the same,
and it keeps it when it is preempted. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_align.memory import ResponseMemory
from vllm_integration.scheduler.crash_dump import sharing_key_of, with_prediction
from vllm_integration.wire import prediction as wire


class Recall:
    """The answers that finished requests leave behind, by tenant.

        recall.give(request)         # a request has arrived
        recall.keep(request)         # it has finished, and was not aborted

    max_tokens: of all answers; the oldest go first. most: tokens that one request gets.

    `extra_args={"memory": False}` keeps a request out: it gets nothing, and leaves nothing behind.
    """

    def __init__(self, max_tokens: int, most: int) -> None:
        self._memory = ResponseMemory(max_tokens)
        self._most = most

    def give(self, request: Any) -> None:
        """Let a request whose `Prediction` is empty have the answers of its tenant as one."""
        given = wire.brought_by(request.sampling_params)
        if given is None or not given.is_empty or given.memory is False:
            return
        found = self._memory.recall_for(sharing_key_of(request), _prompt_of(request), self._most)
        if len(found.token_ids):
            token_ids = wire.encode_token_ids("answers", found.token_ids)
            recalled = replace(given, token_ids=token_ids, memory=True, related=found.related)
            request.sampling_params = with_prediction(request.sampling_params, recalled)

    def keep(self, request: Any) -> None:
        """Remember the answer of a request."""
        params = request.sampling_params
        if params is None or (params.extra_args or {}).get(wire.MEMORY_KEY) is False:
            return
        given = wire.brought_by(params)
        if given is not None and given.memory is False:
            return
        self._memory.remember(sharing_key_of(request), list(request.output_token_ids), _prompt_of(request))


def _prompt_of(request: Any) -> list[int]:
    """The tokens of a request's prompt; none where it came as embeddings."""
    return getattr(request, "prompt_token_ids", None) or []
