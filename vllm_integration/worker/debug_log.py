"""One YAML file a request, with every verification step. Off unless `GPU_ALIGN_DEBUG_DIR` is set.

The format is described in this package's README. The files hold token ids of requests: they are a
debugging aid for whoever may read the requests themselves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_integration.wire.usage import RequestUsage

logger = logging.getLogger("vllm.gpu_align")

FORMAT = "gpu-align-steps/1"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 120
#: Tokens before a step that its text is decoded with: spaces and torn characters depend on them.
_TEXT_CONTEXT = 8
_TORN = "\ufffd"

Decode = Callable[[list[int]], str]


@dataclass
class StepRecord:
    """One verification step of one request; fields as in the README."""

    step: int
    position: int
    source: str
    proposed: list[int]
    confidence: list[float]
    duration_us: int
    verified: int
    accepted: int
    new: list[int]
    cursor_before: int = 0
    cursor_after: int = 0
    candidate: dict[str, Any] | None = None
    others: int = 0


def safe_name(req_id: str) -> str:
    """A file name for a request id, which a client may have chosen: no separators, no leading dot, short.

    Ids that had to be changed get a digest of the original, so that two of them never share a file.
    """
    name = _UNSAFE.sub("_", req_id)[:_MAX_NAME]
    if name.startswith("."):
        name = "_" + name[1:]
    if name != req_id or not name:
        name += "-" + hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name + ".yaml"


class DebugLog:
    """Writes the files. A directory that cannot be written turns it off with one warning.

    decode: token ids → text; None leaves texts out.
    """

    def __init__(self, directory: str, decode: Decode | None = None) -> None:
        self._decode = decode
        self._directory: Path | None = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._turn_off(error)

    def write(
        self,
        req_id: str,
        *,
        num_draft_tokens: int,
        prompt_tokens: int,
        prediction_tokens: int,
        usage: RequestUsage,
        steps: list[StepRecord],
        tokens: list[int],
    ) -> None:
        """Write one request's file, whole or not at all. tokens: its prompt and output."""
        if self._directory is None:
            return
        document = {
            "format": FORMAT,
            "request_id": req_id,
            "num_draft_tokens": num_draft_tokens,
            "prompt_tokens": prompt_tokens,
            "prediction_tokens": prediction_tokens,
            "usage": usage.as_dict(),
            "steps": [self._with_text(step, tokens) for step in steps],
        }
        target = self._directory / safe_name(req_id)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_text(_dump(document), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            self._turn_off(error)

    def _with_text(self, step: StepRecord, tokens: list[int]) -> dict[str, Any]:
        if self._decode is None:
            return vars(step)
        before = tokens[max(0, step.position - _TEXT_CONTEXT) : step.position]
        accepted = before + step.new[: step.accepted]
        return {
            **vars(step),
            "proposed_text": text_after(self._decode, before, step.proposed),
            "accepted_text": text_after(self._decode, before, step.new[: step.accepted]),
            "own_text": text_after(self._decode, accepted[-_TEXT_CONTEXT:], step.new[step.accepted :]),
        }

    def _turn_off(self, error: OSError) -> None:
        logger.warning("GPU_ALIGN_DEBUG_DIR=%s is not written to any more: %s", self._directory, error)
        self._directory = None


def text_after(decode: Decode, before: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the text of `before`. A character spread over several tokens counts to its last."""
    known, whole = decode(before).rstrip(_TORN), decode(before + tokens).rstrip(_TORN)
    return whole[len(known) :]


def tokenizer_of(model_config: Any) -> Decode | None:
    """The decoder of the served model; None where it has no tokenizer, or it cannot be loaded here."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        decode: Decode = cached_tokenizer_from_config(model_config).decode
        decode([])
    except Exception as error:
        logger.warning("The step log has no texts: %s: %s", type(error).__name__, error)
        return None
    return decode


def _dump(document: dict[str, Any]) -> str:
    import yaml  # vLLM depends on it; only this optional log needs it

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        document, Dumper=dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )
    return text
