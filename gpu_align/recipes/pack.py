"""Recipe packs: what usually follows what, learned from texts and told in words, for any tokenizer to read."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.recipe_lookup import Recipes
from .tokenize import tokenize
from .words import words_of

#: The pack that comes with the library.
SHIPPED = Path(__file__).with_name("base.json.gz")
FORMAT = 1
#: Words of a context, and how often it has to be seen.
MAX_WORDS, MIN_SEEN = 3, 3
#: A recipe is at least this likely, or it takes back what a shorter context says.
MIN_LIKELY = 0.3
#: A context says nothing new where it is within this of what a shorter one says already.
SAME = 0.1
#: Bins that the calibration holds an offset for, by the probability that the counts promise.
NUM_BINS = 20


class Recipe(NamedTuple):
    """After `context`, `word` came `hits` times out of `seen`."""

    context: tuple[str, ...]
    word: str
    hits: int
    seen: int


class PackError(ValueError):
    """A file that is no recipe pack."""


@dataclass(frozen=True)
class RecipePack:
    """What usually follows what.

    Attributes:
        words: how often each word was seen.
        recipes: by context, shorter ones first.
        calibration: [NUM_BINS], added to a probability by where from 0 to 1 it is; in between interpolated.
        made_by: the command that made it.
    """

    words: Mapping[str, int]
    recipes: Sequence[Recipe]
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""

    @classmethod
    def learn(cls, texts: Iterable[tuple[str, str]], made_by: str = "") -> RecipePack:
        """Learn from texts: pairs of the source that a text belongs to, a project say, and the text itself.

        What only one source writes is left out, unless there is only one. The same texts make the same pack,
        whatever their order.
        """
        seen = _Counts(texts)
        kept: dict[tuple[str, ...], tuple[str, float]] = {}
        recipes = []
        for context, following in sorted(seen.following.items(), key=lambda item: (len(item[0]), item[0])):
            total = sum(following.values())
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
        """Read a pack; None is the one that comes with the library.

        Raises:
            PackError: the file is no pack; it says what is wrong.
            OSError: it cannot be read.
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

    def tokenize(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> Recipes:
        """The pack in the tokens of one model, as `gpu_align.Drafter` takes it.

        Args:
            encode: token ids of each of the texts, without special tokens.

        A recipe whose context and word a tokenizer joins into one token is left out.
        """
        return tokenize(self.words, self.recipes, self.calibration, encode)


class _Counts:
    """How often, and in how many sources, a word follows each context of up to `MAX_WORDS` words."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self.words: Counter[str] = Counter()
        self.following: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        self._source: dict[tuple[tuple[str, ...], str], str] = {}
        self._several: set[tuple[tuple[str, ...], str]] = set()
        names = set()
        for source, text in texts:
            names.add(source)
            for context, word in _contexts(words_of(text)):
                if context:
                    self.following[context][word] += 1
                else:
                    self.words[word] += 1
                if self._source.setdefault((context, word), source) != source:
                    self._several.add((context, word))
        self._one = len(names) == 1

    def in_several(self, context: tuple[str, ...], word: str) -> bool:
        """Whether two sources or more write it, or the only one there is."""
        return self._one or (context, word) in self._several


def _contexts(words: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
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
