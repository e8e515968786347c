"""Counts of refuted recipe tokens and of the tokens that the model wrote instead, in a file a worker.

Off unless `GPU_ALIGN_RECIPE_MISSES` is set. The files hold a few tokens of answers around each refuted token, or
with `GPU_ALIGN_RECIPE_MISSES_SHAPES=1` only the shapes of contexts. `gpu-align recipes merge` makes a better pack
of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_align import Recipes, Source
from gpu_align.files import MAX_BYTES, write_at_once
from gpu_align.ops.recipes import SHAPE_WINDOW
from gpu_align.recipes import Misses, count_misses, fingerprint
from gpu_align.tools.recipes.misses import line_of

from ..config.settings import Settings
from ..seams.guard import guarded
from ..wire.reports import Ints
from .startup import WorkerLog, append, encoder_of, logs_here, tokenizer_of

#: Seconds between two writes of the file, and seconds without a count after which it is written at once. vLLM may
#: end a worker without warning, so this is also what can be lost.
EVERY, IDLE = 30.0, 1.0
#: Tokens before a draft that a context, literal or a shape, can depend on.
_BEFORE = SHAPE_WINDOW + 1
#: Accepted tokens are counted of one draft in so many, as that many: it takes time, and there are many.
ACCEPTED_OF = 8
#: Requests that are followed; the oldest are forgotten.
_MAX_REQUESTS = 4096


@dataclass
class _FollowedMisses:
    """One request. draft: of recipe tokens that was made behind the `position`th token, the last of `before`."""

    prompt_len: int
    draft: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    position: int = 0


class MissLog(WorkerLog):
    """Compares each draft of recipe tokens with what the model then wrote: it is right as far as it is that,
    whether or not the engine verified all of it. A thread appends to the file now and then.

    path: the file. misses: counts of this process. recipes: of the drafter. num_draft_tokens: K. device: of the
    tensors that `tails_of` is given.
    """

    def __init__(
        self, path: Path, misses: Misses, recipes: Recipes, num_draft_tokens: int, device: Any = "cpu"
    ) -> None:
        self._path, self._misses, self._recipes = path, misses, recipes
        #: What was counted since the last write.
        self._new = self._none()
        #: Tokens of a request's end that `take` wants: those before a draft, and what a step can write.
        self.tail_len = _BEFORE + num_draft_tokens + 1
        self._back = torch.arange(-self.tail_len, 0, device=device)
        self._requests: OrderedDict[str, _FollowedMisses] = OrderedDict()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._drafts = 0
        setting = "GPU_ALIGN_RECIPE_MISSES"
        super().__init__(
            "recipe misses", "counts no recipe misses", setting, path.parent, then=self._requests.clear
        )
        if self.on:
            threading.Thread(target=self._keep_writing, name="gpu_align-misses", daemon=True).start()
        # vLLM's workers are children of multiprocessing, which do not run what `atexit` knows.
        util.Finalize(None, self.close, exitpriority=10)

    @guarded
    def add(self, req_id: str, prompt_len: int) -> None:
        """A request that is drafted for arrives, or returns."""
        self._requests.setdefault(req_id, _FollowedMisses(prompt_len))
        if len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)

    @guarded
    def finish(self, req_ids: Iterable[str]) -> None:
        """Requests have finished."""
        for req_id in req_ids:
            self._requests.pop(req_id, None)

    @guarded
    def tails_of(self, token_ids: torch.Tensor, total_len: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[B, tail_len] the last tokens of these rows; of shorter ones anything first. None if the log is off."""
        return token_ids[rows[:, None], (total_len[rows][:, None] + self._back).clamp_(min=0)]

    @guarded
    def take(
        self,
        req_ids: Sequence[str],
        total_len: Ints,
        source: Ints,
        length: Ints,
        token_ids: Ints,
        tails: Ints,
    ) -> None:
        """One step of B requests.

        total_len: [B] tokens of each, with those that the step sampled. source, length, token_ids: [B], [B],
        [B, K] the drafts made after them. tails: of `tails_of`.
        """
        drafts = np.where(source == int(Source.RECIPE), length, 0).tolist()
        for row, (req_id, total, drafted) in enumerate(zip(req_ids, total_len.tolist(), drafts, strict=True)):
            request = self._requests.get(req_id)
            if request is None:
                continue
            if request.draft:
                self._compare(request, total, tails[row])
            request.draft = token_ids[row, :drafted].tolist()
            if drafted:
                request.position = total
                request.before = tails[row, -min(_BEFORE, total) :].tolist()

    def close(self) -> None:
        """Write what has been counted, for the last time."""
        self._closed.set()
        self.guard.run(self._write)

    def _keep_writing(self) -> None:
        written, seen = time.monotonic(), self._drafts
        while self.on and not self._closed.wait(min(EVERY, IDLE)):
            if self._drafts == seen or time.monotonic() - written >= EVERY:
                self.guard.run(self._write)
                written = time.monotonic()
            seen = self._drafts

    def _compare(self, request: _FollowedMisses, total: int, tail: Ints) -> None:
        written = total - request.position
        if not 0 < written <= len(tail) - _BEFORE:
            return
        self._drafts += 1
        with self._lock:
            count_misses(
                self._new,
                request.before,
                request.position - request.prompt_len,
                request.draft,
                tail[-written:].tolist(),
                self._recipes.shape_of,
                accepted_count=0 if self._drafts % ACCEPTED_OF else ACCEPTED_OF,
            )

    def _none(self) -> Misses:
        return Misses(shapes_only=self._misses.shapes_only)

    def _write(self) -> None:
        with self._writing:  # the thread, and whoever closes
            with self._lock:
                new, self._new = self._new.counts, self._none()
            if not new:
                return
            held = (miss for miss in new.items() if self._misses.count(*miss))
            added = b"".join(line_of(*miss) for miss in held)
            if self._path.exists() and self._path.stat().st_size + len(added) <= MAX_BYTES:
                append(self._path, added)
            else:  # what is counted again and again would make it longer than a reader takes
                whole = (line_of(*miss) for miss in self._misses.counts.items())
                write_at_once(self._path, chain([self._misses.head()], whole), 0o600)


def open_miss_log(
    settings: Settings,
    recipes: Recipes | None,
    num_draft_tokens: int,
    vllm_config: Any,
    device: Any = "cpu",
) -> MissLog | None:
    """The log where `GPU_ALIGN_RECIPE_MISSES` asks for one and there are recipes."""
    directory, shapes_only = settings.recipe_misses, settings.recipe_misses_shapes
    if not directory or recipes is None or not logs_here(vllm_config):
        return None
    path = Path(directory) / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.misses.json"
    tokenizer = fingerprint(encoder_of(tokenizer_of(vllm_config.model_config)))
    misses = Misses(tokenizer, shapes_only=shapes_only)
    log = MissLog(path, misses, recipes, num_draft_tokens, device)
    return log if log.on else None
