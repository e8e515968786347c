"""Look up the tokens that usually follow. README.md says how; here are its numbers."""

#: Items of a context, tokens of a continuation, and ways of a bucket.
MAX_CONTEXT, MAX_TOKENS = 8, 16
RECIPE_WAYS = 8
#: A bit for each pack that a drafter may hold.
ALL_PACKS = 2**31 - 1
#: What the table says of a way's recipe, in columns: which it is, its drafts, how many of them are expected to be
#: accepted, and nothing.
RECIPE_COLUMNS = 4
#: Output tokens among which the items of a shape are looked for.
SHAPE_WINDOW = 32
#: Items of a shape that are no tokens: the classes of free tokens, and the beginning of the output.
SHAPE_IDENTIFIER, SHAPE_NUMBER, SHAPE_SPACE, SHAPE_STRING, SHAPE_START = -2, -3, -4, -5, -6
#: The key of no tokens: large, as a token is small, and short contexts would share their keys with longer ones.
KEY_SEED = 0x5BD1E995
#: In place of `HASH` in the key of a shape: 31 bits, so that it is an int32.
SHAPE_HASH = 0x4F1BBCDD
#: What a token does to a line, in ``indents``: it ends it, it is a run of n spaces (2 n) or of n tabs (2 n + 1),
#: below `NUM_RUNS`, or neither (0). In front of that stands the token of each run, -1 where there is none.
LINE_END, NUM_RUNS = -1, 256
