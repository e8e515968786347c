"""`ResponseMemory`: finished answers that later requests of the same tenant may draft from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .ops._check import check_int

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class MemoryStats:
    """What a memory holds now.

    Attributes:
        num_tokens: of all answers.
        num_answers: how many.
        num_tenants: whose they are.
    """

    num_tokens: int
    num_answers: int
    num_tenants: int


class ResponseMemory:
    """The latest answers of each tenant, as tokens, at most `max_tokens` in all; the oldest goes first.

    ::

        memory = ResponseMemory(max_tokens=1 << 20)
        memory.remember(tenant, output)                          # when a request has finished
        recalled = memory.recall(tenant, drafter.max_prediction_len)
        drafter.add(slot, recalled, prompt_len, memory=True)     # for a request without a prediction

    What is recalled is a text to draft from: a `Drafter` holds it in its arena and indexes it as it does a
    prediction. It is chosen once, when the request begins. With the same memory a request gets the same drafts,
    and what other requests finish meanwhile changes none of them; whoever wants drafts that do not depend on
    earlier requests leaves the memory out.

    No answer is ever recalled for another tenant. An answer that a tenant gave before is held once, as its newest.
    Both methods take time in proportion to the tokens that they are given or give. Not thread-safe.

    Args:
        max_tokens: of all answers together, at least 1: 4 bytes each on the host.

    Raises:
        TypeError: not an integer.
        ValueError: below 1.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = check_int("max_tokens", max_tokens, 1, 2**31 - 1)
        #: Every answer, the oldest first, by tenant and tokens.
        self._ages: OrderedDict[tuple[Hashable, bytes], None] = OrderedDict()
        #: The same by tenant, the oldest first.
        self._answers: dict[Hashable, OrderedDict[bytes, TokenIds]] = {}
        self._num_tokens = 0

    def __repr__(self) -> str:
        """One line: sizes, and nothing of any answer."""
        return f"ResponseMemory(max_tokens={self.max_tokens}, {self.stats()})"

    def stats(self) -> MemoryStats:
        """Count what is held. Constant time."""
        return MemoryStats(self._num_tokens, len(self._ages), len(self._answers))

    def remember(self, tenant: Hashable, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bool:
        """Keep an answer.

        Args:
            tenant: whose it is; None is a tenant like any other.
            token_ids: ``0 <= id < 2**31``, one dimension.

        Returns:
            Whether it is kept: not if it is empty or longer than `max_tokens`.
        """
        tokens = np.array(token_ids, dtype=np.int32)
        if not 0 < len(tokens) <= self.max_tokens:
            return False
        key = tokens.tobytes()
        if (tenant, key) in self._ages:
            self._forget(tenant, key)
        while self._num_tokens + len(tokens) > self.max_tokens:
            self._forget(*next(iter(self._ages)))
        self._ages[tenant, key] = None
        self._answers.setdefault(tenant, OrderedDict())[key] = tokens
        self._num_tokens += len(tokens)
        return True

    def recall(self, tenant: Hashable, max_tokens: int) -> TokenIds:
        """A text of this tenant's answers, the newest first, each of them whole: [n] int32, ``n <= max_tokens``.

        An answer that does not fit any more is left out, and so are all before it.
        """
        chosen: list[TokenIds] = []
        for tokens in reversed(self._answers.get(tenant, OrderedDict()).values()):
            max_tokens -= len(tokens)
            if max_tokens < 0:
                break
            chosen.append(tokens)
        return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int32)

    def _forget(self, tenant: Hashable, key: bytes) -> None:
        del self._ages[tenant, key]
        answers = self._answers[tenant]
        self._num_tokens -= len(answers.pop(key))
        if not answers:
            del self._answers[tenant]
