"""The kernel of a step against plain Python, step by step: drafts, confidences, sources and what it remembers."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gpu_align.ops import constants
from gpu_align.ops.constants import (
    NUM_CLASSES,
    PAGE,
    SURVIVAL_ONE,
    VACANT,
    WAYS,
    context_index_bits,
    whole_pages,
)
from gpu_align.ops.draft import SurvivalTables, allocate_draft
from gpu_align.ops.recipe_lookup import Recipes, RecipeTable
from gpu_align.ops.slots import occupy_slot, store_prediction
from gpu_align.ops.state import StepSettings, StepState
from gpu_align.ops.step import StepLaunch
from gpu_align.ops.suffix_match import BLOCK, build_index
from tests.gpu_align.step_harness import BACKENDS, device_of, recipes_of
from tests.gpu_align.step_oracle import Oracle, bucket_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 0x5A5A5A5
RECIPE_FLOOR = 0.15
SLOTS = 6


class Settings(NamedTuple):
    K: int = 16
    quarters: int = 32
    vocab_size: int = 1000
    capacity: int = 512
    min_match: int = 1
    min_context_match: int = 1
    tables: str = "shipped"
    recipes: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...] = ()


@cache
def tables_of(name: str, K: int) -> SurvivalTables:
    if name == "shipped":
        return SurvivalTables.load(K, DEVICE)
    rng = np.random.default_rng(5)
    curves = np.sort(rng.integers(1, SURVIVAL_ONE + 1, (NUM_CLASSES, K)), axis=1)[:, ::-1].copy()
    # Some classes are never drafted from, some drafts are sure.
    curves[rng.random(NUM_CLASSES) < 0.1] = 1
    curves[rng.random(NUM_CLASSES) < 0.1] = SURVIVAL_ONE
    return SurvivalTables.from_survival(curves.astype(np.int32), DEVICE, 0.05, 0.35)


class Request(NamedTuple):
    prediction: list[int]
    prompt: list[int]
    output: list[int]
    use_context: bool = True


class Running:
    """A request in its slot and the oracle beside it."""

    def __init__(self, request: Request, how: Settings) -> None:
        self.request, self.how = request, how
        self.tokens = list(request.prompt)
        self.start_over()

    def start_over(self) -> None:
        r, how = self.request, self.how
        self.oracle = Oracle(
            r.prediction, len(r.prompt), tables_of(how.tables, how.K), K=how.K, quarters=how.quarters,
            vocab_size=how.vocab_size, capacity=how.capacity, min_match=how.min_match,
            min_context_match=how.min_context_match, use_context=r.use_context,
            recipes=how.recipes, recipe_floor=RECIPE_FLOOR,
        )  # fmt: skip

    def left(self) -> int:
        return len(self.request.prompt) + len(self.request.output) - len(self.tokens)

    def advance(self, num: int) -> None:
        done = len(self.tokens) - len(self.request.prompt)
        self.tokens += self.request.output[done : done + num]


def plausible(size: int) -> torch.Tensor:
    """Tokens for where none were written: what reads them finds matches that are not there."""
    return (torch.arange(size, dtype=torch.int32, device=DEVICE) * 0x61C9) % 11 % 4


class Batch:
    """All tensors of a drafter, garbage wherever nothing was written; one launch a step."""

    def __init__(self, requests: dict[int, Request], how: Settings, num_slots: int = SLOTS) -> None:
        self.how, self.tables = how, tables_of(how.tables, how.K)
        self.recipes = RecipeTable.build(
            Recipes.from_lists(how.recipes), how.K, DEVICE, RECIPE_FLOOR, how.vocab_size
        )
        pages = 1 + sum(-(-max(len(r.prediction), 1) // PAGE) + 1 for r in requests.values())
        arena = pages * PAGE
        S, buckets = num_slots, 1 << context_index_bits(how.capacity)

        def filled(*shape: int, dtype: torch.dtype = torch.int32, value: int = GARBAGE) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=DEVICE)

        self.state = StepState(
            prediction_tokens=plausible(arena), positions=filled(arena), offsets=filled(arena),
            slot_meta=filled(S, constants.SLOT_META), align_state=filled(S, constants.ALIGN_STATE),
            lcs_row=filled(S, constants.WINDOW, dtype=torch.int16, value=-999),
            edits=filled(S, constants.MAX_EDITS, constants.EDIT),
            context_index=filled(S, buckets, WAYS),
        )  # fmt: skip
        self.state.slot_meta[:, constants.OUTPUT_START] = VACANT
        # A slice of a wider tensor: the stride is not the length.
        self.token_ids = filled(S, how.capacity + 16)[:, : how.capacity]
        self.total_len = filled(S, value=0)
        self.running: dict[int, Running] = {}
        self.sources: set[int] = set()
        base = PAGE
        for slot, request in requests.items():
            base = self.add(slot, request, base) + PAGE

    def add(self, slot: int, request: Request, base: int) -> int:
        """Put a request in a slot; returns where the next prediction may begin."""
        n = len(request.prediction)
        if n:
            store_prediction(self.state, base, np.array(request.prediction, dtype=np.int32))
        occupy_slot(self.state, slot, base, n, len(request.prompt), request.use_context)
        self.running[slot] = Running(request, self.how)
        return base + whole_pages(n)

    def write(self, slot: int) -> None:
        """The engine's own tensors, as after sampling."""
        tokens = self.running[slot].tokens
        self.token_ids[slot] = plausible(self.how.capacity)
        self.token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        self.total_len[slot] = len(tokens)

    def total(self, slot: int) -> int:
        """What counts of a row, whatever the engine says: what is in it."""
        return min(max(int(self.total_len[slot]), 0), self.how.capacity)

    def step(self, slots: list[int], sampled: list[int]) -> dict[int, list[int]]:
        """Launch for these slots and compare everything; returns each one's drafts."""
        how, B = self.how, len(slots)
        out = allocate_draft(B, how.K, DEVICE)
        for tensor in out:
            tensor.fill_(77)
        before = [t.clone() for t in self.state]
        settings = StepSettings(how.quarters, how.min_match, how.min_context_match, how.vocab_size)
        StepLaunch(self.state, self.tables, self.recipes, out, settings)(
            self.token_ids,
            self.total_len,
            torch.tensor(slots, dtype=torch.int64, device=DEVICE),
            torch.tensor(sampled, dtype=torch.int32, device=DEVICE),
        )
        drafts = {}
        active = [s for s, n in zip(slots, sampled, strict=True) if n > 0 and s in self.running]
        for b, slot in enumerate(slots):
            tokens = self.token_ids[slot, : self.total(slot)].tolist()
            # Nothing is drafted for a slot without a request; the last token it has pads.
            draft, class_id, source = (
                self.running[slot].oracle.step(tokens) if slot in active else ([], -1, 0)
            )
            last = tokens[-1] if tokens and 0 <= tokens[-1] < how.vocab_size else 0
            note = f"slot {slot} after {len(tokens)} tokens"
            length = int(out.length[b])
            assert out.token_ids[b, :length].tolist() == draft, note
            assert out.token_ids[b].tolist() == draft + [last] * (how.K - len(draft)), note
            assert int(out.source[b]) == source, note
            self.sources.add(source)
            expected = torch.zeros(how.K, device=DEVICE)
            tables = self.recipes if source == 3 else self.tables
            expected[:length] = tables.confidence[class_id, :length]
            assert torch.equal(out.confidence[b], expected), note
            drafts[slot] = draft
        for name, old, new in zip(self.state._fields, before, self.state, strict=True):
            if name in ("prediction_tokens", "positions", "offsets", "slot_meta"):
                assert torch.equal(old, new), name
            else:
                others = [s for s in range(len(new)) if s not in active]
                assert torch.equal(old[others], new[others]), f"{name} of a slot that was not active"
        for slot in active:
            self.check_state(slot)
        return drafts

    def check_state(self, slot: int) -> None:
        oracle, state = self.running[slot].oracle, self.state
        aligned = state.align_state[slot].tolist()
        assert aligned[:6] == [
            self.total(slot), int(oracle.in_sync), oracle.cursor,
            oracle.anchor, oracle.diverged_at, oracle.num_in_sync,
        ]  # fmt: skip
        if not oracle.in_sync:
            assert state.lcs_row[slot].tolist() == oracle.row[1:]
        num_edits = aligned[constants.NUM_EDITS]
        assert min(num_edits, constants.MAX_EDITS) == len(oracle.edits)
        ways = state.edits[slot].tolist()
        oldest_first = [
            ways[i % constants.MAX_EDITS] for i in range(num_edits, num_edits + constants.MAX_EDITS)
        ]
        expected = [None] * (constants.MAX_EDITS - len(oracle.edits)) + oracle.edits
        for way, edit in zip(oldest_first, expected, strict=True):
            if edit is None:
                assert way[constants.EDIT_BEFORE] == constants.NO_EDIT
            else:
                assert way[:7] == list(edit)
        if oracle.use_context:
            recent = np.full((state.context_index.shape[1], WAYS), -1)
            for (bucket, way), end in oracle.recent.items():
                recent[bucket, way] = end
            assert np.array_equal(state.context_index[slot].cpu().numpy(), recent)


def generate(batch: Batch, rng: random.Random, follow: float = 0.7, steps: int = 10_000) -> None:
    """Run all requests to their end: often a step accepts what was drafted, else a random number of tokens."""
    drafts: dict[int, list[int]] = {}
    for slot in batch.running:
        batch.write(slot)
    for _ in range(steps):
        slots = [s for s, r in batch.running.items() if r.left() > 0]
        if not slots:
            return
        rng.shuffle(slots)
        slots = slots[: rng.randint(1, len(slots))]
        sampled = []
        for slot in slots:
            r = batch.running[slot]
            if rng.random() < 0.05:
                sampled.append(0)
                continue
            num = rng.choice([1, 1, 1, 2, 3, 7, 40, 200])
            if rng.random() < follow:
                num, draft = 1, drafts.get(slot, [])
                coming = r.request.output[len(r.tokens) - len(r.request.prompt) :]
                while num <= len(draft) and num < len(coming) and draft[num - 1] == coming[num - 1]:
                    num += 1
            r.advance(num)
            batch.write(slot)
            sampled.append(num)
        drafts |= batch.step(slots, sampled)


def edited(rng: random.Random, text: list[int], alphabet: int, edits: int) -> list[int]:
    """`text` with parts inserted, deleted, replaced, moved and doubled, and one token renamed throughout."""
    out = list(text)
    for _ in range(edits):
        at, num = rng.randint(0, len(out)), rng.choice([1, 1, 2, 5, 20])
        kind = rng.randrange(5)
        new = [rng.randrange(alphabet) for _ in range(rng.choice([1, 1, 2, 3, 20]))]
        if kind == 0:
            out[at:at] = new
        elif kind == 1:
            del out[at : at + num]
        elif kind == 2:
            out[at : at + num] = new
        else:
            piece = out[at : at + 3 * num]
            if kind == 3:
                del out[at : at + 3 * num]
            to = rng.randint(0, len(out))
            out[to:to] = piece
    if out and rng.random() < 0.5:
        old, new = rng.choice(out), [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 3]))]
        out = [t for token in out for t in (new if token == old else [token])]
    return out


def request_of(rng: random.Random, size: int, alphabet: int, edits: int, longest: int) -> Request:
    text = [rng.randrange(alphabet) for _ in range(size)]
    prompt = [rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 5, 30]))]
    if rng.random() < 0.3:
        prompt += text[: rng.randint(0, size)]
    prompt = prompt[: longest // 2]
    output = edited(rng, text, alphabet, edits) or [0]
    return Request(text, prompt, output[: longest - len(prompt)], rng.random() < 0.8)


@pytest.mark.parametrize("K", [1, 4, 16])
@pytest.mark.parametrize("alphabet", [2, 6])
def test_recipes_beside_everything_else(alphabet: int, K: int) -> None:
    rng = random.Random(f"recipes {alphabet} {K}")
    # Tokens of a recipe may be none that the model has: the draft ends before them.
    how = Settings(K=K, capacity=200, recipes=recipes_of(rng, alphabet, 60), vocab_size=max(alphabet - 1, 2))
    requests = {s: request_of(rng, rng.choice([0, 1, 40, 130]), alphabet, 8, 120) for s in range(SLOTS - 2)}
    batch = Batch(requests, how)
    generate(batch, rng, follow=0.4)
    assert 3 in batch.sources
    assert K == 1 or batch.sources & {1, 2}


@pytest.mark.parametrize("tables", ["shipped", "random"])
@pytest.mark.parametrize("alphabet", [2, 4, 30, 900])
def test_random_edits(alphabet: int, tables: str) -> None:
    rng = random.Random(f"{alphabet} {tables}")
    how = Settings(tables=tables, capacity=300)
    sizes = [0, 1, 2, 40, 130, 200]
    requests = {s: request_of(rng, rng.choice(sizes), alphabet, 4, 200) for s in range(SLOTS - 2)}
    generate(Batch(requests, how), rng, follow=0.5)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 255, 256, 257])
def test_a_perfect_prediction(size: int) -> None:
    """From the first step on K drafts, whatever the tables say; beside it one that is wrong at the end."""
    rng = random.Random(size)
    text = [rng.randrange(3) for _ in range(size)]
    how = Settings(K=64, tables="random")
    batch = Batch({2: Request(text, [1, 0], text), 0: Request([*text[:-1], 7], [], text)}, how)
    for done in (0, 1, 2, 64, 65, size):
        for r in batch.running.values():
            r.tokens = [*r.request.prompt, *text[:done]]
        for slot in batch.running:
            batch.write(slot)
        drafts = batch.step([2, 0], [1, 1])
        if 0 < done < size and done <= 64:
            assert drafts[2] == text[done : done + how.K]
        if done >= size:
            break


def renamed(blocks: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prediction in which the same three tokens come again and again, and an output with other ones there."""
    text: list[int] = []
    output: list[int] = []
    for i in range(blocks):
        filler = [100 + rng.randrange(800) for _ in range(rng.randint(4, 9))]
        text += [*filler, 1, 2, 3]
        new = [[1, 7, 3], [1, 8, 9, 3], [1, 3], [1, 2, 3], [1, 2, 5, 3]][0 if i < blocks // 2 else i % 5]
        output += filler + new
        if i % 4 == 3:
            # Another place that is edited, and left as it is the next time.
            text += [11, 12, 13, 14]
            output += [11, 12, 13, 14] if i % 8 == 7 else [11, 20 + i, 21 + i, 13, 14]
    return text, output


@pytest.mark.parametrize("K", [16, 64])
def test_a_rename_is_replayed(K: int) -> None:
    rng = random.Random(K)
    text, output = renamed(24, rng)
    batch = Batch(
        {3: Request(text, [], output), 1: Request(text, [5], output, False)}, Settings(K=K, capacity=600)
    )
    generate(batch, rng, follow=1.0)


def test_more_edits_than_are_remembered() -> None:
    rng = random.Random(3)
    text = [t for i in range(22) for t in (100 + i, 2 * i, 200 + i, 300 + i, 400 + i, 500 + i)]
    output = [t + 31 if t < 50 else t for t in text]
    # The second time all of it comes again: the first edits are forgotten by then.
    batch = Batch({0: Request(text + text, [], output + output)}, Settings(capacity=300))
    generate(batch, rng, follow=1.0)
    assert int(batch.state.align_state[0, constants.NUM_EDITS]) > constants.MAX_EDITS


@pytest.mark.parametrize("gap", [20, 32, 40, 250, 300])
def test_a_long_deletion_and_a_move(gap: int) -> None:
    """Back within `LOCAL_RANGE` at once, farther at an eighth token, from beyond the window, and from behind."""
    rng = random.Random(gap)
    text = [rng.randrange(900) for _ in range(400)]
    output = text[:21] + text[21 + gap :][:40] + [1, 2] + text[3:50]
    batch = Batch({4: Request(text, [], output)}, Settings(capacity=256))
    generate(batch, rng, follow=0.3)


@pytest.mark.parametrize("period", [1, 3])
def test_tokens_that_occur_everywhere(period: int) -> None:
    """Many more occurrences than are looked at, around a cursor in the middle; several searches deep."""
    rng = random.Random(period)
    text = [i % period for i in range(1500)]
    output = [*text[:700], 9, *text[2:90]]
    batch = Batch({0: Request(text, [0] * 40, output)}, Settings(capacity=900))
    batch.running[0].advance(660)
    generate(batch, rng, follow=0.3)


def test_exactly_the_nearest_occurrences_are_looked_at() -> None:
    """The only long match is the first or the last of the occurrences around the cursor, or one too many."""
    text = [t for i in range(60) for t in (100 + i, 200 + i, 7)]
    outputs = {i: [*text[:90], 130 + i, 230 + i, 7] for i in (*range(-19, -12), *range(12, 20))}
    requests = {s: Request(text, [], output) for s, output in enumerate(outputs.values())}
    batch = Batch(requests, Settings(), num_slots=len(requests))
    for slot, r in batch.running.items():
        r.advance(93)
        batch.write(slot)
    drafts = batch.step(list(requests), [1] * len(requests))
    found = [i for slot, i in enumerate(outputs) if drafts[slot][:1] == [131 + i]]
    assert (found[0], found[-1]) == (-16, 15)


def test_prefill_in_chunks_and_a_long_prompt() -> None:
    """Nothing changes while nothing is sampled; then the whole prompt is entered at once."""
    rng = random.Random(8)
    text = [rng.randrange(40) for _ in range(90)]
    prompt = [rng.randrange(40) for _ in range(1200)] + text[:60]
    batch = Batch({1: Request(text, prompt, text)}, Settings(capacity=1500))
    r = batch.running[1]
    r.tokens = prompt[:600]
    batch.write(1)
    assert batch.step([1], [0]) == {1: []}
    r.tokens = list(prompt)
    batch.write(1)
    assert batch.step([1], [0]) == {1: []}
    generate(batch, rng, follow=0.5)


def test_tokens_taken_back_start_over() -> None:
    rng = random.Random(9)
    request = request_of(rng, 120, 4, 5, 200)
    batch = Batch({2: request}, Settings(capacity=220))
    r = batch.running[2]
    for num, back in [(50, 0), (9, 30), (0, 1), (20, 100), (3, 0), (60, 0)]:
        if back:
            r.tokens = r.tokens[: max(len(r.tokens) - back, len(request.prompt))]
            r.start_over()
        r.advance(num)
        batch.write(2)
        batch.step([2], [1])


def test_a_slot_is_given_to_another_and_a_request_to_another_slot() -> None:
    rng = random.Random(10)
    first, second = (request_of(rng, 100, 4, 5, 180) for _ in range(2))
    batch = Batch({0: first, 5: second}, Settings(capacity=200))
    generate(batch, rng, steps=6)
    tokens = batch.running[0].tokens
    batch.add(0, second, PAGE * 3)
    batch.state.align_state[5, constants.SEEN] = -1
    # The first one goes on where the second one was, with all of its output at once.
    batch.running.pop(5)
    batch.add(5, first, PAGE)
    batch.running[5].tokens = tokens
    generate(batch, rng, steps=12)


def test_a_vacant_slot_and_an_empty_batch() -> None:
    batch = Batch({1: Request([1, 2, 3], [], [1, 2, 3])}, Settings(), num_slots=3)
    batch.running[1].advance(1)
    batch.write(1)
    # The engine's tensors may hold something where there is no request.
    batch.token_ids[2, :2] = 7
    batch.total_len[2] = 2
    assert batch.step([2, 1, 0], [1, 1, 1])[2] == []
    assert batch.step([], []) == {}


@pytest.mark.parametrize("total", [-(2**31), -1, 101, 116, 10**6, 2**31 - 1])
@pytest.mark.parametrize("prompt_len", [0, 3, 100])
def test_no_row_is_read_beyond_its_ends(total: int, prompt_len: int) -> None:
    """On a GPU nobody looks at `total_len`: as an empty row, or as a full one."""
    rng = random.Random(12)
    text = [rng.randrange(4) for _ in range(90)]
    row = [rng.randrange(4) for _ in range(100)]
    requests = {s: Request(text, row[:prompt_len], row[prompt_len:]) for s in (1, 4)}
    batch = Batch(requests, Settings(capacity=100))
    for slot, r in batch.running.items():
        r.tokens = row
        batch.write(slot)
    batch.total_len[4] = total
    drafts = batch.step([4, 1, 0], [1, 1, 1])
    assert drafts[4] == (text[:16] if total < 0 else [])
    # Nothing is sampled, or there is no request: its last token is read even so.
    batch.total_len[:] = total
    assert batch.step([1, 0], [0, 1]) == {1: [], 0: []}


def test_the_end_of_the_context_and_of_the_vocabulary_cut_a_draft() -> None:
    rng = random.Random(11)
    text = [rng.randrange(60) for _ in range(70)]
    # Tokens of the prompt may be anything, and so may what is drafted from it.
    odd = [-1, 60, 2**31 - 1, -(2**31)]
    prompt = [t for i in range(0, 64, 8) for t in (*text[i : i + 8], odd[i // 8 % 4])]
    output = text[:20] + prompt[:40] + text[20:40]
    how = Settings(K=32, vocab_size=60, capacity=len(prompt) + len(output) + 5)
    generate(Batch({0: Request(text, prompt, output), 1: Request([], prompt, output)}, how), rng, follow=0.4)
    full = Settings(K=32, vocab_size=60, capacity=50)
    generate(Batch({3: Request(text, [], text[:50])}, full), rng, follow=0.9)


@pytest.mark.parametrize(
    "how",
    [
        Settings(K=1, capacity=100),
        Settings(K=5, quarters=0, capacity=100),
        Settings(K=200, quarters=3, capacity=300),
        Settings(K=256, quarters=400, capacity=300, tables="random"),
        Settings(min_match=3, min_context_match=5, capacity=100),
        Settings(capacity=16),
    ],
    ids=str,
)
def test_settings(how: Settings) -> None:
    rng = random.Random(str(how))
    requests = {s: request_of(rng, 80, 4, 3, min(90, how.capacity)) for s in (0, 4)}
    generate(Batch(requests, how), rng, follow=0.8)


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_align.ops.kernels.step import _step_kernel

    batch = Batch({s: Request([1, 2, 3, 4], [], [1, 2, 3, 4]) for s in (0, 3)}, Settings())
    for slot in batch.running:
        batch.running[slot].advance(2)
        batch.write(slot)
    launched = []
    run = type(_step_kernel).run

    def counted(self: object, *args: object, **kwargs: object) -> object:
        launched.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(type(_step_kernel), "run", counted)
    batch.step([3, 0], [1, 1])
    assert launched == [_step_kernel]


def token_in(bucket: int, bits: int) -> int:
    """The int32 whose product with `HASH` has `bucket` in its upper bits, and nothing below."""
    token = (bucket << 32 - bits) * pow(constants.HASH, -1, 2**32) % 2**32
    return token - (token >> 31 << 32)


def check_index(text: list[int], bits: int, backend: str) -> None:
    """The index of a text against plain Python; what is beside it stays as it was."""
    size, device = len(text), device_of(backend)
    room = max(size, 2**bits + 1)
    tensors = [torch.full((room + 20,), GARBAGE, dtype=torch.int32, device=device) for _ in range(3)]
    tensors[0][10 : 10 + size] = torch.tensor(text, dtype=torch.int32, device=device)
    build_index(*tensors, 10, size, bits, backend)
    buckets = [bucket_of(token, bits) for token in text]
    ends = sorted(range(1, size), key=lambda e: (buckets[e - 1], e))
    counts = Counter(buckets[:-1])
    starts = list(accumulate((counts[b] for b in range(2**bits)), initial=0))
    around = [GARBAGE] * 10
    assert tensors[1].tolist() == around + ends + [GARBAGE] * (room + 10 - len(ends))
    assert tensors[2].tolist() == around + starts + [GARBAGE] * (room + 10 - len(starts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [0, 1, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 4000])
def test_index(size: int, bits: int, backend: str) -> None:
    rng = random.Random(size)
    text = [rng.choice([3, 3, rng.randrange(131072), -5, 2**31 - 1]) for _ in range(size)]
    check_index(text, bits, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["first", "last", "first and last", "middle", "every"])
@pytest.mark.parametrize(
    ("size", "bits"),
    # Keys, and offsets, around those of one program and of two; from 16 bits on keys have 32.
    [
        (1, 10),
        (2, 10),
        *((BLOCK + n, 9) for n in (-1, 0, 1, 2)),
        (2 * BLOCK, 10),
        (2 * BLOCK + 1, 11),
        (3000, 16),
    ],
)
def test_index_of_few_buckets(size: int, bits: int, used: str, backend: str) -> None:
    last = 2**bits - 1
    of = {"first": [0], "last": [last], "first and last": [last, 0, 0], "middle": [2 ** (bits - 1)]}
    buckets = of.get(used, range(last, -1, -1))
    tokens = [token_in(bucket, bits) for bucket in buckets]
    assert [bucket_of(token, bits) for token in tokens] == list(buckets)
    check_index([tokens[i % len(tokens)] for i in range(size)], bits, backend)
