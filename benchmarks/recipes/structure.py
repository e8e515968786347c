"""What is structural in a Python text: keywords, punctuation, line ends and indentation."""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
#: What is named, counted or said: everything else is structure.
_FREE = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.COMMENT}
#: Python 3.12 on has parts of f-strings as tokens of their own.
_FREE |= {
    getattr(tokenize, name)
    for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    if hasattr(tokenize, name)
}


def structural_bytes(text: str) -> BoolArray:
    """[bytes]: False for the bytes of names, numbers, strings and comments; True for all else.

    Keywords are structure; ``self`` is a name. A text that is not Python has no structure.
    """
    lines = text.splitlines(keepends=True)
    begins = np.cumsum([0, *(len(line.encode()) for line in lines)])
    structural = np.ones(int(begins[-1]), dtype=np.bool_)

    def place(row: int, column: int) -> int:
        line = lines[row - 1] if row <= len(lines) else ""
        return int(begins[min(row - 1, len(lines))]) + len(line[:column].encode())

    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _FREE and not keyword.iskeyword(token.string):
                structural[place(*token.start) : place(*token.end)] = False
    except (tokenize.TokenError, SyntaxError):
        structural[:] = False
    return structural


def structural_tokens(text: str, token_bytes: Sequence[bytes]) -> BoolArray:
    """[tokens]: whether all bytes of a token are structure; `token_bytes` are those of `text`, in order.

    Example: of ``def f(x):`` in the tokens ``def``, `` f``, ``(x``, ``):`` the first and the last are.
    """
    structural = structural_bytes(text)
    ends = np.cumsum([len(piece) for piece in token_bytes])
    if len(ends) and ends[-1] != len(structural):
        raise ValueError(f"token_bytes: expected {len(structural)} bytes, found {ends[-1]}")
    return np.array(
        [
            bool(structural[end - len(piece) : end].all())
            for piece, end in zip(token_bytes, ends, strict=True)
        ],
        dtype=np.bool_,
    )
