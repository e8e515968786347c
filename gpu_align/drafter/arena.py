"""`PredictionArena` says where on the device a prediction lies, `Admission` how it and the slots get there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ..ops.index import BLOCK, admit, enter_contexts
from ..ops.layout import (
    MAX_END_TOKENS,
    NOWHERE,
    OUTPUT_START,
    PAGE,
    RULES_OF,
    SLOT_META,
    STAGED_ROW,
    STAGED_TEXT,
    TEXT_RULES,
    StepState,
    TextKind,
    index_bits,
    pack_rules,
    whole_pages,
)
from ..ops.recipes import ALL_PACKS

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
        """Count pages and calls."""
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


# What is on its way to the device.

#: Tokens that one round sends, where more than one text is staged.
ROUND_WORDS = 1 << 20
#: Columns of ``slot_meta`` of a vacant slot, and in a row that is staged of one.
_VACANT = (*[0] * OUTPUT_START, NOWHERE, *[0] * (SLOT_META - OUTPUT_START - 1))
_NO_ENDS = (-1,) * MAX_END_TOKENS


class _Half:
    """A half of the ring. On CUDA it is pinned, and written again once the kernels that read it are done."""

    def __init__(self, num_words: int, is_cuda: bool) -> None:
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self.array = self.words.numpy()
        self.read = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]


class Admission:
    """Rows of slots and predictions, written on the host; `flush` sends them, on the current stream.

    The last row that is staged for a slot counts, and a prediction that the arena dropped is not sent. So the
    device ends as if each call had been sent by itself. Sending is one kernel (see `admit`) and an event; more
    rounds where texts have more than `ROUND_WORDS` tokens together, of which the third waits for the first.

    Args:
        state: the drafter's.
        token_ids, total_len: its rows.
        context_shift: of `StepSettings`.
        longest: tokens of the longest prediction.
        backend: of the step.
        uses_context: whether any request drafts from its context.
    """

    def __init__(
        self,
        state: StepState,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        context_shift: int,
        longest: int,
        backend: str,
        uses_context: bool = True,
    ) -> None:
        self._state, self._context_shift, self._backend = state, context_shift, backend
        self._tokens = token_ids, total_len
        self._uses_context, self._longest, self._num_slots = uses_context, longest, len(state.slot_meta)
        #: The latest row of each slot that is occupied, and those that the device does not have yet.
        self._rows: dict[int, tuple[int, ...]] = {}
        self._staged: dict[int, tuple[int, ...]] = {}
        #: Contexts that the engine does not write itself, of slots that are staged.
        self._contexts: dict[int, npt.NDArray[np.int32]] = {}
        self._texts: list[ArenaText] = []
        self._ring: list[_Half] = []
        is_cuda = state.slot_meta.is_cuda
        #: 0 while the context of a slot's new request may have to be entered; the device says when it is.
        self._starts = torch.ones(self._num_slots, dtype=torch.int32, pin_memory=is_cuda)
        self._started = self._starts.numpy()
        self._is_parallel = backend == "triton" and uses_context
        #: Whether there is anything to do before a step.
        self.is_busy = False
        if is_cuda:
            self._make_ring()

    def occupy(
        self,
        slot: int,
        text: ArenaText,
        prompt_len: int,
        *,
        is_fresh: bool = False,
        recipe_packs: int = ALL_PACKS,
        kind: TextKind = TextKind.PREDICTION,
        is_hot: bool = False,
        end_tokens: Sequence[int] = (),
        context: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Give a slot to a request. is_fresh: its prediction has to be sent, unless the arena drops it first.
        context: its tokens so far; None: the engine writes them. Other arguments: columns of ``slot_meta``."""
        num_tokens = text.num_tokens
        if is_fresh and num_tokens:
            self._texts.append(text)
        ends = (*end_tokens, *_NO_ENDS)[:MAX_END_TOKENS] if end_tokens else _NO_ENDS
        self._rows[slot] = self._staged[slot] = (
            slot, 1, text.base, num_tokens, shift_of(num_tokens), prompt_len, self._uses_context, recipe_packs,
            pack_rules(RULES_OF[kind]), is_hot, *ends,
        )  # fmt: skip
        self._contexts.pop(slot, None)
        if context is not None:
            self._contexts[slot] = context
        self._started[slot] = 0
        self.is_busy = True

    def vacate(self, slot: int) -> None:
        """Nothing is drafted for the slot any more."""
        if self._rows.pop(slot, None):
            self._staged[slot] = slot, 1, *_VACANT
            self._contexts.pop(slot, None)
            self._started[slot] = 1
            self.is_busy = True

    def take_prediction(self, slot: int) -> None:
        """The slot's request has no prediction any more; what is known of its context stays."""
        _, is_new, *meta = self._rows[slot]
        meta[:OUTPUT_START], meta[TEXT_RULES] = (0, 0, shift_of(0)), pack_rules(RULES_OF[TextKind.PREDICTION])
        self._rows[slot] = self._staged[slot] = slot, is_new and slot in self._staged, *meta
        self.is_busy = True

    def enter_new(self, *batch: torch.Tensor) -> None:
        """After `flush`: enter the contexts of requests that are new in a batch, its slots and num_sampled."""
        self.is_busy = not self._started.all()
        if self.is_busy:
            self.enter(*batch)

    def enter(self, *batch: torch.Tensor) -> None:
        """Enter the contexts of the new requests in a batch, beyond what a step does as fast."""
        if self._is_parallel and self._tokens[0].shape[1] > BLOCK:
            enter_contexts(self._state, self._context_shift, self._starts, *self._tokens, *batch)
        else:
            self._started[:] = 1

    def flush(self) -> None:
        """Send what is staged. Does nothing where nothing is."""
        texts = [text for text in self._texts if text.is_held]
        while self._staged or texts:
            if not self._ring:
                self._make_ring()
            half = self._ring[0]
            if half.read is not None:
                half.read.synchronize()  # was recorded two rounds ago
            # Every table fits; of tokens as many as there is room for, those of rows first.
            room = len(half.array) - self._num_slots * (STAGED_ROW + STAGED_TEXT)
            sizes = [len(self._contexts.get(slot, ())) for slot in self._staged]
            rows = [slot for slot, end in zip(self._staged, accumulate(sizes), strict=True) if end <= room]
            _, *ends = accumulate((text.num_tokens for text in texts[: self._num_slots]), initial=sum(sizes))
            num_texts, longest, table = sum(end <= room for end in ends), 0, list[int]()
            end = len(rows) * STAGED_ROW + num_texts * STAGED_TEXT
            for slot in rows:
                start, num, tokens = end, -1, self._contexts.get(slot)
                if tokens is not None:
                    num, end = len(tokens), end + len(tokens)
                    half.array[start:end] = tokens
                table += *self._staged[slot], start, num
            for text in texts[:num_texts]:
                start, end, longest = end, end + text.num_tokens, max(longest, text.num_tokens)
                half.array[start:end] = text.tokens
                table += text.base, text.num_tokens, shift_of(text.num_tokens), start
            half.array[: len(table)] = table
            counts = len(rows), num_texts, longest, self._context_shift
            admit(self._state, *self._tokens, half.words, *counts, self._backend)
            if half.read is not None:
                half.read.record()
            self._ring.reverse()
            for slot in rows:
                del self._staged[slot]
                self._contexts.pop(slot, None)
            self._texts = texts = texts[num_texts:]

    def _make_ring(self) -> None:
        """On the CPU at the first flush, with one half."""
        is_cuda = self._state.slot_meta.is_cuda
        usual = min(ROUND_WORDS, self._state.prediction_tokens.numel())
        longest = max(self._longest, self._tokens[0].shape[1], usual)
        num_words = self._num_slots * (STAGED_ROW + STAGED_TEXT) + longest
        self._ring = [_Half(num_words, is_cuda) for _ in range(2 if is_cuda else 1)]

    def warm_up(self, *batch: torch.Tensor) -> None:
        """Compile or load the kernels of all that a batch may need, and run none."""
        if self._backend == "triton":
            admit(
                self._state, *self._tokens, self._starts, 0, 0, BLOCK + 1, self._context_shift, self._backend
            )
            enter_contexts(
                self._state, self._context_shift, self._starts, *self._tokens, *(x[:0] for x in batch)
            )


def shift_of(num_tokens: int) -> int:
    """The shift of the index of a prediction of so many tokens, see `bucket_of`."""
    return 32 - index_bits(whole_pages(num_tokens))
