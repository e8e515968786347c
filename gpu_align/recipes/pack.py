"""Recipe packs: what usually follows what, learned from texts and kept as words, for any tokenizer to read."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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


class PackError(ValueError):
    """A file is not a recipe pack."""


@dataclass(frozen=True)
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

        Raises:
            PackError: the file is not a pack; the message says why.
            OSError: the file cannot be read.
        """
        path = SHIPPED if path is None else Path(path)
        try:
            data = json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise PackError(f"{path}: expected gzipped JSON ({error})") from error
        try:
            return _parse(data)
        except (PackError, KeyError, TypeError, ValueError, IndexError) as error:
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


def _parse(data: Any) -> RecipePack:
    if data["format"] != FORMAT:
        raise PackError(f"found format {data['format']!r}")
    words = {str(word): _count(count) for word, count in data["words"]}
    names = list(words)
    recipes: list[Recipe] = []
    for hits, seen, *numbers in data["recipes"]:
        if not (2 <= len(numbers) <= MAX_WORDS + 1 and all(0 <= n < len(names) for n in numbers)):
            raise PackError(f"recipe {len(recipes)}: words {numbers}")
        *context, word = (names[number] for number in numbers)
        if not 1 <= _count(hits) <= _count(seen):
            raise PackError(f"recipe {len(recipes)}: {hits} of {seen}")
        recipes.append(Recipe(tuple(context), word, hits, seen))
    calibration = tuple(float(offset) for offset in data["calibration"])
    if len(calibration) != NUM_BINS or not all(-1 <= offset <= 1 for offset in calibration):
        raise PackError(f"calibration: expected {NUM_BINS} numbers from -1 to 1, found {calibration}")
    return RecipePack(words, recipes, calibration, str(data["made_by"]))


def _count(number: Any) -> int:
    if type(number) is not int or number < 1:
        raise PackError(f"expected a count, found {number!r}")
    return number
