"""What the engine verified, counted where it is known exactly, and its way from there to the front end.

The scheduler knows how many draft slots a step had, how many tokens came out and which of them are output; the
worker knows how many of the slots somebody had proposed, and who. Here they meet. The result leaves with the
step's own output, so that it reaches whichever front end the request came from. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_integration.wire import prediction as wire
from vllm_integration.worker.draft_reporter import Proposed, Report

#: Key in `EngineCoreOutput.trace_headers`, vLLM's one open mapping from the engine to the front end. The front
#: end takes it out again before vLLM's tracing reads the headers.
HEADER = "x-gpu-align-steps"


class Verified(NamedTuple):
    """One verification step of one request.

    source: value of `gpu_align.Source`, who proposed. length: drafts proposed.
    verified: those of them that the engine verified, ≤ length. accepted: those of these that are output.
    """

    source: int
    length: int
    verified: int
    accepted: int


class Message(NamedTuple):
    """What travels with one output: steps settled now, the last of them being the output's own if `own`."""

    steps: Sequence[Verified]
    own: bool
    refused: str | None = None


def encode(message: Message) -> str:
    """`"source,length,verified,accepted;…|refused"`; a step that is not settled yet is an empty last one."""
    steps = [f"{s.source},{s.length},{s.verified},{s.accepted}" for s in message.steps]
    if not message.own:
        steps.append("")
    text = ";".join(steps)
    return f"{text}|{message.refused}" if message.refused else text


def decode(text: str) -> Message:
    """The inverse of `encode`. Raises `ValueError` for anything else."""
    body, _, refused = text.partition("|")
    *before, last = body.split(";")
    steps = []
    for step in (*before, last) if last else before:
        source, length, verified, accepted = map(int, step.split(","))
        steps.append(Verified(source, length, verified, accepted))
    return Message(steps, bool(last), refused or None)


class _Step(NamedTuple):
    """A step that is done, but for what was proposed for it."""

    position: int
    slots: int
    sampled: int
    kept: int


@dataclass
class _Account:
    proposed: dict[int, Proposed] = field(default_factory=dict)  # position → the draft made there
    waiting: list[_Step] = field(default_factory=list)
    refused: str | None = None


class Accounts:
    """The accounts of the requests that are drafted for; kept by the scheduler.

    draft_without_prediction: whether requests without a prediction are drafted for, and so counted.

        accounts.take(report)                                         # what came with a step's output
        steps = accounts.begin(requests, scheduler_output, output)    # before vLLM has looked at the output
        accounts.settle(steps, engine_core_outputs)                   # after it

    For a step of a request with s draft slots, n sampled tokens of which the output keeps k:

        verified = min(s, length of the draft made at the request's tokens before the step)
        accepted = min(n - 1, verified, k)

    Not among s: drafts that a grammar has ruled out, and those that the device has trimmed. Slots beyond the
    draft hold padding that nobody proposed. k is smaller than n where the output ends in between; what is cut
    there is not accepted.
    """

    def __init__(self, draft_without_prediction: bool) -> None:
        self._draft_without_prediction = draft_without_prediction
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def take(self, report: Report) -> None:
        """Take in what the worker has reported."""
        for req_id, proposed in report.proposed:
            self._of(req_id).proposed[proposed.position] = proposed
        for req_id, reason in report.refused.items():
            self._of(req_id).refused = reason

    def _of(self, req_id: str) -> _Account:
        return self._accounts.setdefault(req_id, _Account())

    def begin(
        self, requests: Mapping[str, Any], scheduler_output: Any, output: Any, trimmed: Mapping[str, int]
    ) -> dict[str, _Step]:
        """Request → its part of a step, before vLLM appends the sampled tokens to it and may cut them."""
        steps: dict[str, _Step] = {}
        drafts = scheduler_output.scheduled_spec_decode_tokens
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(req_id)
            if request is None or not self._counts(request) or not output.sampled_token_ids:
                continue
            sampled = len(output.sampled_token_ids[output.req_id_to_index[req_id]])
            if sampled:
                slots = len(drafts.get(req_id, ())) - invalid.get(req_id, 0)
                slots = min(slots, trimmed.get(req_id, slots))
                steps[req_id] = _Step(int(request.num_tokens), slots, sampled, sampled)
        return steps

    def settle(self, steps: dict[str, _Step], outputs: Iterable[Any]) -> None:
        """Attach to vLLM's `EngineCoreOutput`s what is now known about their requests."""
        for output in outputs:
            step = steps.pop(output.request_id, None)
            if step is not None:
                message = self._settle(output.request_id, step._replace(kept=len(output.new_token_ids)))
                output.trace_headers = {**(output.trace_headers or {}), HEADER: encode(message)}

    def _settle(self, req_id: str, step: _Step) -> Message:
        account = self._of(req_id)
        account.waiting.append(step)
        done: list[Verified] = []
        # Drafts are reported in the order in which they were made: a step whose draft is not there although a
        # later one is never had any.
        latest = max(account.proposed, default=-1)
        while account.waiting:
            first = account.waiting[0]
            made = account.proposed.get(first.position)
            if made is None and first.slots and latest < first.position:
                break
            done.append(_verified(first, made))
            del account.waiting[0]
        reached = account.waiting[0].position if account.waiting else step.position + 1
        for position in [position for position in account.proposed if position < reached]:
            del account.proposed[position]
        refused, account.refused = account.refused, None
        return Message(done, not account.waiting, refused)

    def keep_only(self, alive: Container[str]) -> None:
        """Forget requests that are not in `alive`."""
        for req_id in [req_id for req_id in self._accounts if req_id not in alive]:
            del self._accounts[req_id]

    def _counts(self, request: Any) -> bool:
        return self._draft_without_prediction or has_prediction(request)


def _verified(step: _Step, made: Proposed | None) -> Verified:
    if made is None or not made.length:
        return Verified(0, 0, 0, 0)
    verified = max(0, min(step.slots, made.length))
    return Verified(made.source, made.length, verified, min(step.sampled - 1, verified, step.kept))


def has_prediction(request: Any) -> bool:
    """Whether a vLLM request brought a prediction."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    return extra_args.get(wire.KEY) is not None
