"""Whole steps on both backends against plain Python: what is drafted, how sure it is, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gpu_align import DrafterConfig
from gpu_align.ops import constants
from tests.gpu_align.step_batch import Running, StepBatch, StepRow
from tests.gpu_align.step_harness import BACKENDS, INTERPRETED, random_curves

Tokens = list[int]
#: Prediction, prompt, output.
Given = tuple[Tokens, Tokens, Tokens]


def check(rows: Iterable[StepRow]) -> list[StepRow]:
    found = []
    for row in rows:
        assert not row.wrong, (row.wrong, row.of)
        found.append(row)
    return found


def random_rows(seed: int, rows: int, backends: Iterable[str] = BACKENDS) -> Iterator[StepRow | Counter[str]]:
    """About as many rows of one random batch; after each step how its requests stand."""
    batch, done = StepBatch.draw(random.Random(seed), list(backends)), 0
    while done < rows:
        found = batch.random_step()
        done += len(found)
        yield from found
        yield Counter(batch.standing())


@pytest.mark.parametrize("backends", [["reference"], BACKENDS], ids=["reference", "both"])
def test_random_batches(backends: list[str]) -> None:
    """The campaign's `exactness` has many more of them."""
    seen: Counter[str] = Counter()
    slow = len(backends) > 1 and INTERPRETED
    for seed in range(12 if slow else 60):
        for row in random_rows(seed, 40 if slow else 80, backends):
            if isinstance(row, StepRow):
                assert not row.wrong, (seed, row.wrong, row.of)
                seen[row.source] += 1
            else:
                seen += row
    kinds = {"nothing", "prediction", "context", "recipe", "memory", "in sync", "diverged", "edits"}
    assert set(seen) == kinds


def batch_of(given: dict[int, Given], rng: random.Random | None = None, **how: Any) -> StepBatch:
    """Requests in these slots, nothing written yet."""
    batch = StepBatch(rng or random.Random(7), **how)
    for slot, (prediction, prompt, output) in given.items():
        batch.add(slot, Running(prediction, len(prompt), [*prompt, *output], len(prompt)))
    return batch


def step(batch: StepBatch, slots: Iterable[int], *sampled: int) -> dict[int, Tokens]:
    """What is drafted in each slot, after everything was compared."""
    slots = list(slots)
    check(batch.step(slots, sampled or [1] * len(slots)))
    return {slot: batch.running[slot].draft for slot in slots if slot in batch.running}


def a_rename(rng: random.Random, blocks: int = 24) -> Given:
    """A prediction in which the same three tokens come again and again, and an output with other ones there."""
    text: Tokens = []
    output: Tokens = []
    for i in range(blocks):
        filler = [100 + rng.randrange(800) for _ in range(rng.randint(4, 9))]
        text += [*filler, 1, 2, 3]
        new = [[1, 7, 3], [1, 8, 9, 3], [1, 3], [1, 2, 3], [1, 2, 5, 3]][0 if i < blocks // 2 else i % 5]
        output += filler + new
        if i % 4 == 3:
            # Another place that is edited, and left as it is the next time.
            text += [11, 12, 13, 14]
            output += [11, 12, 13, 14] if i % 8 == 7 else [11, 20 + i, 21 + i, 13, 14]
    return text, [5], output


def a_deletion_and_a_move(rng: random.Random, gap: int) -> Given:
    """Back within `LOCAL_RANGE` at once, farther at an eighth token, from beyond the window, and from behind."""
    text = [rng.randrange(900) for _ in range(400)]
    return text, [], text[:21] + text[21 + gap :][:40] + [1, 2] + text[3:50]


def tokens_everywhere(rng: random.Random, period: int) -> Given:
    """Many more occurrences than are looked at, around a cursor in the middle; several searches deep."""
    text = [i % period for i in range(1500)]
    return text, [0] * 40, [*text[:700], 9, *text[2:90]]


def odd_tokens(rng: random.Random) -> Given:
    """Tokens of the prompt may be anything, and so may what is drafted from it."""
    text, odd = [rng.randrange(60) for _ in range(70)], [-1, 60, 2**31 - 1, -(2**31)]
    prompt = [t for i in range(0, 64, 8) for t in (*text[i : i + 8], odd[i // 8 % 4])]
    return text, prompt, text[:20] + prompt[:40] + text[20:40]


def a_full_row(rng: random.Random) -> Given:
    text = [rng.randrange(60) for _ in range(70)]
    return text, [], text[:50]


def a_short_row(rng: random.Random) -> Given:
    return [0, 1, 2, 0, 1, 3], [0, 1], [0, 1, 2, 3, 0, 1, 2, 0, 1, 3, 0, 1, 2, 1]


def a_few_edits(rng: random.Random) -> Given:
    text = [rng.randrange(4) for _ in range(80)]
    return text, text[:3], [*text[:20], 3, 3, *text[25:60], 1, *text[60:65]]


#: A request, how often a step accepts what was drafted, tokens of the output that are there at once, the drafter.
SCRIPTS: dict[str, tuple[Callable[[random.Random], Given], float, int, dict[str, Any]]] = {
    "rename, K 16": (a_rename, 1.0, 0, {"capacity": 600}),
    "rename, K 64": (a_rename, 1.0, 0, {"capacity": 600, "K": 64}),
    **{
        f"deletion of {gap}, move": (
            lambda rng, gap=gap: a_deletion_and_a_move(rng, gap), 0.3, 0, {"capacity": 256},
        )
        for gap in (20, 32, 40, 250, 300)
    },
    **{
        f"period {period}": (
            lambda rng, period=period: tokens_everywhere(rng, period), 0.3, 660, {"capacity": 900},
        )
        for period in (1, 3)
    },
    "odd tokens": (odd_tokens, 0.4, 0, {"K": 32, "vocab_size": 60, "capacity": 157}),
    "full row": (a_full_row, 0.9, 0, {"K": 32, "vocab_size": 60, "capacity": 50}),
    "short row": (a_short_row, 0.8, 0, {"capacity": 16}),
    "K 1": (a_few_edits, 0.8, 0, {"K": 1, "capacity": 100}),
    "no length": (a_few_edits, 0.8, 0, {"K": 5, "config": DrafterConfig(length_factor=0), "capacity": 100}),
    "K 200": (a_few_edits, 0.8, 0, {"K": 200, "config": DrafterConfig(length_factor=0.75)}),
    "K 256": (a_few_edits, 0.8, 0, {
        "K": 256, "config": DrafterConfig(length_factor=100), "curves": random_curves(5, 256),
    }),
    "shortest matches": (
        a_few_edits, 0.8, 0, {"config": DrafterConfig(min_match=3, min_context_match=5), "capacity": 100},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str) -> None:
    given, follow, done, how = SCRIPTS[name]
    rng = random.Random(name)
    batch = batch_of({4: given(rng)}, rng, **how)
    batch.running[4].done += done
    check(batch.walk(follow))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 255, 256, 257])
def test_a_perfect_prediction(size: int) -> None:
    """From the first step on K drafts, whatever the tables say; beside it one that is wrong at the end."""
    rng = random.Random(size)
    text = [rng.randrange(3) for _ in range(size)]
    given = {2: (text, [1, 0], text), 0: ([*text[:-1], 7], [], text)}
    batch = batch_of(given, K=64, curves=random_curves(5, 64))
    for done in (0, 1, 2, 64, 65, size):
        for request in batch.running.values():
            request.done = request.prompt_len + min(done, size)
        drafts = step(batch, [2, 0])
        if 0 < done < size and done <= 64:
            assert drafts[2] == text[done : done + 64]
        if done >= size:
            break


def test_more_edits_than_are_remembered() -> None:
    text = [t for i in range(22) for t in (100 + i, 2 * i, 200 + i, 300 + i, 400 + i, 500 + i)]
    output = [t + 31 if t < 50 else t for t in text]
    # The second time all of it comes again: the first edits are forgotten by then.
    batch = batch_of({0: (text + text, [], output + output)}, capacity=300)
    check(batch.walk(1.0))
    for drafter in batch.drafters.values():
        assert int(drafter._state.align_state[0, constants.NUM_EDITS]) > constants.MAX_EDITS


def test_exactly_the_nearest_occurrences_are_looked_at() -> None:
    """The only long match is the first or the last of the occurrences around the cursor, or one too many."""
    text = [t for i in range(60) for t in (100 + i, 200 + i, 7)]
    ends = [*range(-19, -12), *range(12, 20)]
    given = {slot: (text, [], [*text[:90], 130 + i, 230 + i, 7]) for slot, i in enumerate(ends)}
    batch = batch_of(given, max_slots=len(ends))
    for request in batch.running.values():
        request.done = 93
    drafts = step(batch, given)
    found = [i for slot, i in enumerate(ends) if drafts[slot][:1] == [131 + i]]
    assert (found[0], found[-1]) == (-16, 15)


def test_prefill_in_chunks_and_a_long_prompt() -> None:
    """Nothing changes while nothing is sampled; then the whole prompt is entered at once."""
    rng = random.Random(8)
    text = [rng.randrange(40) for _ in range(90)]
    prompt = [rng.randrange(40) for _ in range(1200)] + text[:60]
    batch = batch_of({1: (text, prompt, text)}, capacity=1500)
    for batch.running[1].done in (600, len(prompt)):
        assert step(batch, [1], 0) == {1: []}
    check(batch.walk(0.5))


def test_a_prompt_that_is_not_all_there() -> None:
    """Whatever was sampled: an output that has not begun, and is the beginning of every prediction."""
    prompt = [7, 8, 100, 101, 7, 8, 100, 9, 7, 8]
    tokens = [*prompt, *range(100, 104), 7, 8]
    texts = [list(range(100, 100 + num)) for num in (0, 1, 5, 90)]
    batch = batch_of({s: (text, prompt, tokens[10:]) for s, text in enumerate(texts)}, K=8, capacity=64)
    seen, drafted = -1, {}
    # From nothing to the first tokens of the output, and back into the prompt.
    for total in (0, 1, 3, 7, 9, 10, 11, 13, 16, 4, 12):
        for request in batch.running.values():
            request.done = total
            if total < seen:
                batch.take_back(request, total)
        seen, drafted[total] = total, step(batch, range(4))
        if total <= 10:
            assert [drafted[total][s] for s in (1, 2, 3)] == [text[:8] for text in texts[1:]]
    assert drafted[7][0] == [101, 7, 8, 100]


def test_a_vacant_slot_and_an_empty_batch() -> None:
    batch = batch_of({1: ([1, 2, 3], [], [1, 2, 3])}, max_slots=3)
    batch.running[1].done = 1
    # The engine's tensors may hold something where there is no request.
    batch.token_ids[2, :2], batch.total_len[2] = 7, 2
    assert step(batch, [2, 1, 0]) == {1: [2, 3]}
    assert step(batch, []) == {}


@pytest.mark.parametrize("total", [-(2**31), -1, 101, 116, 10**6, 2**31 - 1])
def test_no_row_is_read_beyond_its_ends(total: int) -> None:
    """On a GPU nobody looks at `total_len`: as an empty row, or as a full one."""
    rng = random.Random(12)
    text, row = ([rng.randrange(4) for _ in range(size)] for size in (90, 100))
    for prompt_len in (0, 3, 100):
        batch = batch_of(dict.fromkeys((1, 4), (text, row[:prompt_len], row[prompt_len:])), capacity=100)
        for request in batch.running.values():
            request.done = 100
        check(batch.step([4, 1, 0], [1, 1, 1], {4: total}))
        assert batch.running[4].draft == (text[:16] if total < 0 else [])
        # Nothing is sampled, or there is no request: its last token is read even so.
        check(batch.step([1, 0], [0, 1], dict.fromkeys(range(6), total)))


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_align.ops.kernels.step import step_kernel

    batch = batch_of({s: ([1, 2, 3, 4], [], [1, 2, 3, 4]) for s in (0, 3)})
    launched = []
    run = type(step_kernel).run

    def counted(self: object, *args: object, **kwargs: object) -> object:
        launched.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(type(step_kernel), "run", counted)
    step(batch, [3, 0])
    assert launched == [step_kernel]
