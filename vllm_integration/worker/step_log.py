"""The step log: a file a request, of what each of its steps did. Only where `GPU_ALIGN_DEBUG_DIR` is set."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_align import step_log
from gpu_align.tools.explain import Explainer

from ..config import engine_config as adaptive
from ..config.settings import Settings
from ..seams.install import Guard, guarded, shown_error
from ..wire import request as wire
from .requests import Proposal, RequestState, proposals_of, stop_rule
from .startup import make_private

logger = logging.getLogger("vllm.gpu_align")

Explain = Callable[[wire.RequestContent, int], Explainer]

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 120
_FILES = "writes no step logs"


def safe_name(req_id: str) -> str:
    """A file name for a request id, which a client may have chosen: no separators, no leading dot, short.

    An id that must be changed gets a digest of the original, so that no two ids share a file.
    """
    name = _UNSAFE.sub("_", req_id)[:_MAX_NAME]
    if name.startswith("."):
        name = "_" + name[1:]
    if name != req_id or not name:
        name += "-" + hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name + ".yaml"


@dataclass
class _LiveFile:
    """A file that grows. texts: of the next step. num_steps: how many it has."""

    path: Path
    texts: step_log.Texts | None
    num_steps: int = 0


class DebugLog:
    """Writes the files. Whatever fails turns the log off, with one ERROR line, and nothing else.

        log.keep(state, …)                          # V1, which follows its requests itself: each step
        log.write(state)                            # and their end

        log.add(req_id, …)                          # V2: a request log.settle(…); log.proposed(…)
        # each step: what was sampled, what is drafted for the next one log.finish(req_ids)

    num_draft_tokens: K. decode: token ids → text; None leaves texts out. live: whether `follow` does
    anything. explain: a request's explainer, by its content and the length of its prompt.
    """

    def __init__(
        self,
        directory: str,
        num_draft_tokens: int,
        decode: step_log.Decode | None = None,
        *,
        live: bool = False,
        explain: Explain | None = None,
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._decode = decode
        self._directory = Path(directory)
        self._is_live, self._explain = live, explain
        self._requests: dict[str, RequestState] = {}
        self._live: dict[str, _LiveFile] = {}
        self._guard = Guard(f"any more (GPU_ALIGN_DEBUG_DIR={directory!r})", spared=(OSError,))
        self.run(self._open)

    @property
    def on(self) -> bool:
        """Whether the log has not failed."""
        return not self._guard.has_ended(_FILES)

    def run(self, step: Callable[..., Any], *args: Any) -> None:
        """`step(*args)`, a step of the log; nothing once the log is off. If it fails, the log is off."""
        self._guard.run(_FILES, step, *args)

    def _open(self) -> None:
        make_private("GPU_ALIGN_DEBUG_DIR", self._directory)
        logger.warning(
            "gpu_align writes the texts of requests and answers to disk (GPU_ALIGN_DEBUG_DIR=%r)",
            str(self._directory),
        )

    @guarded
    def keep(
        self,
        state: RequestState,
        before: Callable[[], list[int]],
        sampled: list[int],
        verified: Sequence[int],
        total_len: int,
    ) -> None:
        """One step of a request, not settled yet; see `RequestState.record`. before: all tokens before
        `sampled`."""
        if state.explainer is None and self._explain is not None:
            state.tokens = before()
            state.explainer = self._explain(state.content, state.prompt_len)
        state.record(sampled, verified, total_len)
        self.follow(state)

    @guarded
    def add(self, req_id: str, content: wire.RequestContent, prompt_len: int, sampling_params: Any) -> None:
        """A request that is drafted for arrives, or returns after a preemption, which lost its drafts."""
        state = self._requests.get(req_id)
        if state is None:
            state = self._requests[req_id] = RequestState(req_id, content, stop_rule(sampling_params))
        state.prompt_len, state.proposal = prompt_len, Proposal()

    @guarded
    def settle(self, batch: Any, num_sampled: Any, req_states: Any, *, trimmed: bool = False) -> None:
        """Record what each request of the batch has just sampled; the arguments are those of `propose`. Waits
        for the device, as `proposed` does.

        trimmed: whether the device may have kept fewer drafts than were scheduled.
        """
        if trimmed:
            batch = adaptive.as_verified(batch)
        verified, ids = batch.num_draft_tokens_per_req, req_states.all_token_ids.gpu
        for index, (req_id, sampled) in enumerate(zip(batch.req_ids, num_sampled.tolist(), strict=True)):
            state = self._requests.get(req_id)
            if state is None or not sampled:
                continue
            row = int(batch.idx_mapping_np[index])
            total_len = int(req_states.total_len.gpu[row])
            tokens = ids[row, total_len - sampled : total_len].tolist()
            # The runner fills slots beyond the proposal with padding; nobody proposed what is in them.
            drafts = state.proposal.token_ids[: 0 if verified is None else int(verified[index])]
            self.keep(state, ids[row, : total_len - sampled].tolist, tokens, drafts, total_len)
            state.settle(tokens, total_len)

    @guarded
    def proposed(self, batch: Any, draft: Any, duration_us: int) -> None:
        """Keep what the drafter proposes for the next step."""
        for req_id, proposal in zip(batch.req_ids, proposals_of(draft, duration_us), strict=True):
            state = self._requests.get(req_id)
            if state is not None:
                state.proposal = proposal

    def finish(self, req_ids: Iterable[str]) -> None:
        """Write the files of requests that have finished."""
        if not self.on:
            self._requests.clear()
        for req_id in req_ids:
            state = self._requests.pop(req_id, None)
            if state is not None:
                self.write(state)

    @guarded
    def follow(self, state: RequestState) -> None:
        """Append the steps that a live file does not have yet; nothing where files are not live."""
        if not self._is_live:
            return
        file = self._live.get(state.req_id)
        if file is None or not file.path.exists():  # somebody may have cleared the directory
            file = self._live[state.req_id] = self._begin(state)
        steps = state.steps[file.num_steps :]
        if not steps:
            return
        if file.texts is not None:
            steps = [file.texts.of(step) for step in steps]
        file.num_steps += len(steps)
        _append(file.path, os.O_APPEND | os.O_NOFOLLOW, "".join(map(step_log.dump_live_step, steps)))

    def _begin(self, state: RequestState) -> _LiveFile:
        log, texts = self._log_of(state), None
        if self._decode is not None:
            texts = step_log.Texts(self._decode, state.tokens[: state.prompt_len])
            log = replace(log, steps=[]).with_texts(self._decode)
        file = _LiveFile(self._directory / safe_name(state.req_id), texts)
        file.path.unlink(missing_ok=True)  # of an earlier request of that id; and never follow a link
        _append(file.path, os.O_CREAT | os.O_EXCL, step_log.dump_live_head(log))
        return file

    def _log_of(self, state: RequestState) -> step_log.StepLog:
        prediction = state.content.token_ids.tolist()
        return step_log.StepLog(
            state.req_id,
            self._num_draft_tokens,
            state.prompt_len,
            len(prediction),
            state.steps,
            prediction_lines=[step_log.Line(prediction)] if prediction else [],
        )

    @guarded
    def write(self, state: RequestState) -> None:
        """Write the file of a request that has finished, whole or not at all; a live file is replaced by
        it."""
        self._live.pop(state.req_id, None)
        log = self._log_of(state)
        if self._decode is not None:
            log = log.with_texts(self._decode, state.tokens[: state.prompt_len])
        target = self._directory / safe_name(state.req_id)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        text = step_log.dump(log)
        partial.unlink(missing_ok=True)  # of a write that was killed; and never follow a link
        try:
            _append(partial, os.O_CREAT | os.O_EXCL, text)
            partial.replace(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def _append(path: Path, how: int, text: str) -> None:
    """Write behind what the file has, all of it in one call: of a process that is killed, whole lines
    stay."""
    with open(os.open(path, os.O_WRONLY | how, 0o600), "wb", buffering=0) as file:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[file.write(rest) :]


def _decoder_of(model_config: Any) -> step_log.Decode | None:
    """The decoder of the served model; None where it has no tokenizer, or it cannot be loaded here."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        decode: step_log.Decode = cached_tokenizer_from_config(model_config).decode
        decode([])
    except Exception as error:
        logger.warning("The step log has no texts: %s", shown_error(error))
        return None
    return decode


def open_log(
    settings: Settings, num_draft_tokens: int, vllm_config: Any, explain: Explain
) -> DebugLog | None:
    """The log where the settings ask for one and name a place for it. Tensor-parallel ranks draft the same;
    the first one writes."""
    directory, parallel = settings.debug_dir, vllm_config.parallel_config
    if not directory or int(parallel.rank) % int(parallel.tensor_parallel_size):
        return None
    decode = _decoder_of(vllm_config.model_config)
    log = DebugLog(directory, num_draft_tokens, decode, live=settings.debug_live, explain=explain)
    return log if log.on else None
