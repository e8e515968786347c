"""`gpu_align.Drafter` as a single-sequence policy, with the tensors an engine would own."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch

import gpu_align
from gpu_align.policies.base import Policy
from gpu_align.simulate.records import Record
from gpu_align.simulate.replay import Drafted, PairResult, PolicyResult, verification_steps


class DrafterPolicy(Policy):
    """One slot of a `Drafter` on the CPU; one `Drafter` serves any number of sequences in turn.

    Args:
        max_context_len: the longest prompt plus output, tokens.
        max_prediction_len: the longest prediction, tokens.
        vocab_size: ids are below it.
        num_draft_tokens: K; `start` must be called with the same.
        config: the drafter's settings; the defaults if None.
        name: the name in reports.
        recipes: the drafter's.
    """

    def __init__(
        self,
        max_context_len: int,
        max_prediction_len: int,
        vocab_size: int,
        num_draft_tokens: int,
        config: gpu_align.DrafterConfig | None = None,
        name: str = "gpu_align",
        recipes: gpu_align.Recipes | None = None,
    ) -> None:
        self.name = name
        self._num_draft_tokens = num_draft_tokens
        self._drafter = gpu_align.Drafter(
            max_slots=1,
            max_context_len=max_context_len,
            max_prediction_len=max_prediction_len,
            num_draft_tokens=num_draft_tokens,
            vocab_size=vocab_size,
            device="cpu",
            config=config,
            recipes=recipes,
        )
        self._token_ids = torch.zeros((1, max_context_len), dtype=torch.int32)
        self._total_len = torch.zeros(1, dtype=torch.int32)
        self._slots = torch.zeros(1, dtype=torch.int64)
        self._num_sampled = torch.ones(1, dtype=torch.int32)
        # The same memory as NumPy sees it: writing a few tokens there costs less than through torch.
        self._row = self._token_ids.numpy()[0]
        self._length = 0
        self._source = 0
        self._confidence: list[float] = []

    @classmethod
    def for_records(
        cls,
        records: Sequence[Record],
        num_draft_tokens: int,
        config: gpu_align.DrafterConfig | None = None,
        name: str = "gpu_align",
        recipes: gpu_align.Recipes | None = None,
    ) -> DrafterPolicy:
        """A policy large enough for every one of `records`."""
        return cls(*sizes_for(records, recipes), num_draft_tokens, config, name, recipes)

    @property
    def source(self) -> int:
        """The `gpu_align.Source` of the last draft."""
        return self._source

    @property
    def confidence(self) -> list[float]:
        """The drafter's confidence in each token of the last draft."""
        return self._confidence

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        if num_draft_tokens != self._num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens: expected {self._num_draft_tokens}, as at construction, "
                f"found {num_draft_tokens}"
            )
        self._length = 0
        self._source = 0
        self._confidence = []
        self._drafter.add(0, prediction=list(prediction), prompt_len=len(prompt))
        self._append(prompt)
        # Drafting in the prefill step: nothing is sampled yet, but drafts are wanted.
        self._num_sampled[0] = 1

    def propose(self) -> list[int]:
        draft = self._drafter.propose(self._token_ids, self._total_len, self._slots, self._num_sampled)
        length = int(draft.length[0])
        self._source = int(draft.source[0])
        self._confidence = draft.confidence[0, :length].tolist()
        tokens: list[int] = draft.token_ids[0, :length].tolist()
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        self._num_sampled[0] = len(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._row):
            raise ValueError(
                f"tokens: expected at most {len(self._row)} in all, as at construction, found {end}"
            )
        self._row[self._length : end] = np.asarray(tokens, dtype=np.int32)
        self._length = end
        self._total_len[0] = end


class _Sizes(NamedTuple):
    max_context_len: int
    max_prediction_len: int
    vocab_size: int


def sizes_for(records: Sequence[Record], recipes: gpu_align.Recipes | None = None) -> _Sizes:
    """The sizes of a `Drafter` that can hold any one of `records`, and draft all of `recipes`."""
    texts = [tokens for r in records for tokens in (r.prompt, r.prediction, r.output)]
    # A draft ends before an id that is out of the vocabulary: with recipes that the records use no token of, what
    # is drafted for one record would depend on the others.
    if recipes is not None and len(recipes):
        texts.append([int(recipes.token_ids.max())])
    return _Sizes(
        max_context_len=max((len(r.prompt) + len(r.output) for r in records), default=1),
        max_prediction_len=max((len(r.prediction) for r in records), default=0) or 1,
        vocab_size=max((max(tokens) for tokens in texts if tokens), default=0) + 1,
    )


def replay_batched(
    records: Sequence[Record],
    num_draft_tokens: int,
    config: gpu_align.DrafterConfig | None = None,
    draft_in_prefill: bool = False,
    name: str = "gpu_align",
    batch_size: int = 64,
    recipes: gpu_align.Recipes | None = None,
    memory: bool = False,
    related: Sequence[bool] = (),
) -> PolicyResult:
    """What `simulate` finds for a `DrafterPolicy`, with up to `batch_size` records drafted for in one call.

    The counts are the same, as a draft depends on nothing outside its own request; it takes less time, because a
    call's fixed costs are shared. A step's time is its share of the call.

    Args:
        records: what to replay.
        num_draft_tokens: K, at least 1.
        config: the drafter's settings.
        draft_in_prefill: let the prefill step verify drafts.
        name: the name in reports.
        batch_size: slots of the drafter.
        recipes: the drafter's.
        memory: take the records' predictions for texts of earlier answers.
        related: of which records these are answers to requests like it; none if empty.
    """
    sizes = sizes_for(records, recipes)
    drafter = gpu_align.Drafter(
        max_slots=batch_size,
        **sizes._asdict(),
        num_draft_tokens=num_draft_tokens,
        device="cpu",
        config=config,
        recipes=recipes,
    )
    token_ids = torch.zeros((batch_size, sizes.max_context_len), dtype=torch.int32)
    total_len = torch.zeros(batch_size, dtype=torch.int32)
    rows, lengths = token_ids.numpy(), total_len.numpy()
    results: list[PairResult | None] = [None] * len(records)
    # Longest first: the last calls then still have a full batch.
    waiting = sorted(range(len(records)), key=lambda i: len(records[i].output))
    running: dict[int, tuple[int, Generator[list[int], Drafted, PairResult]]] = {}
    free = list(range(batch_size))

    def append(slot: int, tokens: Sequence[int]) -> None:
        rows[slot, lengths[slot] : lengths[slot] + len(tokens)] = tokens
        lengths[slot] += len(tokens)

    def advance(slot: int, drafted: Drafted | None) -> None:
        index, steps = running[slot]
        try:
            append(slot, next(steps) if drafted is None else steps.send(drafted))
        except StopIteration as finished:
            results[index] = finished.value
            del running[slot]
            free.append(slot)

    while waiting or running:
        while waiting and free:
            slot, index = free.pop(), waiting.pop()
            record = records[index]
            is_related = bool(related) and related[index]
            drafter.add(slot, record.prediction, len(record.prompt), memory=memory, related=is_related)
            lengths[slot] = 0
            append(slot, record.prompt)
            running[slot] = index, verification_steps(record, num_draft_tokens, draft_in_prefill, name)
            advance(slot, None)
        if not running:
            continue
        slots = sorted(running)
        began = time.perf_counter_ns()
        draft = drafter.propose(
            token_ids, total_len, torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32)
        )
        drafted = draft.length.tolist(), draft.source.tolist()
        ns = (time.perf_counter_ns() - began) // len(slots)
        tokens, confidence = draft.token_ids.numpy(), draft.confidence.numpy()
        for b, (slot, length, source) in enumerate(zip(slots, *drafted, strict=True)):
            advance(slot, Drafted(tokens[b, :length].tolist(), source, confidence[b, :length].tolist(), ns))
    return PolicyResult(name, [result for result in results if result is not None])
