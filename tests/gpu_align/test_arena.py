"""`PredictionArena`, call by call against a list of pages with an owner each."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_align.drafter.arena import ArenaStats, ArenaText, PredictionArena, tokens_for_all

P = 4


def text(name: int, num_tokens: int) -> np.ndarray:
    return np.full(num_tokens, name, dtype=np.int32)


def take(arena: PredictionArena, name: int, num_pages: int) -> ArenaText:
    found = arena.find(text(name, num_pages * arena.page))
    assert arena.take(found)
    return found


def test_an_empty_prediction_takes_nothing_and_always_fits() -> None:
    arena = PredictionArena(P, page=P)
    take(arena, 0, 1)
    for found in (arena.find(text(0, 0)), arena.find(text(0, 0))):
        assert arena.take(found)
        assert (found.base, found.num_tokens) == (0, 0)
        arena.release(found)
    assert arena.stats() == ArenaStats(P, 0, 0, 1, 0, 0, 0)


SLOTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), SLOTS)
def test_the_size_that_never_refuses(num_slots: int, most: int, calls: list[tuple[int, int]]) -> None:
    arena = PredictionArena(tokens_for_all(num_slots, most, page=1), page=1)
    slots: list[ArenaText | None] = [None] * num_slots
    for name, (slot, num_pages) in enumerate(calls):
        slot %= num_slots
        if (old := slots[slot]) is not None:
            arena.release(old)
        slots[slot] = take(arena, name, min(num_pages, most))


@dataclass
class Model:
    """The same with no data structure to speak of: who owns each page, and who was released when."""

    num_pages: int
    pages: list[tuple[int, int] | None] = field(init=False)
    users: dict[tuple[int, int], int] = field(default_factory=dict)
    released: list[tuple[int, int]] = field(default_factory=list)  # unused ones, oldest first
    reused: int = 0
    evicted: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.pages = [None] * self.num_pages

    @staticmethod
    def lowest(free: list[bool], num_pages: int) -> int | None:
        starts = range(len(free) - num_pages + 1)
        return next((start for start in starts if all(free[start : start + num_pages])), None)

    def acquire(self, name: tuple[int, int]) -> tuple[int, bool] | None:
        """First page and freshness."""
        num_pages = -(-name[1] // P)
        if name in self.users:
            self.reused += 1
            if name in self.released:
                self.released.remove(name)
            self.users[name] += 1
            return self.pages.index(name), False
        if self.lowest([owner is None or owner in self.released for owner in self.pages], num_pages) is None:
            self.refused += 1
            return None
        while (start := self.lowest([owner is None for owner in self.pages], num_pages)) is None:
            self.forget(self.released[0])
            self.evicted += 1
        self.pages[start : start + num_pages] = [name] * num_pages
        self.users[name] = 1
        return start, True

    def release(self, name: tuple[int, int]) -> None:
        self.users[name] -= 1
        if not self.users[name]:
            self.released.append(name)

    def forget(self, name: tuple[int, int]) -> None:
        self.released.remove(name)
        del self.users[name]
        self.pages = [None if owner == name else owner for owner in self.pages]

    def stats(self) -> ArenaStats:
        free = self.pages.count(None)
        cached = sum(owner in self.released for owner in self.pages)
        used = self.num_pages - free - cached
        return ArenaStats(
            used * P, cached * P, free * P, len(self.users), self.reused, self.evicted, self.refused
        )


class ArenaMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 16))
    def begin(self, num_pages: int) -> None:
        self.arena = PredictionArena(num_pages * P, page=P)
        self.model = Model(num_pages)
        self.held: list[tuple[tuple[int, int], ArenaText]] = []

    # Few names, so that most come back; lengths on both sides of a page's end.
    @rule(
        text_of=st.integers(0, 1),
        key=st.sampled_from([None, "a"]),
        num_tokens=st.sampled_from([1, 3, 4, 5, 8, 9, 13, 20, 33]),
    )
    def acquire(self, text_of: int, key: str | None, num_tokens: int) -> None:
        found = self.arena.find(text(text_of, num_tokens), key)
        was_held, is_taken = found.is_held, self.arena.take(found)
        assert found.tokens.tolist() == [text_of] * num_tokens
        # To the model, one text under two keys is two names: what is shared is equal in both.
        name = 2 * text_of + (key is not None)
        expected = self.model.acquire((name, num_tokens))
        assert is_taken == (expected is not None)
        if expected is not None:
            start, fresh = expected
            assert (found.base, found.num_tokens, was_held) == (start * P, num_tokens, not fresh)
            self.held.append(((name, num_tokens), found))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, found = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.arena.release(found)
        self.model.release(name)

    @invariant()
    def counts(self) -> None:
        assert self.arena.stats() == self.model.stats()


TestAgainstModel = ArenaMachine.TestCase
TestAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
