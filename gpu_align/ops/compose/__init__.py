"""Write the draft from the chosen text. README.md has the loop; here are its numbers."""

from ..rules import rule

#: Edits that are replayed in one draft.
MAX_REPLAYS = 4


@rule
def wraps_around(matched: int, period: int) -> bool:
    """Whether the output repeats itself: a match as long as the text after its position, `period` tokens."""
    return matched >= period
