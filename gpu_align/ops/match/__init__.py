"""Where else does a text end like the output? README.md says what a match is, and in which order they are."""

#: Occurrences of a token in the prediction that are compared: those around the anchor.
NEAREST = 32
#: A longer match counts as this long.
MAX_MATCH = 64
#: The order of matches is one key of 31 bits: ``(length - 1) * TIE`` plus the tie order, which is below `TIE`.
TIE = 1 << 25

#: Candidates: the best matches in the prediction, then the positions around the cursor, then the best matches in
#: the context.
NUM_MATCHES = 4
CURSOR_BEHIND, CURSOR_AHEAD = 2, 16
AT_CURSOR = NUM_MATCHES + CURSOR_BEHIND
FIRST_CONTEXT = NUM_MATCHES + CURSOR_BEHIND + 1 + CURSOR_AHEAD
NUM_CANDIDATES = FIRST_CONTEXT + NUM_MATCHES
#: Lanes of a kernel for the candidates, and for the occurrences among which it looks for matches.
LANES, LOOKUP_LANES = 32, 64
