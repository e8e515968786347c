"""What a `Drafter` keeps on the device, column by column. Host, kernels and references read it by these names.

Every tensor is int32 unless it says otherwise. S slots, T context capacity, A tokens of the arena.

====================  ====================  ==========================================================
tensor                shape                 holds
====================  ====================  ==========================================================
``text``              [A]                   tokens of all predictions, each at its ``TEXT_BASE``
``order``             [A]                   of each prediction the ends 1 … n − 1, by bucket, then by end
``first``             [A]                   of each prediction where in ``order`` each bucket begins
``about``             [S, `ABOUT`]          what the host says about a slot's request
``aligned``           [S, `ALIGNED`]        where the request stands
``row``               [S, `WINDOW`] int16   H of the LCS against the window behind the anchor
``edits``             [S, `EDITS`, `EDIT`]  what the output last put in place of what
``recent``            [S, buckets, `WAYS`]  latest ends of each token in the request's own context
====================  ====================  ==========================================================

An *end* is a place between two tokens: the end e of a text is behind its first e tokens.
"""

#: Columns of ``about``: the prediction's offset in the arena, its length, the shift of its index (32 less its
#: `index_bits`), where the request's output begins, and where the context begins that may be drafted from.
TEXT_BASE, TEXT_LEN, TEXT_SHIFT, OUTPUT_START, CONTEXT_START = range(5)
ABOUT = 8
#: `OUTPUT_START` of a slot without a request, `CONTEXT_START` where the context is not looked at.
VACANT = 2**31 - 1

#: Columns of ``aligned``: context tokens folded so far (-1: none, start over); 1 where the output follows the
#: prediction, 0 where it has left it; the prediction token that comes next if it follows; where it left the
#: prediction and at which output token; output tokens that followed; edits recorded.
SEEN, FOLLOWS, CURSOR, ANCHOR, LEFT_AT, FOLLOWED, NUM_EDITS = range(7)
ALIGNED = 8

#: Prediction tokens behind the anchor that a realignment looks at.
WINDOW = 256
#: The output is back in the prediction where its last `NEAR_MATCH` tokens stand within `NEAR` tokens of the
#: anchor, or, looked for at every `FAR_EVERY`-th output token, its last `FAR_MATCH` tokens stand anywhere.
NEAR, NEAR_MATCH = 32, 4
FAR_EVERY, FAR_MATCH = 8, 8
#: What a matching token weighs in the cursor's score; a skipped token of the prediction costs 1.
MATCH_WEIGHT = 4

#: Edits remembered, the most tokens of either side of one, and how many are replayed in one draft.
EDITS, MAX_EDIT, MAX_REPLAYS = 16, 16, 2
#: Columns of ``edits``: the tokens before, at and behind the place (the one before is `NO_EDIT` where there is no
#: edit any more), which output token is the first new one, and how many old and new tokens there are.
EDIT_BEFORE, EDIT_AT, EDIT_BEHIND, EDIT_START, EDIT_OLD, EDIT_NEW = range(6)
EDIT = 8
#: `EDIT_BEFORE` at the very beginning of the prediction, and of an edit that is none.
AT_START, NO_EDIT = -1, -2

#: Occurrences of a token in the prediction that are looked at, and in the context.
NEAREST = 32
WAYS = 16
#: Bucket of a token: the upper bits of its product with this, modulo 2**32.
HASH = 0x9E3779B1
#: Tokens of a page of the arena: predictions begin at multiples of it.
PAGE = 256


def index_bits(num_tokens: int) -> int:
    """log2 of the buckets of an index over `num_tokens` (a prediction's pages): at most half as many as tokens."""
    return max(1, num_tokens // 2).bit_length() - 1


def recent_bits(max_context_len: int) -> int:
    """log2 of the buckets of ``recent``: as many entries as the context has tokens, or up to twice as many."""
    return max(0, (max_context_len - 1) // WAYS).bit_length()
