"""`PredictionArena`: where in the device's memory each prediction lies. Bookkeeping on the host, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .ops.layout import PAGE

#: ``PREDICTION_BASE`` and what is computed from it are int32.
MAX_TOKENS = 2**31 - 1


def tokens_for_all(max_predictions: int, max_len: int, page: int = PAGE) -> int:
    """Tokens of an arena that never refuses one of S predictions of up to `max_len` tokens.

    With n pages each it has ``(2 S - 1) n - S + 1`` pages: they are never moved, and S - 1 others with the S gaps
    of ``n - 1`` pages between them do not fill it.
    """
    pages = -(-max_len // page)
    return ((2 * max_predictions - 1) * pages - max_predictions + 1) * page


def check_sharing_key(sharing_key: Hashable) -> None:
    """Raise `TypeError` unless it is hashable."""
    try:
        hash(sharing_key)
    except TypeError:
        found = type(sharing_key).__name__
        raise TypeError(f"sharing_key: expected a hashable value, found {found}") from None


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The consecutive pages that one request's prediction takes. Every `acquire` returns one of its own."""

    base: int  # where the prediction begins in the arena, in tokens: a multiple of the page; 0 if it is empty
    num_tokens: int  # of the prediction
    capacity: int  # tokens of its pages, ``ceil(num_tokens / page) * page``
    fresh: bool  # whether the caller has to upload the prediction and build its index


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
    """Shares one device buffer of `num_tokens` tokens out to predictions, in pages.

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
        arena.release(extent)

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

    Args:
        num_tokens: of the buffer, at least one page; the attribute `num_tokens` is rounded up to whole pages.
        page: tokens of a page.

    Raises:
        ValueError: a page below 1, less than one page of tokens, or more tokens than int32 can address.
    """

    def __init__(self, num_tokens: int, page: int = PAGE) -> None:
        if page < 1:
            raise ValueError(f"page: expected 1 or more, found {page}")
        num_pages = -(-num_tokens // page)
        if num_tokens < page or num_pages * page > MAX_TOKENS:
            most = MAX_TOKENS // page * page
            raise ValueError(f"num_tokens: expected {page} (one page) to {most}, found {num_tokens}")
        self.page = page
        self.num_tokens = num_pages * page
        # A byte a page, 1 where the page is free; and where no request uses it: what dropping all unused frees.
        self._free, self._not_in_use = (bytearray(b"\1" * num_pages) for _ in range(2))
        self._entries: dict[_Key, _Entry] = {}
        self._unused: OrderedDict[_Key, _Entry] = OrderedDict()  # the one released longest ago first
        self._extents: dict[Extent, _Entry | None] = {}  # in use; None: of an empty prediction
        self._held_pages = self._used_pages = 0
        self._reused = self._evicted = self._refused = 0

    def acquire(self, tokens: npt.NDArray[np.int32], sharing_key: Hashable = None) -> Extent | None:
        """Find or make a place for a prediction, until `release`; None if there is no room.

        tokens: [n] int32, may be empty. Read only; they may change afterwards. TypeError, ValueError otherwise.
        sharing_key: pages are shared with equal predictions of this key alone; None is a key like any other.
        """
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
            found = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__name__
            raise TypeError(f"tokens: expected an array of int32, found {found}")
        if tokens.ndim != 1:
            raise ValueError(f"tokens: expected 1 dimension, found {tokens.ndim}")
        check_sharing_key(sharing_key)
        if not tokens.size:
            extent = Extent(base=0, num_tokens=0, capacity=0, fresh=False)
            self._extents[extent] = None
            return extent
        key = tokens.tobytes(), sharing_key
        entry = self._entries.get(key)
        fresh = entry is None
        if entry is None:
            num_pages = -(-tokens.size // self.page)
            start = self._make_room(num_pages)
            if start is None:
                self._refused += 1
                return None
            entry = self._entries[key] = _Entry(key, slice(start, start + num_pages), num_pages)
            self._free[entry.pages] = bytes(num_pages)
            self._held_pages += num_pages
        else:
            self._reused += 1
        if entry.num_users == 0:
            self._unused.pop(key, None)
            self._not_in_use[entry.pages] = bytes(entry.num_pages)
            self._used_pages += entry.num_pages
        entry.num_users += 1
        extent = Extent(entry.pages.start * self.page, tokens.size, entry.num_pages * self.page, fresh)
        self._extents[extent] = entry
        return extent

    def has_room(
        self, tokens: npt.NDArray[np.int32], sharing_key: Hashable = None, without: Iterable[Extent] = ()
    ) -> bool:
        """Whether `acquire` would find or make a place for these tokens once `without` is released."""
        if not tokens.size or (tokens.tobytes(), sharing_key) in self._entries:
            return True
        room, users = self._not_in_use.copy(), Counter(self._entry_of(extent) for extent in without)
        for entry, num_users in users.items():
            if entry is not None and entry.num_users == num_users:
                room[entry.pages] = b"\1" * entry.num_pages
        return b"\1" * -(-tokens.size // self.page) in room

    def release(self, extent: Extent) -> None:
        """The request is done with its extent, or ValueError. The prediction stays until its room is needed."""
        entry = self._entry_of(extent)
        del self._extents[extent]
        if entry is None:
            return
        entry.num_users -= 1
        if entry.num_users == 0:
            self._not_in_use[entry.pages] = b"\1" * entry.num_pages
            self._used_pages -= entry.num_pages
            self._unused[entry.key] = entry

    def discard(self, extent: Extent) -> None:
        """Take back a fresh extent that could not be filled. What was evicted for it stays evicted.

        ValueError: the extent is not in use, is not fresh, or has been shared since.
        """
        entry = self._entry_of(extent)
        if entry is None or not extent.fresh or entry.num_users > 1:
            raise ValueError(f"extent: expected a fresh one with one user, found {extent}")
        self.release(extent)
        self._drop(entry)

    def stats(self) -> ArenaStats:
        """Constant time."""
        held, used = self._held_pages * self.page, self._used_pages * self.page
        return ArenaStats(
            used, held - used, self.num_tokens - held, len(self._entries), self._reused, self._evicted,
            self._refused,
        )  # fmt: skip

    def _entry_of(self, extent: Extent) -> _Entry | None:
        if extent not in self._extents:
            raise ValueError(f"extent: expected one in use, found {extent}")
        return self._extents[extent]

    def _make_room(self, num_pages: int) -> int | None:
        """First page of the lowest free run of `num_pages`, after as few evictions as it takes."""
        run = b"\1" * num_pages
        if run not in self._not_in_use:
            return None
        while (start := self._free.find(run)) < 0:
            self._drop(next(iter(self._unused.values())))
            self._evicted += 1
        return start

    def _drop(self, entry: _Entry) -> None:
        """Forget an unused prediction."""
        del self._unused[entry.key], self._entries[entry.key]
        self._free[entry.pages] = b"\1" * entry.num_pages
        self._held_pages -= entry.num_pages


#: The tokens of a prediction, and its sharing key.
_Key = tuple[bytes, Hashable]


@dataclass(eq=False, slots=True)
class _Entry:
    """One prediction in the arena."""

    key: _Key = field(repr=False)  # a user's text
    pages: slice
    num_pages: int
    num_users: int = 0
