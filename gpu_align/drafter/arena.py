"""`PredictionArena`: where on the device each prediction lies."""

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


@dataclass(eq=False, slots=True)
class ArenaText:
    """A prediction, see `PredictionArena.find`."""

    key: tuple[bytes, Hashable] = field(repr=False)  # its tokens, a user's, and its sharing key
    num_tokens: int
    marks: bytes = field(repr=False)  # a 1 for each of its pages
    base: int = 0  # where it begins in the arena, in tokens: a multiple of the page
    pages: slice = field(init=False, repr=False)  # of it, while it is held
    num_users: int = 0
    is_held: bool = False  # whether it has pages

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[num_tokens], read only."""
        return np.frombuffer(self.key[0], np.int32)


#: For a request without a prediction.
NO_TEXT = ArenaText((b"", None), 0, b"")


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Use of an arena, in tokens of whole pages, and its counts since it was made."""

    used_tokens: int  # of predictions that requests use
    cached_tokens: int  # of predictions that no request uses any more, kept for one that comes back
    free_tokens: int  # of no prediction; the three together are the arena's `num_tokens`
    num_predictions: int  # different pairs of prediction and sharing key, used and cached; no empty ones
    reused: int  # predictions taken that were there
    evicted: int  # cached predictions dropped to make room
    refused: int  # predictions that found no room


class PredictionArena:
    """Shares one device buffer of `num_tokens` tokens, at least a page, out to predictions, in pages.

    ::

        text = arena.find(tokens)
        is_new = not text.is_held
        if not arena.take(text):
            ...                                  # no room: serve the request without its prediction
        elif is_new:
            ...                                  # upload it to text.base, build its index
        ...                                      # steps that read the pages
        arena.release(text)                      # once

    A prediction gets ``ceil(len / page)`` consecutive pages: the lowest run of free pages that is long enough.
    Equal predictions with equal sharing keys share their pages; neither the result nor the work of a call tells
    what is held under other keys. A prediction that no request uses any more stays, for one that comes back; if
    no free run is long enough, such ones are dropped, the one released longest ago first, until one is. One is
    refused only if dropping all of them would not make room, and then none is dropped. Pages in use are never
    moved: see `tokens_for_all`.

    Predictions are found by their tokens and the sharing key: 4 bytes a token on the host. (A digest would save
    that and takes 3 to 8 times as long.) Placement depends on the sequence of calls alone, so ranks that are told
    the same do the same. What is drafted must not depend on `ArenaText.base`.

    One CUDA stream: a step launched before `release` may still be reading pages that the next `take` hands out,
    and the upload follows it. `find` is linear in the tokens, `take` in the pages. Not thread-safe.
    """

    def __init__(self, num_tokens: int, page: int = PAGE) -> None:
        num_pages = -(-num_tokens // page)
        self.page, self.num_tokens = page, num_pages * page
        # A byte a page, 1 where the page is free; and where no request uses it: what dropping all unused frees.
        self._free, self._not_in_use = (bytearray(b"\1" * num_pages) for _ in range(2))
        self._texts: dict[tuple[bytes, Hashable], ArenaText] = {}
        self._unused: OrderedDict[ArenaText, None] = OrderedDict()  # the one released longest ago first
        self._reused = self._evicted = self._refused = 0

    def find(self, tokens: npt.NDArray[np.int32], sharing_key: Hashable = None) -> ArenaText:
        """The equal prediction of this key that is held, or one without pages. Nothing changes.

        tokens: [n] int32, may be empty. Read only; they may change afterwards.
        sharing_key: pages are shared with equal predictions of this key alone; None is a key like any other. Its
            ``__eq__`` runs here.
        """
        key, num_tokens = (tokens.tobytes(), sharing_key), len(tokens)
        return self._texts.get(key) or ArenaText(key, num_tokens, b"\1" * -(-num_tokens // self.page))

    def take(self, text: ArenaText) -> bool:
        """Give a prediction to one more request, until `release`; False if there is no room for it. Until then
        nothing else may happen to the arena since `find` but `release`."""
        if not text.num_tokens:
            return True
        if text.is_held:
            self._reused += 1
            if not text.num_users:
                del self._unused[text]
        elif not self._place(text):
            self._refused += 1
            return False
        if not text.num_users:
            self._not_in_use[text.pages] = bytes(len(text.marks))
        text.num_users += 1
        return True

    def has_room(self, text: ArenaText, without: Iterable[ArenaText] = ()) -> bool:
        """Whether `take` would succeed once `without` is released."""
        if text.is_held or not text.num_tokens:
            return True
        room = self._not_in_use.copy()
        for other, num_users in Counter(without).items():
            if other.num_users == num_users:
                room[other.pages] = other.marks
        return text.marks in room

    def release(self, text: ArenaText) -> None:
        """A request is done with its prediction, which stays until its room is needed."""
        if text.num_tokens:
            text.num_users -= 1
            if text.num_users == 0:
                self._not_in_use[text.pages] = text.marks
                self._unused[text] = None

    def stats(self) -> ArenaStats:
        free, not_in_use = (marks.count(1) * self.page for marks in (self._free, self._not_in_use))
        return ArenaStats(
            self.num_tokens - not_in_use, not_in_use - free, free, len(self._texts), self._reused,
            self._evicted, self._refused,
        )  # fmt: skip

    def _place(self, text: ArenaText) -> bool:
        """Take the lowest free run of pages that is long enough, after as few evictions as it takes."""
        if text.marks not in self._not_in_use:
            return False
        while (start := self._free.find(text.marks)) < 0:
            oldest, _ = self._unused.popitem(last=False)
            oldest.is_held = False
            del self._texts[oldest.key]
            self._free[oldest.pages] = oldest.marks
            self._evicted += 1
        text.base, text.pages, text.is_held = start * self.page, slice(start, start + len(text.marks)), True
        self._texts[text.key] = text
        self._free[text.pages] = bytes(len(text.marks))
        return True
