"""Every number that kernels and references share: columns of what a `Drafter` keeps, and sizes of the algorithms.

Kernels read the same names from `ops.kernels.constexprs`. Every state tensor is int32 unless it says otherwise.
S slots, T context capacity, A tokens of the arena.

=====================  ============================  ======================================================
tensor                 shape                         holds
=====================  ============================  ======================================================
``prediction_tokens``  [A]                           tokens of all predictions, each at its `PREDICTION_BASE`
``positions``          [A]                           of each prediction the positions 1 … n − 1, by bucket
``offsets``            [A]                           of each prediction where each bucket begins (CSR)
``slot_meta``          [S, `SLOT_META`]              what the host says about a slot's request
``align_state``        [S, `ALIGN_STATE`]            where the output stands in the prediction
``lcs_row``            [S, `WINDOW`] int16           LCS lengths against the window behind the anchor
``edits``              [S, `MAX_EDITS`, `EDIT`]      what the output last put in place of what
``context_index``      [S, buckets, `WAYS`]          latest positions of each token in the request's context
=====================  ============================  ======================================================

A *position* lies between two tokens: position p of a text is behind its first p tokens, ``text[p]`` comes next.
"""

#: Columns of ``slot_meta``: the prediction's offset in the arena, its length, the shift of its index (32 less its
#: `index_bits`), where the request's output begins, where the context begins that may be drafted from, a bit for
#: each recipe pack that the request uses, and what its prediction is, one of the text kinds below.
(
    PREDICTION_BASE, PREDICTION_LEN, PREDICTION_SHIFT, OUTPUT_START, CONTEXT_START, RECIPE_PACKS, TEXT_KIND,
) = range(7)  # fmt: skip
SLOT_META = 8
#: Text kinds of a prediction: a client's, earlier answers, earlier answers to requests like this one, whose drafts
#: the second half of the tables limits.
TEXT_PREDICTION, TEXT_MEMORY, TEXT_RELATED_MEMORY = range(3)
#: `OUTPUT_START` of a slot without a request, `CONTEXT_START` where the context is not drafted from.
VACANT = 2**31 - 1

#: Columns of ``align_state``: context tokens processed so far (-1: none, start over); 1 while the output is in
#: sync with the prediction, 0 after it diverged; the next prediction token while in sync; the prediction position
#: and the output position where it diverged; output tokens that were in sync; edits recorded; how many tokens
#: before the cursor are known to be the last of the output, at most `MAX_MATCH`, while in sync.
SEEN, IN_SYNC, CURSOR, ANCHOR, DIVERGED_AT, NUM_IN_SYNC, NUM_EDITS, NUM_COMMON = range(8)
ALIGN_STATE = 8

#: Bits of a word of the LCS row, tokens behind the anchor that the row covers, and its words, a lane each.
WORD, WINDOW = 8, 256
ROW_WORDS = WINDOW // WORD
EVERY_BIT = (1 << WORD) - 1
#: Keys of one score in `cursor_score`, where a position of the window is 0 to `WINDOW`.
J_KEYS = 2 * WINDOW
#: What a matching token adds to the cursor's score; a skipped token of the prediction costs 1.
MATCH_WEIGHT = 4
#: The output is in sync again where its last `LOCAL_MATCH` tokens end within `LOCAL_RANGE` positions of the
#: anchor, or, checked at every `GLOBAL_EVERY`-th output token, its last `GLOBAL_MATCH` tokens end anywhere.
LOCAL_RANGE, LOCAL_MATCH = 32, 4
GLOBAL_EVERY, GLOBAL_MATCH = 8, 8
#: Tokens of a diverged output among which a kernel looks at once, a lane each, and those of a turn of its loop.
SPAN, TURN = LOCAL_RANGE, 4
#: Tokens in sync that a kernel compares at once; also the longest common end of an edit's two sides.
RUN = 64

#: Edits remembered, the most tokens of either side of one, and how many are replayed in one draft.
MAX_EDITS, MAX_EDIT_LEN, MAX_REPLAYS = 16, 16, 2
#: Columns of ``edits``: the key, which is the tokens before, at and behind the edit's position (the one before is
#: `NO_EDIT` where there is no edit any more), the output position of the first new token, the number of old and of
#: new tokens, and 1 where an edit with the same key was remembered when this one was made.
EDIT_BEFORE, EDIT_AT, EDIT_BEHIND, EDIT_START, EDIT_OLD, EDIT_NEW, EDIT_SEEN_BEFORE = range(7)
EDIT = 8
#: `EDIT_BEFORE` at the beginning of the prediction, and of an entry without an edit.
AT_START, NO_EDIT = -1, -2
#: Positions whose keys a kernel compares with all edits at once.
EDIT_LOOKUPS = 32

#: Bucket of a token: the upper bits of its product with this, modulo 2**32.
HASH = 0x9E3779B1
#: Occurrences of a token that are compared: in the prediction those around the anchor, in the context the latest.
NEAREST, WAYS = 32, 16
#: A longer match counts as this long.
MAX_MATCH = 64
#: The order of matches is one key of 31 bits: ``(length - 1) * TIE`` plus the tie order, which is below `TIE`.
TIE = 1 << 25
#: Above every position and every key.
NOWHERE = 2**31 - 1
#: Tokens of a page of the arena: predictions begin at multiples of it.
PAGE = 256

#: Candidates: the best matches in the prediction, then the positions around the cursor, then the best matches in
#: the context.
NUM_MATCHES = 4
CURSOR_BEHIND, CURSOR_AHEAD = 2, 16
AT_CURSOR = NUM_MATCHES + CURSOR_BEHIND
FIRST_CONTEXT = NUM_MATCHES + CURSOR_BEHIND + 1 + CURSOR_AHEAD
NUM_CANDIDATES = FIRST_CONTEXT + NUM_MATCHES
#: Lanes of a kernel for the candidates, and for the occurrences among which it looks for matches.
LANES, LOOKUP_LANES = 32, 64
#: Matched length -> bucket: the first length of each bucket; bucket 0 is "nothing matched".
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
#: Margin -> bucket likewise; bucket 0 is "a match that disagrees is four or more tokens longer".
MARGIN_EDGES = (-3, -1, 0, 1, 2, 3, 5, 9, 17)
NUM_LENGTHS, NUM_MARGINS = len(LENGTH_EDGES) + 1, len(MARGIN_EDGES) + 1
#: Alignment buckets: at the cursor; 1 ahead; around the cursor with a score deficit up to `SMALL_DEFICIT`, up to
#: `MEDIUM_DEFICIT`, above; elsewhere up to `LARGE_DEFICIT`, above; in the context.
(
    ALIGNMENT_AT_CURSOR, ALIGNMENT_NEXT, ALIGNMENT_SMALL, ALIGNMENT_MEDIUM, ALIGNMENT_NEAR,
    ALIGNMENT_LARGE, ALIGNMENT_FAR, ALIGNMENT_CONTEXT, NUM_ALIGNMENTS,
) = range(9)  # fmt: skip
SMALL_DEFICIT, MEDIUM_DEFICIT, LARGE_DEFICIT = 2, 5, 16
#: Score deficit of a position before the cursor while in sync, beside the distance; and outside of the LCS row.
BACKWARD_DEFICIT, NO_SCORE = 2, 99
#: Adherence: the share of the output that was in sync: below 1/`LOST_SHARE`, below 1/`LOOSE_SHARE`, above.
LOST_SHARE, LOOSE_SHARE = 8, 2
ADHERENCE_LOST, ADHERENCE_LOOSE, ADHERENCE_CLOSE, NUM_ADHERENCES = range(4)
#: Output tokens that count as out of sync before the first, where the text is a memory.
MEMORY_PRIOR = 32
NUM_CLASSES = NUM_LENGTHS * NUM_MARGINS * NUM_ALIGNMENTS * NUM_ADHERENCES
#: Probabilities are integers over this, so that kernel and reference add them up to the same bits.
SURVIVAL_ONE = 1 << 16
#: More than any candidate is expected to get accepted, and small enough to be part of a key of 31 bits.
EXACT_PREFIX = (1 << 26) - 1

#: Recipes: items of a context, tokens of a continuation, ways of a bucket, and packs that a drafter holds.
MAX_CONTEXT, MAX_TOKENS = 8, 16
RECIPE_WAYS = 8
MAX_PACKS, ALL_PACKS = 31, 2**31 - 1
#: What the table says of a way's recipe, in columns: which it is, its drafts, and how many of them are expected to
#: be accepted.
RECIPE_ROW, RECIPE_LEN, RECIPE_EXPECTED = range(3)
RECIPE_COLUMNS = 4
#: Output tokens among which the items of a shape are looked for.
SHAPE_WINDOW = 32
#: Items of a shape that are no tokens: the classes of free tokens, and the beginning of the output.
SHAPE_IDENTIFIER, SHAPE_NUMBER, SHAPE_SPACE, SHAPE_STRING, SHAPE_START = -2, -3, -4, -5, -6
#: Bits of a key; no recipe has the key `NO_KEY`.
KEY_BITS, NO_KEY = 31, -1
#: The key of no tokens: large, as a token is small, and short contexts would share their keys with longer ones.
KEY_SEED = 0x5BD1E995
#: What a token does to a line, in ``indents``: it ends it, it is a run of n spaces (2 n) or of n tabs (2 n + 1),
#: below `NUM_RUNS`, or neither (0). In front of that stands the token of each run, -1 where there is none.
LINE_END, NUM_RUNS = -1, 256
#: In place of `HASH` in the key of a shape: 31 bits, so that it is an int32.
SHAPE_HASH = 0x4F1BBCDD

#: `Source` of a draft.
SOURCE_NONE, SOURCE_PREDICTION, SOURCE_CONTEXT, SOURCE_RECIPE, SOURCE_MEMORY = range(5)
#: The most drafts a step, tokens of a prediction and tokens of a context: what lanes and keys of kernels hold.
MOST_DRAFTS, MOST_PREDICTION, MOST_CONTEXT = 256, 2**24 - 1, 2**25 - 1


def index_bits(num_tokens: int) -> int:
    """log2 of the buckets of an index over `num_tokens` (a prediction's pages): at most half as many as tokens."""
    return max(1, num_tokens // 2).bit_length() - 1


def context_index_bits(max_context_len: int) -> int:
    """log2 of the buckets of ``context_index``: as many ways as the context has tokens, or up to twice as many."""
    return max(0, (max_context_len - 1) // WAYS).bit_length()


def whole_pages(num_tokens: int) -> int:
    """Tokens of the pages that a prediction of `num_tokens` takes, at least one page."""
    return max(-(-num_tokens // PAGE), 1) * PAGE


#: Operations of an edit script.
KEEP, DELETE, INSERT = 1, 2, 3


def text_kind(memory: bool, related: bool) -> int:
    """The text kind of what `Drafter.add` calls a memory and related."""
    return (TEXT_RELATED_MEMORY if related else TEXT_MEMORY) if memory else TEXT_PREDICTION
