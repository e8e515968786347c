"""An engine with the V1 model runner in this process, driven as `engine_process` drives one with V2."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_process import Engine
from v2_harness import Request, Run, run_of
from vllm_harness import ENVIRONMENT


class V1Engine(Engine):
    """settings: of `vllm.LLM`."""

    def __init__(self, model: Path, *, num_draft_tokens: int, **settings: Any) -> None:
        os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "speculative_config": {
                "method": "custom_class",
                "model": "vllm_integration.PredictedOutputs",
                "num_speculative_tokens": num_draft_tokens,
            },
        }
        super().__init__(arguments | settings)

    def serve(self, requests: Sequence[Request]) -> Run:
        """As `V2Engine.run`."""
        as_json = json.loads(json.dumps([request.as_json() for request in requests]))
        return run_of(json.loads(json.dumps(self.run(as_json))))

    def state(self) -> dict[str, Any]:
        proposer = self.runner.drafter
        return {
            "occupied": len(proposer.slots) + len(proposer.requests),
            "known": len(self.scheduler.drafted_requests),
            "counted": len(self.scheduler.ledger) + self.followed(),
            "rows": len(self.runner.requests),
        }
