"""Several texts to draft from, as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ops.layout import FIRST_GAP

#: Most texts of a prediction.
MAX_TEXTS = 256
#: The first gap between two; the others have the ids below. Those of skeletons begin at the other end.
_LAST_GAP = 2**31 - 1


def joined(texts: Iterable[Sequence[int]]) -> list[int]:
    """Token ids of several texts as one text to draft from: equal ones once, in their order, with a gap between
    two, so that no draft and no match runs from one into the next. Empty ones are left out.

    ValueError: there are more than `MAX_TEXTS`, or a text has ids of gaps itself.
    """
    distinct = list(dict.fromkeys(tuple(text) for text in texts if len(text)))
    if len(distinct) > MAX_TEXTS:
        raise ValueError(f"expected at most {MAX_TEXTS} texts, found {len(distinct)}")
    if max(map(max, distinct), default=0) >= FIRST_GAP:
        raise ValueError(f"expected token ids below {FIRST_GAP}, found others")
    found: list[int] = []
    for number, text in enumerate(distinct):
        found += [_LAST_GAP + 1 - number, *text] if number else text
    return found
