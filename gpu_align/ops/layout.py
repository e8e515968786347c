"""The state of a drafter on its device, column by column, and the tuples in which the operations see it.

A *position* lies between two tokens: position p of a text follows its first p tokens, ``text[p]`` comes next.

Kernels take numbers from `ops.device`, which holds each as a ``tl.constexpr``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .rules import int32, int64, rule

if TYPE_CHECKING:
    import torch  # at run time only where tensors are made: predictors and skeletons need none

#: Columns of ``slot_meta``: the prediction's offset in the arena, its length, the shift of its index (32 less its
#: `index_bits`), where the request's output begins (`NOWHERE` in a vacant slot), 1 where its own context may be
#: drafted from, a bit for each recipe pack that it uses, its prediction's `TextRules` as one number, 1 where its
#: tokens are sampled at `HIGH_TEMPERATURE` or above, and the tokens that end it, -1 after the last.
(
    PREDICTION_BASE, PREDICTION_LEN, PREDICTION_SHIFT, OUTPUT_START, USES_CONTEXT, RECIPE_PACKS, TEXT_RULES,
    IS_HOT, END_TOKENS,
) = range(9)  # fmt: skip
#: End tokens of a slot; further ones are ignored.
MAX_END_TOKENS = 8
SLOT_META = END_TOKENS + MAX_END_TOKENS

#: Columns of ``align_state``: context tokens processed so far (0: none, start over; -1: of a new request), those
#: whose positions are in the context's index (-1: clear it first), edits recorded; then the fields of `Alignment`.
(
    SEEN, INDEXED, NUM_EDITS, IN_SYNC, CURSOR, ANCHOR, DIVERGED_AT, NUM_IN_SYNC, NUM_COMMON, LCS_ROW, ALIGN_STATE,
) = range(11)  # fmt: skip

#: What `add` and `remove` stage for the device, int32: rows of a slot, 1 where its request is new, its
#: ``slot_meta``, where the tokens of its context begin and how many these are, -1 where the engine writes them;
#: texts of `PREDICTION_BASE`, `PREDICTION_LEN`, `PREDICTION_SHIFT` and where the tokens begin.
STAGED_ROW, STAGED_TEXT = 4 + SLOT_META, 4

#: Edits remembered, edit number i in row ``i % MAX_EDITS``; and columns of ``edits``: the fields of `align.Edits`
#: from `at` to `seen_before`.
MAX_EDITS, EDIT = 16, 6

#: Tokens of a page of the arena: predictions begin at multiples of it.
PAGE = 256
#: Positions of a bucket of the context's index, and how many of a prediction's are compared for a match, those
#: around the cursor; the bucket of a token: the upper bits of its product with `HASH`, modulo 2**32.
WAYS, HASH = 16, 0x9E3779B1
#: Above every position and every key of 31 bits.
NOWHERE = 2**31 - 1
#: Ids of a prediction from here on are gaps: they stand for tokens that are not known. They are in no vocabulary:
#: no output token matches one, and a draft ends before it. No two of a text are equal, so that an edit is not
#: replayed at another gap.
FIRST_GAP = 2**31 - 2**16
#: Those from here on stand between whole texts (`texts.several`), the others in a skeleton.
FIRST_JOINT = 2**31 - 2**8


class Source(IntEnum):
    """The text that a draft was read from."""

    NONE = 0
    PREDICTION = 1
    #: The request's own prompt or output.
    CONTEXT = 2
    RECIPE = 3
    #: Earlier answers, given in place of a prediction.
    MEMORY = 4


#: As numbers for kernels, those that they tell apart.
TEXT_CONTEXT, TEXT_RECIPE = int(Source.CONTEXT), int(Source.RECIPE)


class TextKind(IntEnum):
    """The kind of text that a request brings as its prediction."""

    #: Of the answer: its beginning is drafted at once.
    PREDICTION = 0
    #: Earlier answers: nothing is drafted before the output has matched them.
    MEMORY = 1
    #: Of these, answers to requests like this one: drafts that are less likely are made, too.
    RELATED_MEMORY = 2
    #: What the request itself announces, with gaps: `gpu_align.texts.skeletons.kind_of`.
    SKELETON = 3


class TextRules(NamedTuple):
    """How drafts from a text count, and how they are limited."""

    source: Any  # `Source` of the drafts: PREDICTION, CONTEXT or MEMORY
    limits: Any  # the text's limits in the survival tables, from 0 to 7
    prior: Any  # output tokens that count as out of sync before the first


@rule
def unpack_rules(packed: int) -> TextRules:
    """The inverse of `pack_rules`."""
    return TextRules(packed & 7, (packed >> 3) & 7, packed >> 6)


def pack_rules(rules: TextRules) -> int:
    """The rules as one number; without limits and prior it is the source."""
    return int(rules.source + (rules.limits << 3) + (rules.prior << 6))


RULES_OF = {
    TextKind.PREDICTION: TextRules(Source.PREDICTION, limits=0, prior=0),
    TextKind.MEMORY: TextRules(Source.MEMORY, limits=0, prior=32),
    TextKind.RELATED_MEMORY: TextRules(Source.MEMORY, limits=1, prior=32),
    TextKind.SKELETON: TextRules(Source.MEMORY, limits=2, prior=32),
}


@rule
def bucket_of(token: int, shift: int) -> int:
    """The upper ``32 - shift`` bits of the token's product with `HASH`, modulo 2**32."""
    return int32(((int64(token) * HASH) & 0xFFFFFFFF) >> shift)


@rule
def num_ways(shift: int) -> int:
    """Entries of a context's index: `WAYS` for each of ``2 ** (32 - shift)`` buckets."""
    return (shift * 0 + WAYS) << (32 - shift)


def index_bits(num_tokens: int) -> int:
    """log2 of the buckets of an index over `num_tokens` (a prediction's pages): at most half as many as tokens."""
    return max(1, num_tokens // 2).bit_length() - 1


def context_index_bits(max_context_len: int) -> int:
    """log2 of the buckets of ``context_index``: as many ways as the context has tokens, or up to twice as many.

    And 512 buckets at least: in a short context frequent tokens would push out the others.
    """
    return max(9, ((max_context_len - 1) // WAYS).bit_length())


def whole_pages(num_tokens: int) -> int:
    """Tokens of the pages that a prediction of `num_tokens` takes, at least one page."""
    return max(-(-num_tokens // PAGE), 1) * PAGE


#: An array of integers.
IntArray = npt.NDArray[np.signedinteger[Any]]


# What the host holds: tensors, and their NumPy views.


def as_arrays(tuple_of_tensors: Any) -> Any:
    """A named tuple of tensors and numbers with NumPy's views of the tensors, which are on the CPU."""
    views = (value.numpy() if hasattr(value, "numpy") else value for value in tuple_of_tensors)
    return type(tuple_of_tensors)(*views)


class StepState(NamedTuple):
    """All that a drafter keeps on the device, int32; the columns are above. S slots, A tokens of the arena."""

    prediction_tokens: torch.Tensor  # [A]: tokens of all predictions, each at its `PREDICTION_BASE`
    positions: torch.Tensor  # [A]: of each prediction the positions 1 … n − 1, by bucket
    offsets: torch.Tensor  # [A]: of each prediction where each bucket begins (CSR)
    slot_meta: torch.Tensor  # [S, `SLOT_META`]: what the host says about a slot's request
    align_state: torch.Tensor  # [S, `ALIGN_STATE`]: where the output stands in the prediction
    edits: torch.Tensor  # [S, `MAX_EDITS`, `EDIT`]: what the output last put in place of what
    context_index: torch.Tensor  # [S, buckets, `WAYS`]: latest positions of each token in a request's context


def allocate_state(
    max_slots: int, max_context_len: int, num_tokens: int, device: torch.device | str
) -> StepState:
    """State of `max_slots` vacant slots and an arena of `num_tokens` tokens."""
    import torch

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slot_meta, align_state = zeros(max_slots, SLOT_META), zeros(max_slots, ALIGN_STATE)
    slot_meta[:, OUTPUT_START] = NOWHERE
    align_state[:, :NUM_EDITS] = -1
    return StepState(
        zeros(num_tokens), zeros(num_tokens), zeros(num_tokens), slot_meta, align_state,
        zeros(max_slots, MAX_EDITS, EDIT), zeros(max_slots, 1 << context_index_bits(max_context_len), WAYS),
    )  # fmt: skip


class StepSettings(NamedTuple):
    """The settings of a step: values that are not read from tensors."""

    length_quarters: int  #: drafts for each four tokens of matched suffix
    min_match: int  #: shortest match, 1 to 64
    vocab_size: int  #: a draft ends before the first token that is not below it
    context_shift: int  #: of the context's index: the shift of `bucket_of`


class Draft(NamedTuple):
    """Draft tokens of a batch. The caller may write to the tensors; the next call rewrites them."""

    #: [B, K] int64: from `length` on, the last token of the context. ``0 <= token < vocab_size``.
    token_ids: torch.Tensor
    #: [B] int32, ``0 <= length <= K``: how many of them are meant.
    length: torch.Tensor
    #: [B, K] float32, ``0 < p <= 1``: estimated probability that a draft is accepted given that those before
    #: it were; 0 from `length` on.
    confidence: torch.Tensor
    #: [B] int8: a `Source`; NONE where `length` is 0.
    source: torch.Tensor


def allocate_draft(batch_size: int, num_draft_tokens: int, device: torch.device | str) -> Draft:
    """Output tensors of a step with this batch size and K."""
    import torch

    return Draft(
        token_ids=torch.zeros((batch_size, num_draft_tokens), dtype=torch.int64, device=device),
        length=torch.zeros(batch_size, dtype=torch.int32, device=device),
        confidence=torch.zeros((batch_size, num_draft_tokens), dtype=torch.float32, device=device),
        source=torch.zeros(batch_size, dtype=torch.int8, device=device),
    )


# One request, as the operations see it. In a kernel arrays are pointers, and numbers are tensors.


class PredictionIndex(NamedTuple):
    """The positions of a prediction by token."""

    positions: Any  # [length - 1] int32 or longer: positions by bucket
    offsets: Any  # [buckets + 1] int32 or longer: where each bucket begins
    shift: Any  # of `bucket_of`


class ContextIndex(NamedTuple):
    """The latest positions of a context by token."""

    ways: Any  # [buckets, WAYS] int32, -1 for none
    shift: Any  # of `bucket_of`


class SourceText(NamedTuple):
    """A text that drafts are read from."""

    tokens: Any  # [length] int32
    length: Any  # 0: nothing is drafted from it
    index: Any  # `PredictionIndex` or `ContextIndex`
    rules: TextRules


class Request(NamedTuple):
    """One request of a batch: its tokens so far, its texts, and its slot's rows of the state."""

    tokens: Any  # [total] int32: prompt and output
    total: Any
    last: Any  # its last token; 0 without any
    output_start: Any  # tokens of the prompt
    prediction: Any  # `SourceText`
    context: Any  # `SourceText`: prompt and output, where drafts may come from them
    packs: Any  # a bit for each recipe pack that it uses
    meta: Any  # [SLOT_META] int32
    align_state: Any  # [ALIGN_STATE] int32
    edits: Any  # [MAX_EDITS, EDIT] int32


class Alignment(NamedTuple):
    """The alignment of a request's output with its prediction."""

    in_sync: Any  # 1 while the output is in sync with the prediction, 0 after it diverged
    cursor: Any  # position of the prediction that comes next
    anchor: Any  # position of the prediction where the output diverged
    diverged_at: Any  # and of the output
    num_in_sync: Any  # output tokens that were in sync
    # While in sync, tokens before the cursor that are known to be the output's last, at most `align.MAX_COMMON`.
    num_common: Any
    lcs_row: Any  # after it diverged: see `align.extend_row`
