"""The step log: a file a request, of what each of its steps did. Only where `GPU_ALIGN_DEBUG_DIR` is set."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpu_align.drafter import step_log
from gpu_align.drafter.explain import Explainer, Explanation
from gpu_align.drafter.step_log import SOURCES, Step
from gpu_align.ops.files import write_at_once
from gpu_align.ops.layout import FIRST_GAP

from ..config.settings import Settings
from ..seams.guard import Guard, guarded, logger, shown_error
from ..seams.install import install
from ..wire import request as wire
from ..wire.steps import count_verified
from .requests import StopRule, stop_rule
from .startup import logs_here, tokenizer_of

Explain = Callable[[wire.RequestContent, int], Explainer]

_MAX_NAME = 120


def safe_name(req_id: str) -> str:
    """A file name for a request id, which a client may have chosen: no separators, no leading dot, short. If it
    must be changed for that, with a digest of the id: no two share a file."""
    name = re.sub(r"[^A-Za-z0-9._-]|^[.]", "_", req_id)[:_MAX_NAME]
    if name != req_id or not name:
        name += "-" + hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name + ".yaml"


class Proposal(NamedTuple):
    """Drafts handed to the engine, to be verified by the request's next step."""

    token_ids: Sequence[int] = ()
    confidence: Sequence[float] = ()
    source: str = SOURCES[0]
    duration_us: int = 0


@dataclass
class LoggedRequest:
    """A request whose steps are kept. tokens: prompt and output."""

    req_id: str
    content: wire.RequestContent
    stop: StopRule
    prompt_len: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    ended: bool = False
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    explainer: Explainer | None = None
    explanation: Explanation | None = None

    def record(self, sampled: list[int], slots: int, position: int) -> None:
        """Keep a step that sampled these behind `position` tokens and verified so many drafts, with where the
        output stood in the prediction, and why this was drafted."""
        if self.ended:  # asynchronous scheduling had already started the step
            return
        new = sampled[: self.stop.kept(sampled, position - self.prompt_len)]
        proposal, self.proposal = self.proposal, Proposal()
        verified, accepted = count_verified(slots, len(proposal.token_ids), len(sampled), len(new))
        before, after = self.explanation, None
        self.tokens += new
        if self.explainer is not None:
            after = self.explanation = self.explainer.at(self.tokens)
        explained = before if proposal.token_ids else None
        chosen = explained and explained.chosen
        self.steps.append(
            Step(
                step=len(self.steps),
                position=position,
                source=proposal.source if verified else SOURCES[0],
                proposed=list(proposal.token_ids),
                confidence=list(proposal.confidence),
                duration_us=proposal.duration_us,
                verified=int(verified),
                accepted=int(accepted),
                new=new,
                cursor_before=before.cursor if before is not None else 0,
                cursor_after=after.cursor if after is not None else 0,
                candidate=None if chosen is None else vars(chosen),
                others=0 if explained is None else len(explained.others),
            )
        )
        self.ended = self.stop.ends(new, position - self.prompt_len + len(new))


class DebugLog:
    """Writes the files. Whatever fails turns the log off, and nothing else: see `Guard`. Requests are added; then
    each step is settled, and the drafts for the next one proposed; in the end they finish.

    num_draft_tokens: K. decode: token ids → text; None leaves texts out. explain: a request's explainer, by its
    content and the length of its prompt.
    """

    def __init__(
        self,
        directory: str,
        num_draft_tokens: int,
        decode: step_log.Decode | None = None,
        explain: Explain | None = None,
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._decode = decode
        self._directory = Path(directory)
        self._explain = explain
        self._requests: dict[str, LoggedRequest] = {}
        self.guard = Guard("step log", "writes no step logs", spared=(OSError,), then=self._requests.clear)
        self.guard.run(_make_private, self._directory)
        if not self.guard.is_off:
            logger.warning(
                "gpu_align writes the texts of requests and answers to disk (GPU_ALIGN_DEBUG_DIR=%r)",
                directory,
            )

    @guarded
    def add(self, req_id: str, content: wire.RequestContent, prompt_len: int, sampling_params: Any) -> None:
        """A request that is drafted for arrives, or returns after a preemption, which lost its drafts."""
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = LoggedRequest(req_id, content, stop_rule(sampling_params))
        request.prompt_len, request.proposal = prompt_len, Proposal()

    @guarded
    def settle(
        self,
        req_ids: Sequence[str],
        rows: Iterable[int],
        slots: Sequence[int],
        num_sampled: Sequence[int],
        total_len: Any,
        token_ids: Any,
    ) -> None:
        """Record what each request of the batch has just sampled. Waits for the device, as `proposed` does.

        rows: [B] of each in `total_len` and `token_ids`, which are as the engine has them. slots: [B] draft slots
        that were verified, without padding. num_sampled: [B].
        """
        for req_id, row, verified, sampled in zip(req_ids, rows, slots, num_sampled, strict=True):
            request = self._requests.get(req_id)
            if request is None or not sampled:
                continue
            end = int(total_len[row])
            if request.explainer is None and self._explain is not None:
                request.tokens = token_ids[row, : end - sampled].tolist()
                request.explainer = self._explain(request.content, request.prompt_len)
            request.record(token_ids[row, end - sampled : end].tolist(), int(verified), end - sampled)

    @guarded
    def proposed(self, req_ids: Sequence[str], draft: Any, duration_us: int) -> None:
        """Keep what the drafter proposes for the next step."""
        columns = (draft.length, draft.token_ids, draft.confidence, draft.source)
        rows = zip(req_ids, *(column.tolist() for column in columns), strict=True)
        for req_id, length, token_ids, confidence, source in rows:
            if request := self._requests.get(req_id):
                found = token_ids[:length], confidence[:length]
                request.proposal = Proposal(*found, SOURCES[source], duration_us)

    @guarded
    def finish(self, req_ids: Iterable[str]) -> None:
        """Write the files of requests that have finished."""
        for req_id in req_ids:
            if request := self._requests.pop(req_id, None):
                self.write(request)

    @guarded
    def write(self, request: LoggedRequest) -> None:
        """Write the file of a request that has finished, whole or not at all."""
        prediction = request.content.token_ids.tolist()
        log = step_log.StepLog(
            request.req_id,
            self._num_draft_tokens,
            request.prompt_len,
            len(prediction),
            request.steps,
            prediction_lines=[step_log.Line(prediction)] if prediction else [],
        )
        if self._decode is not None:
            log = log.with_texts(self._decode, request.tokens[: request.prompt_len])
        write_at_once(self._directory / safe_name(request.req_id), [step_log.dump(log).encode()], 0o600)


def _make_private(directory: Path) -> None:
    """Make a directory for texts of requests; one WARNING where it is there and others can see into it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & 0o077:
            told = "GPU_ALIGN_DEBUG_DIR=%r has mode %04o: other users can see into it"
            logger.warning(told, str(directory), mode)


def _decoder_of(model_config: Any) -> step_log.Decode | None:
    """The decoder of the served model; None where it has no tokenizer, or it cannot be loaded here."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        decode: step_log.Decode = tokenizer_of(model_config).decode
        decode([])
    except Exception as error:
        logger.warning("The step log has no texts: %s", shown_error(error))
        return None
    return lambda ids: decode([token for token in ids if token < FIRST_GAP])


def open_log(
    settings: Settings, num_draft_tokens: int, vllm_config: Any, explain: Explain
) -> DebugLog | None:
    """The log where the settings ask for one and name a place for it."""
    if not settings.debug_dir or not logs_here(vllm_config) or install("step_log"):
        return None
    decode = _decoder_of(vllm_config.model_config)
    log = DebugLog(settings.debug_dir, num_draft_tokens, decode, explain)
    return None if log.guard.is_off else log
