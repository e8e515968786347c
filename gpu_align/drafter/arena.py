"""`PredictionArena`: where in the device's memory each prediction lies. Bookkeeping on the host, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..ops.layout import PAGE

#: ``PREDICTION_BASE`` and what is computed from it are int32.
MAX_TOKENS = 2**31 - 1
#: The longest prediction: twice the distance of two of its positions is below `ops.match.COMMON_TIE`.
MAX_PREDICTION_LEN = 2**21 - 1


def tokens_for_all(max_predictions: int, max_len: int, page: int = PAGE) -> int:
    """Tokens of an arena that never refuses one of S predictions of up to `max_len` tokens.

    With n pages each it has ``(2 S - 1) n - S + 1`` pages: they are never moved, and S - 1 others with the S gaps
    of ``n - 1`` pages between them do not fill it.
    """
    pages = -(-max_len // page)
    return ((2 * max_predictions - 1) * pages - max_predictions + 1) * page


#: The tokens of a prediction, and its sharing key.
_Key = tuple[bytes, Hashable]


@dataclass(eq=False, slots=True)
class _Entry:
    """One prediction in the arena."""

    key: _Key = field(repr=False)  # a user's text
    pages: slice
    marks: bytes  # a 1 for each page
    num_users: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The consecutive pages that one request's prediction takes. Every `acquire` returns one of its own."""

    base: int  # where the prediction begins in the arena, in tokens: a multiple of the page; 0 if it is empty
    num_tokens: int  # of the prediction
    fresh: bool  # whether the caller has to upload the prediction and build its index
    entry: _Entry | None = None  # None: an empty prediction


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Use of an arena, in tokens of whole pages, and its counts since it was made."""

    used_tokens: int  # of predictions that requests use
    cached_tokens: int  # of predictions that no request uses any more, kept for one that comes back
    free_tokens: int  # of no prediction; the three together are the arena's `num_tokens`
    num_predictions: int  # different pairs of prediction and sharing key, used and cached; no empty ones
    reused: int  # acquires that found their prediction there
    evicted: int  # cached predictions dropped to make room
    refused: int  # acquires that found no room


class PredictionArena:
    """Shares one device buffer of `num_tokens` tokens, at least a page, out to predictions, in pages.

    ::

        extent = arena.acquire(tokens)
        if extent is None:
            ...                                  # no room: serve the request without its prediction
        elif extent.fresh:
            try:
                ...                              # upload to extent.base, build the index
            except BaseException:
                arena.discard(extent)
                raise
        ...                                      # steps that read the pages
        arena.release(extent)                    # once

    A prediction gets ``ceil(len / page)`` consecutive pages: the lowest run of free pages that is long enough.
    Equal predictions with equal sharing keys share their pages; neither the result nor the work of a call tells
    what is held under other keys. A prediction that no request uses any more stays, for one that comes back; if
    no free run is long enough, such ones are dropped, the one released longest ago first, until one is. One is
    refused only if dropping all of them would not make room, and then none is dropped. Pages in use are never
    moved: see `tokens_for_all`.

    Predictions are found by their tokens and the sharing key: 4 bytes a token on the host. (A digest would save
    that and takes 3 to 8 times as long.) Placement depends on the sequence of calls alone, so ranks that are told
    the same do the same. What is drafted must depend on neither `Extent.base` nor `Extent.fresh`.

    One CUDA stream: a step launched before `release` may still be reading pages that the next `acquire` hands
    out, and the upload follows it. `acquire` is linear in the tokens and in the pages. Not thread-safe.
    """

    def __init__(self, num_tokens: int, page: int = PAGE) -> None:
        num_pages = -(-num_tokens // page)
        self.page, self.num_tokens = page, num_pages * page
        # A byte a page, 1 where the page is free; and where no request uses it: what dropping all unused frees.
        self._free, self._not_in_use = (bytearray(b"\1" * num_pages) for _ in range(2))
        self._entries: dict[_Key, _Entry] = {}
        self._unused: OrderedDict[_Key, _Entry] = OrderedDict()  # the one released longest ago first
        self._reused = self._evicted = self._refused = 0

    def acquire(self, tokens: npt.NDArray[np.int32], sharing_key: Hashable = None) -> Extent | None:
        """Find or make a place for a prediction, until `release`; None if there is no room.

        tokens: [n] int32, may be empty. Read only; they may change afterwards.
        sharing_key: pages are shared with equal predictions of this key alone; None is a key like any other.
        """
        if not tokens.size:
            return Extent(base=0, num_tokens=0, fresh=False)
        key = tokens.tobytes(), sharing_key
        fresh = key not in self._entries
        entry = self._place(key, -(-tokens.size // self.page)) if fresh else self._entries[key]
        if entry is None:
            self._refused += 1
            return None
        self._reused += not fresh
        self._unused.pop(key, None)
        self._not_in_use[entry.pages] = bytes(len(entry.marks))
        entry.num_users += 1
        return Extent(entry.pages.start * self.page, tokens.size, fresh, entry)

    def has_room(
        self, tokens: npt.NDArray[np.int32], sharing_key: Hashable = None, without: Iterable[Extent] = ()
    ) -> bool:
        """Whether `acquire` would find or make a place for these tokens once `without` is released."""
        if not tokens.size or (tokens.tobytes(), sharing_key) in self._entries:
            return True
        room, users = self._not_in_use.copy(), Counter(extent.entry for extent in without)
        for entry, num_users in users.items():
            if entry is not None and entry.num_users == num_users:
                room[entry.pages] = entry.marks
        return b"\1" * -(-tokens.size // self.page) in room

    def release(self, extent: Extent) -> None:
        """The request is done with its extent. The prediction stays until its room is needed."""
        if (entry := extent.entry) is None:
            return
        entry.num_users -= 1
        if entry.num_users == 0:
            self._not_in_use[entry.pages] = entry.marks
            self._unused[entry.key] = entry

    def discard(self, extent: Extent) -> None:
        """Take back a fresh extent that could not be filled, and that no other request has got since. What was
        evicted for it stays evicted."""
        self.release(extent)
        if extent.entry is not None:
            self._drop(extent.entry)

    def stats(self) -> ArenaStats:
        """Count pages and calls."""
        free, not_in_use = (marks.count(1) * self.page for marks in (self._free, self._not_in_use))
        return ArenaStats(
            self.num_tokens - not_in_use, not_in_use - free, free, len(self._entries), self._reused,
            self._evicted, self._refused,
        )  # fmt: skip

    def _place(self, key: _Key, num_pages: int) -> _Entry | None:
        """Take the lowest free run of `num_pages`, after as few evictions as it takes."""
        run = b"\1" * num_pages
        if run not in self._not_in_use:
            return None
        while (start := self._free.find(run)) < 0:
            self._drop(next(iter(self._unused.values())))
            self._evicted += 1
        entry = self._entries[key] = _Entry(key, slice(start, start + num_pages), run)
        self._free[entry.pages] = bytes(num_pages)
        return entry

    def _drop(self, entry: _Entry) -> None:
        """Forget an unused prediction."""
        del self._unused[entry.key], self._entries[entry.key]
        self._free[entry.pages] = entry.marks
