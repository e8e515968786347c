"""`Admission`: how slots and predictions get to the device."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ..ops import layout
from ..ops.choose import SAMPLES
from ..ops.index import BLOCK, admit, enter_contexts
from ..ops.layout import RULES_OF, STAGED_ROW, STAGED_TEXT, StepState, TextKind, TextRules, pack_rules
from .arena import ArenaText
from .survival import SAMPLED_FROM

#: Tokens that one round sends, where more than one text is staged; and rounds on a GPU of which none waits: two of
#: a step while the GPU is still in the step before.
ROUND_WORDS, RING = 1 << 20, 3
#: Columns of ``slot_meta`` of a vacant slot, and in a row that is staged of one.
_VACANT = (1, *[0] * layout.OUTPUT_START, layout.NOWHERE, *[0] * (layout.SLOT_META - layout.OUTPUT_START - 1))
_NO_ENDS = (-1,) * layout.MAX_END_TOKENS


class _Part:
    """A part of the ring. On CUDA it is pinned, and written again once the kernels that read it are done."""

    def __init__(self, num_words: int, is_cuda: bool) -> None:
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self.array = self.words.numpy()
        self.read = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]


def rules_of(kind: TextKind, token_ids: npt.NDArray[np.integer], temperature: float) -> TextRules:
    """The rules of a request's text. A prediction with joints is several (`texts.several`)."""
    rules, number = RULES_OF[kind], bisect(SAMPLED_FROM, temperature)
    is_sampled = number > 0 and kind == TextKind.PREDICTION and token_ids.max(initial=0) >= layout.FIRST_JOINT
    # With a prior the beginning of one sample is no exact prefix.
    return rules._replace(limits=SAMPLES + number - 1, prior=1) if is_sampled else rules


class Admission:
    """Rows of slots and predictions, written on the host; `flush` sends them, on the current stream.

    The last row that is staged for a slot counts, and a prediction that the arena dropped is not sent. So the
    device ends as if each call had been sent by itself. Sending is one kernel (see `admit`) and an event; more
    rounds where texts have more than `ROUND_WORDS` tokens together, of which the fourth waits for the first.

    state, token_ids, total_len: the drafter's. context_shift, backend: of its step. longest: tokens of the longest
    prediction. uses_context: whether any request drafts from its context.
    """

    def __init__(
        self,
        state: StepState,
        token_ids: torch.Tensor,
        total_len: torch.Tensor,
        context_shift: int,
        longest: int,
        backend: str,
        uses_context: bool,
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
        self._ring: list[_Part] = []
        is_cuda = state.slot_meta.is_cuda
        #: 0 while the context of a slot's new request may have to be entered; the device says when it is.
        self._starts = torch.ones(self._num_slots, dtype=torch.int32, pin_memory=is_cuda)
        self._started = self._starts.numpy()
        self._start_of = self._started.data  # the same: it takes single values in a quarter of the time
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
        is_fresh: bool,
        recipe_packs: int,
        rules: TextRules,
        is_hot: bool = False,
        end_tokens: Sequence[int] = (),
        context: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Give a slot to a request. is_fresh: its prediction has to be sent, unless the arena drops it first.
        context: its tokens so far; None: the engine writes them. Other arguments: columns of ``slot_meta``."""
        num_tokens = text.num_tokens
        if is_fresh and num_tokens:
            self._texts.append(text)
        ends = (*end_tokens, *_NO_ENDS)[: layout.MAX_END_TOKENS] if end_tokens else _NO_ENDS
        self._rows[slot] = self._staged[slot] = (
            1, text.base, num_tokens, shift_of(num_tokens), prompt_len, self._uses_context, recipe_packs,
            pack_rules(rules), is_hot, *ends,
        )  # fmt: skip
        self._contexts.pop(slot, None)
        if context is not None:
            self._contexts[slot] = context
        self._start_of[slot] = 0
        self.is_busy = True

    def vacate(self, slot: int) -> None:
        """Nothing is drafted for the slot any more."""
        if self._rows.pop(slot, None):
            self._staged[slot] = _VACANT
            self._contexts.pop(slot, None)
            self._start_of[slot] = 1
            self.is_busy = True

    def take_prediction(self, slot: int) -> None:
        """The slot's request has no prediction any more; what is known of its context stays."""
        is_new, *meta = self._rows[slot]
        meta[: layout.OUTPUT_START] = 0, 0, shift_of(0)
        meta[layout.TEXT_RULES] = pack_rules(RULES_OF[TextKind.PREDICTION])
        self._rows[slot] = self._staged[slot] = is_new and slot in self._staged, *meta
        self.is_busy = True

    def enter_new(self, *batch: torch.Tensor) -> None:
        """After `flush`: enter the contexts of requests that are new in a batch, its slots and num_sampled."""
        self.is_busy = not self._started.all()
        if self.is_busy and self._is_parallel and self._tokens[0].shape[1] > BLOCK:
            enter_contexts(self._state, self._context_shift, self._starts, *self._tokens, *batch)
        else:  # a step does it as fast
            self._started[:] = 1

    def flush(self) -> None:
        """Send what is staged."""
        texts = [text for text in self._texts if text.is_held]
        while self._staged or texts:
            if not self._ring:
                self._make_ring()
            part = self._ring[0]
            if part.read is not None:
                part.read.synchronize()  # was recorded `RING` rounds ago
            # Every table fits; of tokens as many as there is room for, those of rows first.
            room = len(part.array) - self._num_slots * (STAGED_ROW + STAGED_TEXT)
            sizes = [len(self._contexts.get(slot, ())) for slot in self._staged]
            rows = [slot for slot, end in zip(self._staged, accumulate(sizes), strict=True) if end <= room]
            _, *ends = accumulate((text.num_tokens for text in texts[: self._num_slots]), initial=sum(sizes))
            num_texts, longest, table = sum(end <= room for end in ends), 0, list[int]()
            end = len(rows) * STAGED_ROW + num_texts * STAGED_TEXT
            for slot in rows:
                start, num, tokens = end, -1, self._contexts.get(slot)
                if tokens is not None:
                    num, end = len(tokens), end + len(tokens)
                    part.array[start:end] = tokens
                table += slot, *self._staged[slot], start, num
            for text in texts[:num_texts]:
                start, end, longest = end, end + text.num_tokens, max(longest, text.num_tokens)
                part.array[start:end] = text.tokens
                table += text.base, text.num_tokens, shift_of(text.num_tokens), start
            part.array[: len(table)] = table
            counts = len(rows), num_texts, longest, self._context_shift
            admit(self._state, *self._tokens, part.words, *counts, self._backend)
            if part.read is not None:
                part.read.record()
            self._ring.append(self._ring.pop(0))
            for slot in rows:
                del self._staged[slot]
                self._contexts.pop(slot, None)
            self._texts = texts = texts[num_texts:]

    def _make_ring(self) -> None:
        """On the CPU at the first flush, with one part."""
        is_cuda = self._state.slot_meta.is_cuda
        usual = min(ROUND_WORDS, self._state.prediction_tokens.numel())
        longest = max(self._longest, self._tokens[0].shape[1], usual)
        num_words = self._num_slots * (STAGED_ROW + STAGED_TEXT) + longest
        self._ring = [_Part(num_words, is_cuda) for _ in range(RING if is_cuda else 1)]

    def warm_up(self, *batch: torch.Tensor) -> None:
        """Compile or load the kernels of all that a batch may need, and run none."""
        if self._backend == "triton":
            counts, none = (0, 0, BLOCK + 1, self._context_shift), (tensor[:0] for tensor in batch)
            admit(self._state, *self._tokens, self._starts, *counts, self._backend)
            enter_contexts(self._state, self._context_shift, self._starts, *self._tokens, *none)


def shift_of(num_tokens: int) -> int:
    """The shift of the index of a prediction of so many tokens, see `bucket_of`."""
    return 32 - layout.index_bits(layout.whole_pages(num_tokens))
