"""The shape of what was written: keywords and punctuation stay, every other token is its class."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops.constants import (
    MAX_CONTEXT,
    SHAPE_IDENTIFIER,
    SHAPE_NUMBER,
    SHAPE_SPACE,
    SHAPE_START,
    SHAPE_STRING,
    SHAPE_WINDOW,
)
from .tokenize import Encode

#: The text of each token id.
TokenTexts = Callable[[Sequence[int]], Sequence[str]]
IntArray = npt.NDArray[np.signedinteger[Any]]

#: A vocabulary has at most so many tokens; its texts are asked for in blocks.
MAX_VOCABULARY, _BLOCK = 1 << 19, 1 << 12

#: What two tokenizers would have to encode alike to be taken for one.
_PROBES = (
    "The quick brown fox jumps over the lazy dog, again and again; doesn't it?\n",
    '{\n  "id": 1024,\n  "items": [{"name": "Zoë", "at": "2024-01-31T09:05:00Z"}, null, true]\n}\n',
    "def main(argv: list[str]) -> int:\n    return len(argv) * 0x1F if argv else -1\n",
    '\t<div class="a-b">naïve café ½ – 你好, мир! 😀</div>\r\n\n  # $x = \\frac{a_1}{b^2}$',
    "antidisestablishmentarianism supercalifragilistic internationalization 3.14159265358979",
)


def fingerprint(encode: Encode) -> str:
    """Which tokenizer this is: ``"sha256:…"`` over the ids of fixed texts."""
    ids = [[int(token) for token in tokens] for tokens in encode(list(_PROBES))]
    return f"sha256:{hashlib.sha256(repr(ids).encode()).hexdigest()}"


def class_of(text: str) -> int:
    """The class of a token by its text, without the white space around it.

    >>> [class_of(text) for text in (" is_open", "042", "\\n  ", "();", "x1")] == [
    ...     SHAPE_IDENTIFIER, SHAPE_NUMBER, SHAPE_SPACE, SHAPE_STRING, SHAPE_IDENTIFIER]
    True
    """
    inner = text.strip()
    if not inner:
        return SHAPE_SPACE if text else SHAPE_STRING
    if inner.isdigit():
        return SHAPE_NUMBER
    return SHAPE_IDENTIFIER if inner.replace("_", "a").isalnum() else SHAPE_STRING


def classes_of(token_texts: TokenTexts, ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """The class of each id, whatever a pack keeps."""
    return np.fromiter((class_of(text) for text in token_texts(ids)), dtype=np.int32, count=len(ids))


def shape_of_tokens(token_texts: TokenTexts, vocab_size: int, kept: Iterable[int]) -> npt.NDArray[np.int32]:
    """[V] int32: the shape item of each token: the id itself for those that are `kept`, else the token's class.

    Args:
        token_texts: the text of each id; of a part of a character any text that is no word.
        vocab_size: V.
        kept: ids that stay themselves; those that are not below V are left out.
    """
    shape_of = classes_of(token_texts, range(vocab_size))
    stay = np.array([token for token in kept if token < vocab_size], dtype=np.int64)
    shape_of[stay] = stay
    return shape_of


def all_classes(token_texts: TokenTexts) -> npt.NDArray[np.int32]:
    """[V]: the class of each id, V found by asking: up to an error, or to texts that are all empty or no text."""
    found: list[npt.NDArray[np.int32]] = []
    for begin in range(0, MAX_VOCABULARY, _BLOCK):
        texts = _texts(token_texts, range(begin, begin + _BLOCK))
        if not any(text.strip("\ufffd") for text in texts):
            break
        found.append(np.fromiter(map(class_of, texts), dtype=np.int32, count=len(texts)))
        if len(texts) < _BLOCK:
            break
    return np.concatenate([np.zeros(0, dtype=np.int32), *found])


def _texts(token_texts: TokenTexts, ids: range) -> Sequence[str]:
    """Their texts, of as many of the first ones as there are."""
    try:
        return token_texts(ids)
    except Exception:  # whatever a tokenizer raises for an id that it does not have
        half = len(ids) // 2
        if not half:
            return []
        texts = list(_texts(token_texts, ids[:half]))
        return texts + list(_texts(token_texts, ids[half:])) if len(texts) == half else texts


def shape_of_output(output: Sequence[int], shape_of: IntArray) -> list[int]:
    """The shape that a look-up sees behind these tokens, the newest item first.

    ::

        items, previous_free = [], False
        for i in range(SHAPE_WINDOW):
            if i == len(output):    items.append(SHAPE_START); break
            item = shape_of[output[-1 - i]]
            if item >= 0 or not previous_free:    items.append(item)     # free tokens in a row are one item
            previous_free = item < 0
            if len(items) == MAX_CONTEXT:    break

    Args:
        output: what the model has written; its last `SHAPE_WINDOW` tokens and the beginning are all that counts.
        shape_of: [V], as `shape_of_tokens` makes it; ids that are not below V are strings.
    """
    items: list[int] = []
    previous_free = False
    for i in range(SHAPE_WINDOW):
        if i >= len(output):
            items.append(SHAPE_START)
            break
        token = output[-1 - i]
        item = int(shape_of[token]) if 0 <= token < len(shape_of) else SHAPE_STRING
        if item >= 0 or not previous_free:
            items.append(item)
        previous_free = item < 0
        if len(items) == MAX_CONTEXT:
            break
    return items
