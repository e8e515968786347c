"""The hook of `edits` in vLLM's worker: the next token of each row is that of the row's record."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu.edits import START
from benchmarks.gpu.serve import fill_weights

LARGE = 1e4


class Hook:
    """`worker_extension_cls`: vLLM's worker imports this module, and its class gets nothing more."""


@cache
def _outputs(device: Any) -> Any:
    """`Records.outputs`."""
    import torch

    return torch.from_numpy(np.load(os.environ["EDITS_OUTPUTS"])).to(device)


def _start(params: Any) -> int:
    """Index in `_outputs` of what follows a request's position 0, be it its prompt's. 0: it has no record."""
    return int(((params and params.extra_args) or {}).get(START, 0))


def _steer(logits: Any, starts: Any, positions: Any) -> None:
    """[rows] each: at which position of the request of that start the row's logits were computed."""
    logits.scatter_(1, _outputs(logits.device)[starts + positions].unsqueeze(1), LARGE)


def _wrap_v2() -> None:
    import torch
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    here = SimpleNamespace(starts=None)  # [slots], on the device

    def add_request(self: Any, slot: int, params: Any, *, original: Any = Sampler.add_request) -> None:
        if here.starts is None:
            size, device = len(self.needs_logits_processing), self.req_states.device
            here.starts = torch.zeros(size, dtype=torch.int64, device=device)
        here.starts[slot] = _start(params)
        original(self, slot, params)

    Sampler.add_request = add_request
    for kind in (Sampler, RejectionSampler):

        def call(
            self: Any, logits: Any, batch: Any, *args: Any, original: Any = kind.__call__, **kwargs: Any
        ) -> Any:
            if here.starts is not None:
                _steer(logits, here.starts[batch.expanded_idx_mapping], batch.positions[batch.logits_indices])
            return original(self, logits, batch, *args, **kwargs)

        kind.__call__ = call


def _wrap_v1() -> None:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample(self: Any, logits: Any, drafts: Any, *, original: Any = GPUModelRunner._sample) -> Any:
        ids = self.input_batch.req_ids[: self.input_batch.num_reqs]
        starts = np.array([_start(self.requests[name].sampling_params) for name in ids])
        if drafts is None:
            rows = self.query_start_loc.gpu[1 : 1 + len(ids)] - 1
        else:
            rows, starts = drafts.logits_indices, starts.repeat([n + 1 for n in drafts.num_draft_tokens])
        _steer(logits, torch.from_numpy(starts).to(logits.device), self.positions[rows])
        return original(self, logits, drafts)

    GPUModelRunner._sample = sample


def _wrap() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = fill_weights
    for wrap in (_wrap_v1, _wrap_v2):
        with suppress(ImportError):  # of the runner that is not used
            wrap()


_wrap()
