"""Recipe packs: what usually follows what, learned from texts and kept as words, for any tokenizer to read."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import Repr
from typing import Any

from ..ops.recipe_lookup import Recipes
from .tokenize import Encode, tokenize
from .words import Recipe, words_of

#: The pack that comes with the library.
SHIPPED = Path(__file__).with_name("base.json.gz")
FORMAT = 1
#: The most words of a context, and how often a context must be seen.
MAX_WORDS, MIN_SEEN = 3, 3
#: A recipe is at least this likely, or it contradicts a shorter context.
MIN_LIKELY = 0.3
#: A context says nothing new where its probability is within this of a shorter context's.
SAME = 0.1
#: The calibration has one offset for each of so many bins of equal width, by the probability that the counts give.
NUM_BINS = 20
#: A file is not read further: its text is 30 times as long as that of the pack that comes with the library.
MAX_BYTES = 1 << 25
#: The largest count: floats hold all up to here.
MAX_COUNT = 1 << 53


class PackError(ValueError):
    """A file is not a recipe pack."""


@dataclass(frozen=True, repr=False)
class RecipePack:
    """What usually follows what.

    Attributes:
        words: how often each word was seen.
        recipes: by context, shorter ones first.
        calibration: [NUM_BINS], added to a probability in the middle of a bin; interpolated between middles.
        made_by: the command that made it.
    """

    words: Mapping[str, int]
    recipes: Sequence[Recipe]
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""

    def __repr__(self) -> str:
        """One line: how many words and recipes."""
        return f"RecipePack(num_words={len(self.words)}, num_recipes={len(self.recipes)})"

    @classmethod
    def learn(cls, texts: Iterable[tuple[str, str]], made_by: str = "") -> RecipePack:
        """Learn from pairs of a source, a project for example, and a text of it.

        Recipes that only one source writes are left out, unless there is only one source. The order of the texts
        does not matter.
        """
        seen = _Counts(texts)
        kept: dict[tuple[str, ...], tuple[str, float]] = {}
        recipes = []
        for context, following in sorted(seen.following.items(), key=lambda item: (len(item[0]), item[0])):
            total = following.total()
            if total < MIN_SEEN:
                continue
            word = min(following, key=lambda word: (-following[word], word))
            if not seen.in_several(context, word):
                continue
            likely = following[word] / total
            shorter = next((kept[context[i:]] for i in range(1, len(context)) if context[i:] in kept), None)
            if shorter is None or (shorter[0] != word and shorter[1] < MIN_LIKELY):
                news = likely >= MIN_LIKELY
            else:
                news = shorter[0] != word or abs(shorter[1] - likely) >= SAME
            if news:
                kept[context] = word, likely
                recipes.append(Recipe(context, word, following[word], total))
        named = {word for recipe in recipes for word in (*recipe.context, recipe.word)}
        words = {
            word: count
            for word, count in sorted(seen.words.items(), key=lambda item: (-item[1], item[0]))
            if word in named or (count >= MIN_SEEN and seen.in_several((), word))
        }
        return cls(words, recipes, made_by=made_by)

    @classmethod
    def load(cls, path: Path | str | None = None) -> RecipePack:
        """Read a pack; None stands for the one that comes with the library.

        A file is trusted with nothing: at most `MAX_BYTES` of it and of its text are read, whatever it says.

        Raises:
            TypeError: no path.
            PackError: the file is not a pack; the message says why.
            OSError: the file cannot be read.
        """
        if path is not None and not isinstance(path, (str, Path)):
            raise TypeError(f"path: expected a str or Path, found {type(path).__name__}")
        path = SHIPPED if path is None else Path(path)
        with path.open("rb") as file:
            packed = file.read(MAX_BYTES + 1)
        try:
            data = json.loads(_unpack(packed))
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise PackError(f"{path}: expected gzipped JSON ({error})") from error
        try:
            return _parse(data)
        except PackError as error:
            raise PackError(f"{path}: expected a recipe pack of format {FORMAT} ({error})") from error

    def save(self, path: Path | str) -> None:
        """Write the pack; the same pack is the same bytes."""
        number = {word: i for i, word in enumerate(self.words)}
        data = {
            "format": FORMAT,
            "made_by": self.made_by,
            "calibration": list(self.calibration),
            "words": list(self.words.items()),
            "recipes": [[r.hits, r.seen, *(number[w] for w in (*r.context, r.word))] for r in self.recipes],
        }
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))

    def calibrated(self, calibration: Sequence[float]) -> RecipePack:
        """The same pack with another calibration."""
        return replace(self, calibration=tuple(calibration))

    def tokenize(self, encode: Encode) -> Recipes:
        """The pack in the tokens of one model, as `gpu_align.Drafter` takes it.

        Args:
            encode: gives the token ids of each text, without special tokens.

        A recipe is left out where the tokenizer joins the end of its context and its word into one token.
        """
        return tokenize(self.words, self.recipes, self.calibration, encode)


class _Counts:
    """How often a word follows each context of up to `MAX_WORDS` words, and whether several sources write it."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self.words: Counter[str] = Counter()
        self.following: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        self._source: dict[tuple[tuple[str, ...], str], str] = {}
        self._several: set[tuple[tuple[str, ...], str]] = set()
        names = set()
        for source, text in texts:
            names.add(source)
            for context, word in _followed(words_of(text)):
                if context:
                    self.following[context][word] += 1
                else:
                    self.words[word] += 1
                if self._source.setdefault((context, word), source) != source:
                    self._several.add((context, word))
        self._one = len(names) == 1

    def in_several(self, context: tuple[str, ...], word: str) -> bool:
        """Whether two or more sources write it, or the only source does."""
        return self._one or (context, word) in self._several


def _followed(words: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    for i, word in enumerate(words):
        for length in range(min(MAX_WORDS, i) + 1):
            yield tuple(words[i - length : i]), word


def _unpack(packed: bytes) -> bytes:
    """The text of a gzip file."""
    text = b""
    if len(packed) <= MAX_BYTES:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            text = file.read(MAX_BYTES + 1)
    if max(len(packed), len(text)) > MAX_BYTES:
        raise PackError(f"expected at most {MAX_BYTES} bytes, found more")
    return text


def _parse(data: Any) -> RecipePack:
    if type(data) is not dict:
        raise PackError(f"expected an object, found {_shown(data)}")
    if data.get("format") != FORMAT:
        raise PackError(f"found format {_shown(data.get('format'))}")
    words: dict[str, int] = {}
    for i, entry in enumerate(_list(data, "words")):
        if not (type(entry) is list and len(entry) == 2 and _is_text(entry[0]) and entry[0]):
            raise PackError(f"words[{i}]: expected a word and a count, found {_shown(entry)}")
        word, count = entry
        if word in words:
            raise PackError(f"words[{i}]: expected each word once, found {_shown(word)} again")
        words[word] = _count(f"words[{i}]", count)
    names = list(words)
    recipes = [_recipe(f"recipe {i}", names, entry) for i, entry in enumerate(_list(data, "recipes"))]
    calibration = _list(data, "calibration")
    if len(calibration) != NUM_BINS or not all(map(_is_offset, calibration)):
        raise PackError(f"calibration: expected {NUM_BINS} numbers from -1 to 1, found {_shown(calibration)}")
    if not _is_text(data.get("made_by")):
        raise PackError(f"made_by: expected a text, found {_shown(data.get('made_by'))}")
    return RecipePack(words, recipes, tuple(map(float, calibration)), data["made_by"])


def _recipe(name: str, names: Sequence[str], entry: Any) -> Recipe:
    if type(entry) is not list or len(entry) < 2:
        raise PackError(f"{name}: expected two counts and words, found {_shown(entry)}")
    hits, seen, *numbers = entry
    is_known = all(type(number) is int and 0 <= number < len(names) for number in numbers)
    if not (2 <= len(numbers) <= MAX_WORDS + 1 and is_known):
        raise PackError(
            f"{name}: expected 2 to {MAX_WORDS + 1} numbers of the {len(names)} words, found {_shown(numbers)}"
        )
    if _count(name, hits) > _count(name, seen):
        raise PackError(f"{name}: expected no more hits than it was seen, found {hits} of {seen}")
    *context, word = (names[number] for number in numbers)
    return Recipe(tuple(context), word, hits, seen)


def _list(data: dict[str, Any], name: str) -> list[Any]:
    found = data.get(name)
    if type(found) is not list:
        raise PackError(f"{name}: expected a list, found {_shown(found)}")
    return found


def _count(name: str, number: Any) -> int:
    if type(number) is not int or not 1 <= number <= MAX_COUNT:
        raise PackError(f"{name}: expected a count, found {_shown(number)}")
    return number


def _is_text(found: Any) -> bool:
    """Whether it is a text that a tokenizer can read: JSON can write halves of characters."""
    return type(found) is str and not _HALF.search(found)


def _is_offset(number: Any) -> bool:
    return type(number) in (int, float) and -1 <= number <= 1


_HALF = re.compile("[\ud800-\udfff]")
_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


def _shown(found: Any) -> str:
    """One short line, however large it is."""
    shown = _REPR.repr(found)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
