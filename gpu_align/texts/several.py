"""Several texts to draft from, as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..ops.layout import FIRST_GAP, FIRST_JOINT

TokenIds = npt.NDArray[np.int32]
#: Most texts of a prediction.
MAX_TEXTS = 2**31 - FIRST_JOINT
#: The first gap between two; the others have the ids below.
_LAST_GAP = 2**31 - 1


def joined(texts: Iterable[Sequence[int]], *, once: bool = True) -> list[int]:
    """Token ids of several texts as one text to draft from, in their order, with a gap between two, so that no
    draft and no match runs from one into the next. Empty ones are left out; if `once`, of equal ones all but the
    first.

    ValueError: there are more than `MAX_TEXTS`, or a text has ids of gaps itself.
    """
    kept = [tuple(text) for text in texts if len(text)]
    if once:
        kept = list(dict.fromkeys(kept))
    if len(kept) > MAX_TEXTS:
        raise ValueError(f"expected at most {MAX_TEXTS} texts, found {len(kept)}")
    if max(map(max, kept), default=0) >= FIRST_GAP:
        raise ValueError(f"expected token ids below {FIRST_GAP}, found others")
    return _with_gaps(kept)


def _with_gaps(texts: Iterable[Iterable[int]]) -> list[int]:
    found: list[int] = []
    for number, text in enumerate(texts):
        found += [_LAST_GAP + 1 - number, *text] if number else text
    return found


def parted(token_ids: TokenIds) -> list[TokenIds]:
    """The texts that `joined` has put together; other gaps stay in them."""
    gaps = np.flatnonzero(token_ids >= FIRST_JOINT)
    return [part[index > 0 :] for index, part in enumerate(np.split(token_ids, gaps))]


def held_once(token_ids: TokenIds) -> TokenIds:
    """The same, of equal texts that `joined` has put together the first alone."""
    texts = parted(token_ids)
    distinct = dict.fromkeys(text.tobytes() for text in texts)
    if len(distinct) == len(texts):
        return token_ids
    return np.array(_with_gaps(np.frombuffer(text, np.int32).tolist() for text in distinct), dtype=np.int32)
