"""Writes the step logs: one YAML file a request. Off unless `GPU_ALIGN_DEBUG_DIR` is set.

`gpu_align.step_log` defines the format. The files hold texts and token ids of requests: whoever may read the files
may read the requests. Only the server's own user may: mode 0600, in a directory that the log makes with mode 0700.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_align import step_log
from vllm_integration.seams.install import strict
from vllm_integration.seams.log_text import shown_error
from vllm_integration.worker.request_state import RequestState

logger = logging.getLogger("vllm.gpu_align")

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 120


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


class DebugLog:
    """Writes the files. Whatever fails turns the log off, with one ERROR line, and nothing else.

    num_draft_tokens: K. decode: token ids → text; None leaves texts out.
    """

    def __init__(self, directory: str, num_draft_tokens: int, decode: step_log.Decode | None = None) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._decode = decode
        self._directory = directory
        self.on = True
        self.guard(self._open)

    def guard(self, step: Callable[..., Any], *args: Any) -> None:
        """`step(*args)`, a step of the log; nothing once the log is off. If it fails, the log is off.

        With `GPU_ALIGN_STRICT=1` the error is raised, except one of the file system.
        """
        if not self.on:
            return
        try:
            step(*args)
        except Exception as error:
            if strict() and not isinstance(error, OSError):
                raise
            self.on = False
            logger.error(
                "gpu_align writes no step logs any more (GPU_ALIGN_DEBUG_DIR=%r): %s",
                self._directory,
                shown_error(error),
            )

    def write(self, state: RequestState) -> None:
        """Write the file of a request, whole or not at all."""
        self.guard(self._write, state)

    def _open(self) -> None:
        directory = Path(self._directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            mode = stat.S_IMODE(directory.stat().st_mode)
            if mode & 0o077:
                logger.warning(
                    "GPU_ALIGN_DEBUG_DIR=%r has mode %04o: other users can see into it", self._directory, mode
                )
        logger.warning(
            "gpu_align writes the texts of requests and answers to disk (GPU_ALIGN_DEBUG_DIR=%r)",
            self._directory,
        )

    def _write(self, state: RequestState) -> None:
        prediction_tokens = 0 if state.prediction is None else int(state.prediction.size)
        log = step_log.StepLog(
            state.req_id, self._num_draft_tokens, state.prompt_len, prediction_tokens, state.steps
        )
        if self._decode is not None:
            log = log.with_texts(self._decode, state.tokens[: state.prompt_len])
        target = Path(self._directory) / safe_name(state.req_id)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        text = step_log.dump(log).encode()
        partial.unlink(missing_ok=True)  # of a write that was killed; and never follow a link
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(text)
            partial.replace(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def open_debug_log(directory: str | None, num_draft_tokens: int, vllm_config: Any) -> DebugLog | None:
    """The log where `directory` asks for one and is a place for it. Tensor-parallel ranks draft the same; the
    first one writes."""
    parallel = vllm_config.parallel_config
    if not directory or int(parallel.rank) % int(parallel.tensor_parallel_size):
        return None
    log = DebugLog(directory, num_draft_tokens, _decoder_of(vllm_config.model_config))
    return log if log.on else None


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
