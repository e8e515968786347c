"""The V2 speculator on the hooks that `upstream.patch` gives vLLM, without the plugin: an engine's
`custom_class` is `hooked_speculator.HookedSpeculator`. The budget of drafts, which the plugin's schedulers keep,
is in the worker here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_integration.budget.compiled import compile_loops
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests
from vllm_integration.scheduler.verification_ledger import VerificationLedger
from vllm_integration.wire.reports import DraftReport
from vllm_integration.worker import speculator

speculator._make_dense = lambda *_: None  # vLLM has made it so, by the class attribute


@dataclass
class Followed:
    """A request as our scheduler reads it. num_tokens: where its newest draft was made, if any."""

    request_id: str
    sampling_params: Any
    prompt_len: int
    num_tokens: int

    @property
    def output_token_ids(self) -> range:
        return range(self.num_tokens - self.prompt_len)


class HookedSpeculator(speculator.PredictedOutputsSpeculator):
    uses_dense_token_ids = True

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._is_exact = not vllm_config.scheduler_config.async_scheduling
        self._followed: dict[str, Followed] = {}
        self._drafted = DraftedRequests(self.settings.draft_without_prediction, self.num_draft_tokens)
        self._ledger = VerificationLedger(self._drafted)
        self._budget = DraftBudget(
            self._drafted, self.num_draft_tokens, max_slowdown=self.settings.max_slowdown
        )
        self._scheduled: dict[str, int] = {}
        threading.Thread(target=compile_loops).start()
        self._lock = threading.Lock()  # outputs may be read in another thread

    def add_requests(self, new_requests: list[Any]) -> None:
        for new in new_requests:
            self.for_request(new.req_id, self.observe, new)
        with self._lock:
            for new in new_requests:
                slot = self.req_states.req_id_to_index[new.req_id]
                if self._occupied[slot]:
                    prompt_len = int(self.req_states.prompt_len.np[slot])
                    request = Followed(new.req_id, new.sampling_params, prompt_len, prompt_len)
                    self._followed[new.req_id] = request
                    self._drafted.add(request)

    def remove_request(self, req_id: str) -> None:
        self.remove_slot(self.req_states.req_id_to_index.get(req_id, -1))

    def finish_requests(self, req_ids: set[str]) -> None:
        self.finish(req_ids)
        with self._lock:
            for req_id in req_ids:
                self._followed.pop(req_id, None)
            self._drafted.keep_only(self._followed)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        counts = input_batch.num_draft_tokens_per_req
        counts = [0] * len(input_batch.req_ids) if counts is None else counts.tolist()
        self._scheduled = dict(zip(input_batch.req_ids, counts, strict=False))
        return super().propose(input_batch, *args, **kwargs)

    def draft_lengths(self) -> Callable[[Any], dict[str, int]]:
        report, scheduled = self.report(), self._scheduled

        def on_host(output: Any) -> dict[str, int]:
            with self._lock:
                return self._granted(output, scheduled, report())

        return on_host

    def _granted(self, output: Any, scheduled: Mapping[str, int], report: DraftReport) -> dict[str, int]:
        """How many drafts of each request are worth verifying."""
        for drafts in report.drafts:
            if drafts.age:  # this step has verified those of the one before
                self._note(drafts)
        slots = {req_id: range(count) for req_id, count in scheduled.items()}
        planned = SimpleNamespace(scheduled_spec_decode_tokens=slots, num_invalid_spec_tokens=None)
        begun = self._ledger.begin(self._followed, planned, output, report.trimmed)
        self._drafted.take(report)
        self._budget.observe(report.times)
        self._budget.settle(begun)
        for drafts in report.drafts:
            self._note(drafts)
        known = [self._followed[req_id] for req_id in output.req_ids if req_id in self._followed]
        granted = self._budget.grant(known, exact=self._is_exact, batch_size=len(output.req_ids))
        lengths = dict.fromkeys(output.req_ids, 0)
        lengths.update(zip((each.request_id for each in known), granted, strict=True))
        return lengths

    def _note(self, drafts: Any) -> None:
        for req_id, position in zip(drafts.req_ids, drafts.position.tolist(), strict=True):
            if req_id in self._followed:
                self._followed[req_id].num_tokens = position
