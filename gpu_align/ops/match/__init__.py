"""Find the positions before which a text ends like the output. README.md defines a match, and the order."""

#: A longer match counts as this long.
MAX_MATCH = 64
#: The order of matches is one key of 31 bits: ``(length - 1) * TIE`` plus the tie order, which is below `TIE`.
TIE = 1 << 25

#: Candidates: the best matches in the prediction, then the cursor and so many positions ahead of it, then the best
#: matches in the context.
NUM_MATCHES = AT_CURSOR = 4
CURSOR_AHEAD = 1
FIRST_CONTEXT = AT_CURSOR + 1 + CURSOR_AHEAD
NUM_CANDIDATES = FIRST_CONTEXT + NUM_MATCHES
#: Lanes of a kernel for the candidates, and for all positions that it compares.
LANES, LOOKUP_LANES = 16, 64
#: Tokens that it compares at once, first and then.
FIRST_BACK, NEXT_BACK = 3, 8
