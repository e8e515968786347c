"""From the JSON of a file to what it holds: every value is checked, and an error names the first wrong one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from reprlib import Repr
from typing import Any

from ..ops.constants import MAX_CONTEXT, SHAPE_IDENTIFIER, SHAPE_START
from .chains import Observed
from .content import NUM_BINS, Content, Miss, MissContent, PackError
from .learn import MAX_WORDS
from .words import Recipe

#: The largest count: floats hold all up to here.
MAX_COUNT = 1 << 53
#: Token ids are below it.
MAX_TOKEN = 1 << 31
_CLASSES = range(SHAPE_START, SHAPE_IDENTIFIER + 1)


def parse_pack(data: dict[str, Any]) -> Content:
    """A pack of format 1 or 2."""
    words: dict[str, int] = {}
    for i, entry in enumerate(_list(data, "words")):
        if not (type(entry) is list and len(entry) == 2 and _is_text(entry[0]) and entry[0]):
            raise PackError(f"words[{i}]: expected a word and a count, found {shown(entry)}")
        word, count = entry
        if word in words:
            raise PackError(f"words[{i}]: expected each word once, found {shown(word)} again")
        words[word] = _count(f"words[{i}]", count)
    names = list(words)
    recipes = [_recipe(f"recipe {i}", names, entry) for i, entry in enumerate(_list(data, "recipes"))]
    calibration = _list(data, "calibration")
    if len(calibration) != NUM_BINS or not all(map(_is_offset, calibration)):
        raise PackError(f"calibration: expected {NUM_BINS} numbers from -1 to 1, found {shown(calibration)}")
    made_by = _string(data, "made_by")
    offsets = tuple(map(float, calibration))
    if data["format"] == 1:
        return Content(words, recipes, offsets, made_by)
    kept = _list(data, "kept")
    if not all(type(token) is int and 0 <= token < MAX_TOKEN for token in kept):
        raise PackError(f"kept: expected token ids, found {shown(kept)}")
    if any(a >= b for a, b in pairwise(kept)):
        raise PackError(f"kept: expected each token once, ascending, found {shown(kept)}")
    observed: dict[tuple[bool, tuple[int, ...]], Observed] = {}
    for i, entry in enumerate(_list(data, "observed")):
        one = _observed(f"observed[{i}]", entry)
        if (one.is_shape, one.context) in observed:
            raise PackError(f"observed[{i}]: expected each context once, found {shown(entry)} again")
        observed[one.is_shape, one.context] = one
    tokenizer = _string(data, "tokenizer")
    if (observed or kept) and not tokenizer:
        raise PackError(
            "tokenizer: expected the fingerprint of the one that the token ids are of, found none"
        )
    return Content(
        words,
        recipes,
        offsets,
        made_by,
        _string(data, "task"),
        tokenizer,
        tuple(observed.values()),
        tuple(kept),
    )


def parse_misses(data: dict[str, Any]) -> MissContent:
    """A file of misses."""
    counts: dict[Miss, int] = {}
    for i, row in enumerate(_list(data, "misses")):
        name = f"misses[{i}]"
        if type(row) is not list or len(row) != 8:
            raise PackError(f"{name}: expected 8 values, found {shown(row)}")
        *fields, count = row
        literal, shape, expected, said, literal_start, shape_start, first = fields
        for context, is_shape in ((literal, 0), (shape, 1), (literal_start, 0), (shape_start, 1)):
            _items(name, context, is_shape, least=0)
        least = ((expected, 0), (said, 0), (first, -1))
        if not all(type(token) is int and lowest <= token < MAX_TOKEN for token, lowest in least):
            raise PackError(f"{name}: expected token ids, found {shown([expected, said, first])}")
        miss = Miss(
            tuple(literal), tuple(shape), expected, said, tuple(literal_start), tuple(shape_start), first
        )
        if miss in counts:
            raise PackError(f"{name}: expected each once, found {shown(row)} again")
        counts[miss] = _count(name, count)
    return MissContent(_string(data, "tokenizer"), counts, _string(data, "made_by"))


def shown(found: Any) -> str:
    """One short line, however large it is."""
    text = _REPR.repr(found)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _observed(name: str, entry: Any) -> Observed:
    if type(entry) is not list or len(entry) < 6:
        raise PackError(f"{name}: expected a kind, a token, three counts and a context, found {shown(entry)}")
    kind, token, hits, seen, groups, *context = entry
    if type(kind) is not int or kind not in (0, 1):
        raise PackError(f"{name}: expected kind 0 or 1, found {shown(kind)}")
    if type(token) is not int or not -1 <= token < MAX_TOKEN:
        raise PackError(f"{name}: expected a token id or -1, found {shown(token)}")
    _items(name, context, kind, least=1)
    for number in (hits, groups):
        if type(number) is not int or not 0 <= number <= MAX_COUNT:
            raise PackError(f"{name}: expected a count, found {shown(number)}")
    if hits > _count(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    return Observed(bool(kind), tuple(context), token, hits, seen, groups)


def _items(name: str, context: Any, is_shape: int, least: int) -> None:
    is_known = type(context) is list and all(
        type(item) is int and (0 <= item < MAX_TOKEN or (is_shape == 1 and item in _CLASSES))
        for item in context
    )
    if not is_known or not least <= len(context) <= MAX_CONTEXT:
        what = "items of a shape" if is_shape else "token ids"
        raise PackError(f"{name}: expected {least} to {MAX_CONTEXT} {what}, found {shown(context)}")


def _recipe(name: str, names: Sequence[str], entry: Any) -> Recipe:
    if type(entry) is not list or len(entry) < 2:
        raise PackError(f"{name}: expected two counts and words, found {shown(entry)}")
    hits, seen, *numbers = entry
    is_known = all(type(number) is int and 0 <= number < len(names) for number in numbers)
    if not (2 <= len(numbers) <= MAX_WORDS + 1 and is_known):
        raise PackError(
            f"{name}: expected 2 to {MAX_WORDS + 1} numbers of the {len(names)} words, found {shown(numbers)}"
        )
    if _count(name, hits) > _count(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    *context, word = (names[number] for number in numbers)
    return Recipe(tuple(context), word, hits, seen)


def _list(data: dict[str, Any], name: str) -> list[Any]:
    found = data.get(name)
    if type(found) is not list:
        raise PackError(f"{name}: expected a list, found {shown(found)}")
    return found


def _string(data: dict[str, Any], name: str) -> str:
    found = data.get(name)
    if not _is_text(found):
        raise PackError(f"{name}: expected a text, found {shown(found)}")
    return str(found)


def _count(name: str, number: Any) -> int:
    if type(number) is not int or not 1 <= number <= MAX_COUNT:
        raise PackError(f"{name}: expected a count, found {shown(number)}")
    return number


def _is_text(found: Any) -> bool:
    """Whether it is a text that a tokenizer can read: JSON can write halves of characters."""
    return type(found) is str and not _HALF.search(found)


def _is_offset(number: Any) -> bool:
    return type(number) in (int, float) and -1 <= number <= 1


_HALF = re.compile("[\ud800-\udfff]")
_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60
