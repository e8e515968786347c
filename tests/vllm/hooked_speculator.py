"""The V2 speculator on the hooks that `upstream.patch` gives vLLM, without the plugin: an engine's
`custom_class` is `hooked_speculator.HookedSpeculator`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_integration.wire.reports import take
from vllm_integration.worker import speculator

speculator._make_dense = lambda *_: None  # vLLM has made it so, by the class attribute


class HookedSpeculator(speculator.PredictedOutputsSpeculator):
    uses_dense_token_ids = supports_async_scheduling = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafted: set[str] = set()

    def add_requests(self, new_requests: list[Any]) -> None:
        self.observe_new(SimpleNamespace(scheduled_new_reqs=new_requests))
        rows = self.req_states.req_id_to_index
        self.drafted.update(new.req_id for new in new_requests if self._occupied[rows[new.req_id]])

    def remove_request(self, req_id: str) -> None:
        self.drafted.discard(req_id)
        self.observe_gone(req_id)

    def finish_requests(self, req_ids: set[str]) -> None:
        self.finish(req_ids)

    def report(self) -> Callable[[Any], None]:
        attach, drafted = super().report(), set(self.drafted)

        def on_host(output: Any) -> None:
            attach(output)
            output.num_drafts = {req_id: 0 for req_id in output.req_ids if req_id not in drafted}
            for step in take(output).drafts:
                output.num_drafts.update(zip(step.req_ids, step.length.tolist(), strict=True))

        return on_host
