"""Text as words, pieces that tokenizers of today never join; and a recipe, which is made of words."""

from __future__ import annotations

import re
from typing import NamedTuple

# What GPT-4's, Llama 3's, Qwen's and Tekken's own patterns cut a text into, or a little more at once: letters with
# one sign or space before them, digits, signs with what ends their line, line ends, spaces.
_WORD = re.compile(
    r"""
      [^\r\n\w]?[^\W\d_]+
    | _[^\W\d_]+
    | \d+
    | [ ]?(?:[^\s\w]|_)+[\r\n/]*
    | \s*[\r\n]+
    | \s+(?!\S)
    | \s+
    """,
    re.VERBOSE,
)


class Recipe(NamedTuple):
    """After `context`, `word` came `hits` times out of `seen`."""

    context: tuple[str, ...]
    word: str
    hits: int
    seen: int


def words_of(text: str) -> list[str]:
    """The words of a text; joined, they are the text."""
    return _WORD.findall(text)
