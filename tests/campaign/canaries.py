"""Requests whose tokens are their own: what is found of another's anywhere has leaked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.gpu_align.step_harness import edited

#: Ids of a range, and the first of the first range. All have as many digits, more than any other number in a log.
SPAN, FIRST = 64, 10_000_000
VOCABULARY = 99_000_000
#: Different tokens of a range in use: few, so that drafts match everywhere.
ALPHABET = 24


@dataclass(frozen=True)
class Text:
    """A prediction that several requests bring, some with the same sharing key and some with another."""

    tokens: tuple[int, ...]
    range: int


@dataclass
class Request:
    """prompt and output come from the request's own range and from its text's; key: who shares its prediction."""

    number: int
    text: Text | None
    key: bytes | None
    prompt: list[int]
    output: list[int]
    done: int = 0
    draft: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def prediction(self) -> list[int]:
        return [] if self.text is None else list(self.text.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output[: self.done]]

    def foreign(self, tokens: Iterable[int]) -> list[int]:
        """Those that are in none of its ranges."""
        own = {self.number, -1 if self.text is None else self.text.range}
        return [token for token in tokens if (token - FIRST) // SPAN not in own]


class Canaries:
    """Makes requests; none shares a range with another, except through a text that both bring."""

    def __init__(self, rng: random.Random, *, longest: int, longest_output: int) -> None:
        self.rng, self.longest, self.longest_output = rng, longest, longest_output
        self.ranges = 0
        self.texts: deque[Text] = deque(maxlen=6)

    def tokens(self, number: int, num: int) -> list[int]:
        return [FIRST + number * SPAN + self.rng.randrange(ALPHABET) for _ in range(num)]

    def take_range(self) -> int:
        self.ranges += 1
        return self.ranges

    def request(self) -> Request:
        rng = self.rng
        number, kind = self.take_range(), rng.random()
        text, key = None, None
        if kind < 0.55:
            text = self.text(number)
        elif kind < 0.9:  # one that several bring
            if not self.texts or rng.random() < 0.2:
                self.texts.append(self.text(self.take_range()))
            text, key = rng.choice(self.texts), rng.choice([b"tenant 1", b"tenant 1", b"tenant 2"])
        prediction = [] if text is None else list(text.tokens)
        prompt = self.tokens(number, rng.choice([1, 2, 9, 30]))
        if rng.random() < 0.3:
            prompt += prediction[:20]
        num = rng.randint(2, self.longest_output)
        output = prediction if rng.random() < 0.3 else edited(rng, prediction, 1, num)
        # What an edit brings is 0 there.
        output = [self.tokens(number, 1)[0] if token == 0 else token for token in output]
        return Request(number, text, key, prompt, (output + self.tokens(number, 2))[:num])

    def text(self, number: int) -> Text:
        num = self.rng.choice([1, 2, 20, 60, 255, 256, 257, self.longest])
        return Text(tuple(self.tokens(number, min(num, self.longest))), number)
