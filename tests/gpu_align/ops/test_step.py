"""Whole steps on both backends against plain Python: what is drafted, how sure it is, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu_align import DrafterConfig, Source
from gpu_align.ops.choose import NUM_CLASSES, SURVIVAL_ONE
from gpu_align.ops.recipes import LINE_END, NUM_RUNS
from gpu_align.texts.several import joined
from tests.gpu_align.engine import BACKENDS, INTERPRETED, distinct, drafted, edited, flat_curves
from tests.gpu_align.step_batch import Known, Running, StepBatch, StepRow, random_curves

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
def test_random_batches(backends: list[str], pytestconfig: pytest.Config) -> None:
    seen: Counter[str] = Counter()
    slow = len(backends) > 1 and INTERPRETED
    for seed in range((12 if slow else 60) * pytestconfig.getoption("--campaign-count")):
        for row in random_rows(seed, 40 if slow else 80, backends):
            if isinstance(row, StepRow):
                assert not row.wrong, (seed, row.wrong, row.of)
                seen[row.source] += 1
            else:
                seen += row
    kinds = {"nothing", "prediction", "context", "memory", "in sync", "diverged", "edits", "samples"}
    assert set(seen) == kinds | ({"recipe"} if len(backends) > 1 else set())


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


NOVEL = 999
SHORT, LINE, LONG = [5, 6, 7, 8, 9, 2, 3], [1, 2, 3], distinct(7, 1)
A, B, C = (distinct(8, start) for start in (100, 120, 140))
FEW = [distinct(3, 200 + 20 * i) for i in range(5)]
BLOCKS = [token for token in range(8) for _ in range(32)]
#: Every 7 ends around the anchor before the one that would match: 34 of them, or 24.
MANY = [t for i in range(17) for t in (7, 100 + i)]
SEVEN = [*distinct(7, 700), 7]
EDITED = [t for i in range(22) for t in (100 + i, 2 * i, 200 + i, 300 + i, 400 + i, 500 + i)]
ONCE = [(LINE, [1, 9, 3]), (LINE, LINE)]
AGAIN, BACK = [(LINE, [1, 9, 3])] * 2, [([4, 5, 6], [4, 9, 6]), ([4, 5, 6], [4, 5, 6])]


def lines(*pairs: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
    """Prediction and output: for each line as it was and as it is written these, and eight tokens that stay; then,
    in the prediction alone, a line that was not edited yet."""
    prediction, output = (
        [t for i, pair in enumerate(pairs) for t in (*pair[side], *distinct(8, 20 + 8 * i))]
        for side in (0, 1)
    )
    return [*prediction, 1, 2, 3, 900, 901], output


def cut(at: int, old: int, new: Tokens, size: int = 60) -> tuple[Tokens, Tokens]:
    text = distinct(size)
    return text, [*text[:at], *new, *text[at + old :][:12]]


def away(num: int) -> tuple[Tokens, Tokens]:
    """Tokens in an order that is never four in a row of the prediction: the request stays away."""
    return distinct(num), [*distinct(5), *random.Random(num).sample(range(6, num, 2), min(num // 2 - 3, 30))]


def around(anchor: int) -> tuple[Tokens, Tokens]:
    """A block that ends at 30 and at 130; the anchor is what the output follows up to."""
    block = distinct(8, 700)
    text = [*distinct(22), *block, *distinct(92, 100), *block, *distinct(50, 300)]
    return text, [*text[:anchor], *[NOVEL] * (-(anchor + 8) % 8), *block]


def equal_matches(*ends: int) -> tuple[Tokens, Tokens]:
    """The request is away at 30. The token 700 is all that matches, and matches everywhere."""
    text = distinct(120)
    for end in ends:
        text[end - 1] = 700
    return text, [*text[:30], 700]


def at_places(*same: int, size: int = 60) -> Tokens:
    """The token 19 also at these positions: matches far from the cursor, of one token."""
    return [19 if i in same else i for i in range(size)]


#: Prediction and output: where an output stands in its prediction, which edits it knows, what it drafts from.
CASES: list[tuple[Tokens, Tokens]] = [
    # In sync; diverged, where no token is taken for one that the prediction does not have; rows and carries.
    *((distinct(200), distinct(n)) for n in (0, 1, 63, 64, 65, 128, 200)),
    *((distinct(90), [*distinct(n), NOVEL, NOVEL]) for n in (0, 10, 63, 64, 65, 90)),
    *((distinct(9), [*distinct(6), *[token] * 5]) for token in (-1, -3, 2**31 - 1, -(2**31))),
    away(20), away(300),
    *((BLOCKS, [NOVEL, *written]) for written in ([1, 3, 1, 3, 0, 2, 3], [3, 3, 2, 0, 3, 1, 3])),
    # Local resync: four tokens that stand together within 32 of the anchor, the first of several, never before it.
    *((SHORT, [5, 6, 1, 8, 9, 2, 3][:n]) for n in (3, 4, 6, 7)),
    (distinct(40), [*distinct(10), *distinct(3, 13)]),
    *((distinct(90), [*distinct(10), *distinct(4, 10 + skipped)]) for skipped in (27, 28)),
    ([*distinct(10), 50, 1, 2, 3, 4, 51, 1, 2, 3, 4, 52], [*distinct(10), NOVEL, 1, 2, 3, 4]),
    (distinct(40), [*distinct(20), NOVEL, *distinct(4, 10)]),
    ([*distinct(10), 7, 8, 9, 50, 60, 61], [*distinct(10), 50]),
    (distinct(20), [*distinct(10), NOVEL, *distinct(4, 16)]),
    # Global resync: eight tokens that stand together anywhere, at every eighth token; the nearest, or one ahead.
    ([*distinct(100), *distinct(7, 500), *C], [*distinct(8), NOVEL, *distinct(7, 500)]),
    *((distinct(300), [*distinct(n), *distinct(num, 200)]) for n in (4, 7, 9) for num in range(6, 16)),
    *((distinct(300), [*distinct(100), *distinct(12, 200), *distinct(n, 40)]) for n in (8, 9)),
    *(([*MANY, *MANY[:n], *SEVEN, *C], [*MANY, 500, *[501] * 5, *SEVEN]) for n in (14, 34)),
    *map(around, (16, 72, 79, 80, 88)),
    *((distinct(400), [*distinct(21), *distinct(40, 21 + n), 1, *distinct(47, 3)]) for n in (32, 40, 250, 300)),
    # The cursor after it diverged, and places behind the end.
    *((distinct(num), [*distinct(10), *written]) for num in (10, 12, 400) for written in ([13, 14], [13])),
    ([5, 6, 7, 8, 9], [5, 6, 1, 9]),
    *((distinct(400), [*distinct(10), *range(first, first + 61, 4)]) for first in range(10, 15)),
    # Edits: of each kind and size, at the ends, replayed, invalidated, in other surroundings.
    cut(0, 1, [500]), cut(10, 0, [NOVEL, 800]), cut(10, 3, []), cut(20, 2, [503] * 7),
    *(cut(20, old, [500] * new) for size in (16, 17) for old, new in ((size, 1), (1, size))),
    *((distinct(10), [*distinct(8), *distinct(4, n)]) for n in (5, 6)),
    ([*distinct(20), 5, 6, 7, 8], [*distinct(20), *distinct(4, 5) * 2]),
    *(([*LINE, *A, *LINE, *B], [1, *changed, 3, *A]) for changed in ([9], [9, 8, 7], [], [9, 2], [2])),
    *(([*LINE, *A, *LINE, *B], [1, 9, *rest, *A, *more]) for rest in ([3], LINE[1:]) for more in ([1], [1, 2])),
    ([*LINE, *A, *LINE, *B], [1, 9, -5, 3, *A]),
    *(([*LINE, *A, *LINE, *B, *LINE, *C], [1, 9, 3, *A, *second, *B]) for second in ([1, 8, 7, 3], LINE)),
    ([*LINE, *A, *LINE, *distinct(16, 40)], [1, 9, 3, *A, *LINE, *distinct(4, 40), 99, *distinct(4, 45)]),
    *(([*LINE, *A, *other, *B], [1, 9, 3, *A]) for other in ([4, 2, 3], [1, 4, 3], [1, 2, 4])),
    ([2, 3, *A, 2, 3, *B], [9, 3, *A]),
    ([1, 2, 2, 2, 2, *A, 5, 2, 2, 2, 2, *B], [1, 2, 9, 2, 2, 2, *A]),
    ([*LINE, *A, *LINE], [1, *distinct(16, 200), 3, *A]),
    *(([*LINE, *A, 1, 2], [1, 9, 3, *A, *more]) for more in ([], [1, 2])),
    *(([*LONG, *A, *LONG[:left]], [1, 7, *A]) for left in range(3, 8)),
    (
        [*LINE, *FEW[0], *distinct(4, 500), *(t for gap in FEW[1:] for t in (*LINE, *gap))],
        [1, 9, 3, *FEW[0], *distinct(2, 800), *distinct(4, 500)],
    ),
    # More edits than are remembered, and then all of it again: the first are forgotten by then.
    (EDITED * 2, [t + 31 if t < 50 else t for t in EDITED * 2][:200]),
    *(lines(*p) for p in (ONCE[:1], ONCE, AGAIN, [*AGAIN, *BACK], [*ONCE, *BACK], [*BACK, *BACK, *AGAIN])),
    # Candidates: of equal matches the nearest, then the one ahead; longer ones; far positions; shares in sync.
    *(equal_matches(*ends) for ends in ((10, 50), (11, 50), (10, 51), (5, 8, 70, 90), (50, 51, 52, 53))),
    *((at_places(4, 5, 8, 45), [NOVEL, *distinct(20)][n:]) for n in (0, 1)),
    (at_places(8, 100, 359, 360, size=400), [*at_places(8, 100, 359, 360, size=400)[:103], 19]),
    *(([*A, *distinct(n, 200), *distinct(20, 500)], [900, *distinct(n, 200)]) for n in (1, 2, 4, 63, 64, 65)),
    *((distinct(60), [*distinct(n), *distinct(m, 500)]) for n in (0, 1, 3, 4, 5) for m in (3, 4, 5, 7, 8, 24, 35)),
    # The whole output is the beginning of the prediction, or as many tokens as that has.
    *(([*[7] * 66, *range(14)], [7] * n) for n in (0, 1, 63, 64, 65)),
    *((distinct(40), [*distinct(9), *new, *distinct(9, 11)]) for new in ([NOVEL], [NOVEL, NOVEL - 1])),
    # What the output repeats goes on: a match that spans the period wraps around, another does not.
    *(([], [5, *distinct(period, 10) * 2]) for period in (1, 2, 3, 7, 15, 16)),
    *(([], [*A, *A[:matched]]) for matched in (1, 7, 8)),
]  # fmt: skip
PLACES = np.arange(NUM_CLASSES) // 3 % 5
#: Only candidates at some places are drafted from; `random_curves` give each class confidences of its own.
CURVES = {
    "flat": flat_curves(SURVIVAL_ONE, 32),
    "random": random_curves(5, 32),
    **{
        f"places {some}": np.where(np.isin(PLACES, some)[:, None], SURVIVAL_ONE // 2, 1).repeat(32, axis=1)
        for some in ([0, 2], [1, 3], [4])
    },
}


@pytest.mark.parametrize("curves", CURVES)
@pytest.mark.parametrize("backends", [["reference"], BACKENDS], ids=["reference", "both"])
def test_cases(backends: list[str], curves: str) -> None:
    """All of them in one batch, their tokens in two steps."""
    rng = random.Random(curves)
    cases = CASES[:: 5 if len(backends) > 1 and INTERPRETED and curves != "flat" else 1]
    config = DrafterConfig(min_survival=2 / SURVIVAL_ONE, min_survival_lost=0)
    batch = batch_of(
        {slot: (prediction, [], output) for slot, (prediction, output) in enumerate(cases)}, rng,
        backends=backends, K=32, capacity=260, max_slots=len(cases), config=config, curves=CURVES[curves],
    )  # fmt: skip
    for num in (lambda most: rng.randint(0, most), lambda most: most):
        for request in batch.running.values():
            request.done = num(len(request.tokens))
        check(batch.step(range(len(cases)), [1] * len(cases)))


README = [[*map(ord, text)] for text in ("a = get(n)\nb = get(m)\n", "a = put(n)\nb", " = put(m)\n")]
PROMPT = [*distinct(9, 300), 107, 50, *distinct(3, 60), 301]
KEYS = [1, 2, 3, 50, 9, *A, 4, 5, 6, 51, 9, *B]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("prediction", "output", "prompt", "expected"),
    [
        (README[0], README[1], [], (README[2], Source.PREDICTION)),
        # Three blocks that end alike and go on differently; the output drops the first one.
        ([*A, 8, *B, 8, *C, 8], [*B, 8], [], ([*C, 8], Source.PREDICTION)),
        ([], [*A, 7, 7, *A[:4]], [], ([*A[4:], 7, 7, *A[:4]], Source.CONTEXT)),
        (distinct(40), [], [5, 6], (distinct(32), Source.PREDICTION)),
        # What is drafted from the context is copied: the edit 50 -> 51 is known, the context has 107 50 60.
        ([*A, 50, *distinct(20, 60)], [*A, 51, *distinct(6, 60), *PROMPT[:9]], PROMPT,
         ([107, 50, 60, 61, 62, 301, *A, 51, *distinct(6, 60), *PROMPT[:9]][:32], Source.CONTEXT)),
        # Of two 9 the one with more in common before it, though the other is the latest, or nearer to the cursor.
        ([], [1, 2, 3, 52, 9], KEYS, ([*A, 4, 5, 6, 51, 9, *B[:3]], Source.CONTEXT)),
        ([*KEYS[13:], *distinct(80, 700), *KEYS[:13]], [1, 2, 3, 52, 9], [], (A, Source.PREDICTION)),
        # A deletion of all that is left drafts nothing.
        ([*LONG, *A, *LONG[:6]], [1, 7, *A, 1], [], ([], Source.NONE)),
    ],
)  # fmt: skip
def test_examples_by_hand(
    backend: str, prediction: Tokens, output: Tokens, prompt: Tokens, expected: Any
) -> None:
    curves = flat_curves(SURVIVAL_ONE, K=32)
    config = DrafterConfig(use_context=expected[1] == Source.CONTEXT)
    tokens, source, _ = drafted(backend, prediction, output, prompt, K=32, curves=curves, config=config)
    assert (tokens, source) == expected


#: Words, line ends, and runs of one to six spaces and of one to three tabs.
END, SPACES, TABS = 100, {n: 110 + n for n in range(1, 7)}, {n: 120 + n for n in range(1, 4)}


def layout(size: int = 200) -> np.ndarray[Any, Any]:
    """`Recipes.indents` of these, of so many tokens."""
    indents = np.zeros(NUM_RUNS + size, dtype=np.int32)
    indents[:NUM_RUNS] = -1
    for kind, runs in enumerate((SPACES, TABS)):
        for n, token in runs.items():
            indents[2 * n + kind], indents[NUM_RUNS + token] = token, 2 * n + kind
    indents[NUM_RUNS + END] = LINE_END
    return indents


def rows_of(*rows: tuple[int | None, ...]) -> Tokens:
    """Tokens of lines: each an indentation token (or None) and its words."""
    return [token for row in rows for token in (*row, END) if token is not None]


def block(by: int = 0) -> tuple[tuple[int, ...], ...]:
    """Four lines, so much further in; a run inside a line stays."""
    n, m = SPACES[2 + by], SPACES[3 + by]
    return (n, 1, 2, 3), (m, 4, 5, 6), (n, 7, SPACES[1], 8), (n, 9)


BEFORE = rows_of((None, 50), *block())
THREE = {by: rows_of((None, 50), (SPACES[2], 1, 2, 3), (SPACES[2], 4), (SPACES[2 + by], 5)) for by in (-1, 1)}
WIDE = [(SPACES[2], 50, 3 * i, 3 * i + 1, 3 * i + 2) for i in range(1, 9)]
MOVED = [(SPACES[4], *words) for _, *words in WIDE]
REST = {by: rows_of(*block(by)[1:]) for by in (-1, 0, 2)}
#: Prediction, prompt, output, draft: as far in or out as the output is.
INDENTED: list[tuple[Tokens, Tokens, Tokens, Tokens]] = [
    *((BEFORE, [1], rows_of((None, 60), block(by)[0]), REST[by]) for by in (2, -1)),
    # A draft ends before a run that no token is: six spaces are the most, one the least.
    *(
        (THREE[by], [1], rows_of((None, 60), (SPACES[n], 1, 2, 3)), [SPACES[n], 4, END])
        for by, n in ((1, 6), (-1, 1))
    ),
    ([], [1], [*BEFORE, *rows_of((None, 60), block(2)[0])], [*REST[2], 60, END, SPACES[6]]),
    # No shift is known: tabs, no line end before the run, a word in place of a run, a run in place of a word.
    *((BEFORE, [1], [60, *run, 1, 2, 3, END], REST[0]) for run in ([END, TABS[2]], [61, SPACES[4]], [END, 61])),
    ([50, END, 61, *rows_of((None, 1, 2, 3)), *REST[0]], [1], rows_of((None, 60), block()[0]), REST[0]),
    # Where the match goes back to the beginning of the output, no line of the output is known.
    *((BEFORE, [60, END, SPACES[4]][:n], [SPACES[4], 1, 2, 3, END][n - 2 :], REST[0]) for n in (2, 3)),
    # What is beyond the table is no line end and no run; an edit that is replayed is not moved again.
    ([150, 160, *rows_of(*[(SPACES[2], 1, 2, 3)] * 2)], [1], [151, 161, *rows_of((SPACES[4], 1, 2, 3))],
     rows_of((SPACES[2], 1, 2, 3))),
    (rows_of((None, 60), *WIDE), [1], rows_of((None, 61), *MOVED[:5]), rows_of(*MOVED[5:])[:16]),
]  # fmt: skip


@pytest.mark.parametrize("size", [200, 130])
def test_indentation(size: int) -> None:
    how = {"length_factor": 64, "min_survival": 0, "min_survival_lost": 0}
    given = {
        slot: (prediction, prompt, output) for slot, (prediction, prompt, output, _) in enumerate(INDENTED)
    }
    batch = batch_of(
        given, known=Known(indents=layout(size)), vocab_size=200, config=DrafterConfig(**how),
        max_slots=len(INDENTED), capacity=256,
    )  # fmt: skip
    for request in batch.running.values():
        request.done = len(request.tokens)
    assert step(batch, batch.running) == {slot: draft for slot, (*_, draft) in enumerate(INDENTED)}


def test_the_longest_match_takes_all_drafts() -> None:
    """Whatever the length factor is; one token fewer takes none where that is 0."""
    text, config = list(range(90)), DrafterConfig(length_factor=0, min_survival=0)
    batch = batch_of({n - 63: (text, [], [98, *text[:n]]) for n in (63, 64)}, vocab_size=100, config=config)
    for request in batch.running.values():
        request.done = len(request.tokens)
    assert step(batch, batch.running) == {0: [], 1: text[64:80]}


def test_samples_are_drafted_from_by_tables_of_their_own() -> None:
    """Several predictions, from a temperature of 0.3 on; below, and for one prediction, drafts are as ever."""
    rng, heats = random.Random(4), (0.0, 0.29, 0.3, 0.6, 0.85, 1.5)
    text = [rng.randrange(12) for _ in range(40)]
    samples = [edited(rng, text, 12, 40) for _ in range(6)]
    given = [(joined(samples[1:]), heat) for heat in heats] + [(samples[1], heat) for heat in (0.0, 0.7)]
    batch = StepBatch(rng, max_slots=len(given), capacity=64)
    for slot, (prediction, temperature) in enumerate(given):
        tokens = [*text[:4], *samples[0]]
        batch.add(slot, Running(prediction, 4, tokens, 4, temperature=temperature))
    drafts: list[list[Any]] = [[] for _ in given]
    for done in range(5, 44, 5 if INTERPRETED else 1):
        for request in batch.running.values():
            request.done = done
            request.splits.append(done)
        rows = batch.step(range(len(given)), [1] * len(given))
        check(rows)
        for slot, row in enumerate(rows):
            drafts[slot].append(row.expected)
    assert drafts[0] == drafts[1] != drafts[2] != drafts[3] != drafts[4] == drafts[5]
    assert drafts[6] == drafts[7]


def test_prefill_in_chunks_and_a_long_prompt() -> None:
    """Nothing changes while nothing is sampled; then the whole prompt is entered at once."""
    rng = random.Random(8)
    text = [rng.randrange(40) for _ in range(90)]
    prompt = [rng.randrange(40) for _ in range(1200)] + text[:60]
    batch = batch_of({1: (text, prompt, text)}, capacity=1500)
    for batch.running[1].done in (600, len(prompt)):
        assert step(batch, [1], 0) == {1: []}
    check(batch.walk(0.5))


def test_a_vacant_slot_and_an_empty_batch() -> None:
    batch = batch_of({1: ([1, 2, 3], [], [1, 2, 3])}, max_slots=3)
    batch.running[1].done = 1
    # The engine's tensors may hold something where there is no request.
    batch.token_ids[2, :2], batch.total_len[2] = 7, 2
    assert step(batch, [2, 1, 0]) == {1: [2, 3]}
    assert step(batch, []) == {}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((), 16), ((9,), 16), ((8,), 9), ((0,), 1), ((8, 3), 4), ([*range(99, 91, -1), 3], 16),
        ((-1, 100, 2**40, 3), 4), (np.array([5], np.int64), 6),
    ],
)  # fmt: skip
def test_no_draft_goes_on_after_an_end_token(ends: Any, expected: int) -> None:
    """The prediction is 0 … 8, 10 …; ids that are no token are ignored, and what comes after eight others."""
    batch, text = StepBatch(random.Random(7), vocab_size=100), [*range(9), *range(10, 40)]
    batch.add(0, Running(text, 2, [50, 51, *text], 2, end_tokens=ends))
    assert step(batch, [0]) == {0: text[:expected]}


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
