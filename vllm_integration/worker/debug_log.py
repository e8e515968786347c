"""Writes the step logs: one YAML file a request. Off unless `GPU_ALIGN_DEBUG_DIR` is set.

`gpu_align.step_log` defines the format. The files hold token ids of requests: whoever may read the files may read
the requests.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Any

from gpu_align import step_log
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
    """Writes the files. A directory that cannot be written turns it off with one warning.

    num_draft_tokens: K. decode: token ids → text; None leaves texts out.
    """

    def __init__(self, directory: str, num_draft_tokens: int, decode: step_log.Decode | None = None) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._decode = decode
        self._directory: Path | None = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._turn_off(error)

    def write(self, state: RequestState) -> None:
        """Write the file of a request whose steps were kept, whole or not at all."""
        if self._directory is None:
            return
        prediction_tokens = 0 if state.prediction is None else int(state.prediction.size)
        log = step_log.StepLog(
            state.req_id, self._num_draft_tokens, state.prompt_len, prediction_tokens, state.steps
        )
        if self._decode is not None:
            log = log.with_texts(self._decode, state.tokens[: state.prompt_len])
        target = self._directory / safe_name(state.req_id)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_text(step_log.dump(log), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        logger.warning("GPU_ALIGN_DEBUG_DIR=%s is not written to any more: %s", self._directory, error)
        self._directory = None


def open_debug_log(directory: str | None, num_draft_tokens: int, vllm_config: Any) -> DebugLog | None:
    """The log where `directory` asks for one. Tensor-parallel ranks draft the same; the first one writes."""
    parallel = vllm_config.parallel_config
    if not directory or int(parallel.rank) % int(parallel.tensor_parallel_size):
        return None
    return DebugLog(directory, num_draft_tokens, _decoder_of(vllm_config.model_config))


def _decoder_of(model_config: Any) -> step_log.Decode | None:
    """The decoder of the served model; None where it has no tokenizer, or it cannot be loaded here."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        decode: step_log.Decode = cached_tokenizer_from_config(model_config).decode
        decode([])
    except Exception as error:
        logger.warning("The step log has no texts: %s: %s", type(error).__name__, error)
        return None
    return decode
