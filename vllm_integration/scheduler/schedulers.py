"""vLLM's schedulers with two things added: exact accounts of what was verified (`accounts`), and on V2 draft
slots only where they pay (`draft_slots`).

vLLM schedules K draft tokens for every decoding request, whether or not anybody proposed any. The V2
schedulers give each request those of its drafts that are likely or that the step has room for, none to a
request that has no prediction, and no more in all than a budget. They are named in `scheduler_cls`, vLLM's
official place for a scheduler, by `engine_config`.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_integration.config.settings import SURE, SURE_LATE, Settings
from vllm_integration.scheduler.draft_budget import DraftSlots
from vllm_integration.scheduler.verification_ledger import Accounts
from vllm_integration.worker.draft_reporter import Report, received

logger = logging.getLogger("vllm.gpu_align")


def slots_of(vllm_config: Any) -> DraftSlots:
    """The policy of an engine. The budget is `GPU_ALIGN_MAX_DRAFT_TOKENS`, or half of what a step may hold:
    the other half stays for prefills and for everybody's next token."""
    settings = Settings.from_env()
    budget = settings.max_draft_tokens
    if budget is None:
        budget = max(1, vllm_config.scheduler_config.max_num_batched_tokens // 2)
    return DraftSlots(
        int(vllm_config.speculative_config.num_speculative_tokens),
        budget,
        settings.draft_without_prediction,
        fill=settings.fill_tokens,
        sure=SURE if settings.sure is None else settings.sure,
        sure_late=SURE_LATE if settings.sure is None else settings.sure,
    )


class _WithAccounts(Scheduler):  # type: ignore[misc]  # vLLM is not typed for us
    """Counts what each step verified and sends it along with the step's outputs.

    Counting must never cost anybody an answer: where it fails it ends, with one ERROR line.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = Settings.from_env()
        self.accounts: Accounts | None = Accounts(self._settings.draft_without_prediction)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = received(model_runner_output)
        steps = self._guarded(self._begin_step, report, scheduler_output, model_runner_output)
        self._take_report(report)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._guarded(self._settle_step, steps, outputs)
        return outputs

    def _take_report(self, report: Report) -> None:
        """For subclasses: what the worker has reported with this output."""

    def _begin_step(self, report: Report, scheduler_output: Any, model_runner_output: Any) -> Any:
        assert self.accounts is not None
        self.accounts.take(report)
        return self.accounts.begin(self.requests, scheduler_output, model_runner_output, report.trimmed)

    def _settle_step(self, steps: Any, outputs: Any) -> None:
        assert self.accounts is not None
        for client_outputs in outputs.values():
            self.accounts.settle(steps, client_outputs.outputs)
        self.accounts.keep_only(self.requests)

    def _guarded(self, step: Any, *args: Any) -> Any:
        if self.accounts is None:
            return None
        try:
            return step(*args)
        except Exception as error:
            if self._settings.strict:
                raise
            logger.error("gpu_align counts no usage any more: %s: %s", type(error).__name__, error)
            self.accounts = None
            return None


class PredictedOutputsV1Scheduler(_WithAccounts):
    """vLLM's scheduler with our accounts, for the V1 runner: its drafts are lists that are as long as they are,
    and need no slots."""


class _WithDraftSlots(_WithAccounts):
    """Keeps the policy, and feeds it what came with a step's output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draft_slots = slots_of(self.vllm_config)

    def _take_report(self, report: Report) -> None:
        self.draft_slots.report(report.proposed)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.draft_slots.keep_only(self.requests)
        return outputs


class PredictedOutputsScheduler(_WithDraftSlots):
    """vLLM's scheduler; after each step a request's draft placeholders are cut to its slots."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        _cut(self, exact=True)


class PredictedOutputsAsyncScheduler(_WithDraftSlots, AsyncScheduler):  # type: ignore[misc]  # as above
    """The same for asynchronous scheduling, which plans a step before the one before it has ended: the last thing
    before it does, when one more report is there than when vLLM sets the placeholders."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        _cut(self, exact=False)
        return super().schedule(*args, **kwargs)


def _cut(scheduler: Any, *, exact: bool) -> None:
    """Cut the placeholders of all running requests to their slots."""
    running = scheduler.running
    requests = [request for request in running if request.spec_token_ids]
    slots = scheduler.draft_slots.grant(requests, exact=exact, batch_size=len(running))
    for request in requests:
        # A new list: asynchronous scheduling shares one list of placeholders between requests.
        request.spec_token_ids = request.spec_token_ids[: slots[request.request_id]]
