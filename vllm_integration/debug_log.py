"""One YAML file a request, with every verification step. Off unless `GPU_ALIGN_DEBUG_DIR` is set.

The format is described in this package's README. The files hold token ids of requests: they are a
debugging aid for whoever may read the requests themselves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_integration.usage import RequestUsage

logger = logging.getLogger("vllm.gpu_align")

FORMAT = "gpu-align-steps/1"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 120


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
    """Writes the files. A directory that cannot be written turns it off with one warning."""

    def __init__(self, directory: str) -> None:
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
    ) -> None:
        """Write one request's file, whole or not at all."""
        if self._directory is None:
            return
        document = {
            "format": FORMAT,
            "request_id": req_id,
            "num_draft_tokens": num_draft_tokens,
            "prompt_tokens": prompt_tokens,
            "prediction_tokens": prediction_tokens,
            "usage": usage.as_dict(),
            "steps": [vars(step) for step in steps],
        }
        target = self._directory / safe_name(req_id)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_text(_dump(document), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        logger.warning("GPU_ALIGN_DEBUG_DIR=%s is not written to any more: %s", self._directory, error)
        self._directory = None


def _dump(document: dict[str, Any]) -> str:
    import yaml  # vLLM depends on it; only this optional log needs it

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        document, Dumper=dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )
    return text
