"""A draft is a function of the prediction and the tokens so far: the same bits however a request came to them.

One draft counts when it was made in all of these ways, and all its bits are the same:

    one by one   a drafter that sees each token alone, each request in a slot of its own, all of a batch in order
    split        other slots, another batch order in each step, other requests beside it, tokens in steps of one to
                 many and in chunks of a prefill; preempted and brought back in yet another slot now and then
    fresh        a drafter made a moment ago, which gets all tokens at once
    alone        the same with this request as the only one (a share of the drafts)
    kernel       the same by the kernel, interpreted (a share of the drafts)

The first two drafters serve one batch of requests after the other: they are old, and their slots are used.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter

    fast_interpreter.speed_up()

import torch

from gpu_align import Drafter, DrafterConfig, Recipes
from gpu_align.ops.backend import Backend
from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.gpu_align.ops.test_step import settings_of
from tests.gpu_align.step_harness import DEVICE, edited, recipes_of

torch.set_num_threads(1)

#: Requests of a batch, and at how many places of each a draft is looked at.
BATCH, PLACES = 24, 6
#: Batches that the two old drafters serve before they are replaced.
BATCHES = 12


class Request(NamedTuple):
    """places: numbers of tokens, prompt and output, after which its draft is looked at, ascending."""

    prediction: list[int]
    prompt_len: int
    tokens: list[int]
    places: list[int]


class Bits(NamedTuple):
    """One row of a `Draft`, as bytes."""

    token_ids: bytes
    length: int
    confidence: bytes
    source: int

    def shown(self) -> dict[str, Any]:
        tokens = torch.frombuffer(bytearray(self.token_ids), dtype=torch.int64).tolist()
        confidence = torch.frombuffer(bytearray(self.confidence), dtype=torch.float32).tolist()
        return {"token_ids": tokens, "length": self.length, "confidence": confidence, "source": self.source}


@dataclass(frozen=True)
class Sizes:
    """What a draft may depend on besides its request."""

    K: int
    vocab_size: int
    capacity: int
    longest: int
    config: DrafterConfig
    recipes: Recipes | None


class Engine:
    """A drafter and the tensors of its engine, with tokens of others wherever a row has none of its own."""

    def __init__(
        self, rng: random.Random, sizes: Sizes, max_slots: int, backend: Backend = "reference"
    ) -> None:
        self.rng, self.sizes = rng, sizes
        self.drafter = Drafter(
            max_slots=max_slots, max_context_len=sizes.capacity, max_prediction_len=sizes.longest,
            num_draft_tokens=sizes.K, vocab_size=sizes.vocab_size,
            device=DEVICE if backend == "triton" else "cpu", config=sizes.config, recipes=sizes.recipes,
            backend=backend,
        )  # fmt: skip
        shape = max_slots, sizes.capacity
        self.token_ids = torch.randint(0, sizes.vocab_size, shape, dtype=torch.int32)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32)

    def write(self, slot: int, tokens: Sequence[int], total: int) -> None:
        self.token_ids[slot, :total] = torch.tensor(tokens[:total], dtype=torch.int32)
        self.total_len[slot] = total

    def propose(self, slots: list[int], sampled: list[int]) -> list[Bits]:
        inputs = self.token_ids, self.total_len, torch.tensor(slots), torch.tensor(sampled, dtype=torch.int32)
        draft = self.drafter.propose(*(x.to(self.drafter.device) for x in inputs))
        tokens, length, confidence, source = (column.cpu().numpy() for column in draft)
        return [
            Bits(tokens[b].tobytes(), int(length[b]), confidence[b].tobytes(), int(source[b]))
            for b in range(len(slots))
        ]


Drafts = dict[tuple[int, int], Bits]


def one_by_one(engine: Engine, requests: Sequence[Request]) -> Drafts:
    """Drafts of all requests after each of their tokens; request i in slot i."""
    drafts: Drafts = {}
    totals = [r.prompt_len for r in requests]
    for slot, r in enumerate(requests):
        engine.drafter.add(slot, r.prediction, r.prompt_len)
    while running := [i for i, r in enumerate(requests) if totals[i] <= r.places[-1]]:
        for i in running:
            engine.write(i, requests[i].tokens, totals[i])
        for i, bits in zip(running, engine.propose(running, [1] * len(running)), strict=True):
            drafts[i, totals[i]] = bits
            totals[i] += 1
    return drafts


def split(engine: Engine, requests: Sequence[Request]) -> Drafts:
    """Drafts at the places of all requests, on ways of their own to them."""
    rng, drafter, drafts = engine.rng, engine.drafter, dict[tuple[int, int], Bits]()
    waiting, slots = list(enumerate(requests)), dict[int, int]()
    totals = [rng.randint(0, r.prompt_len) for r in requests]
    rng.shuffle(waiting)
    while waiting or slots:
        free = [s for s in range(drafter.max_slots) if s not in slots.values()]
        while waiting and free and rng.random() < 0.7:
            i, request = waiting.pop()
            slots[i] = free.pop(rng.randrange(len(free)))
            drafter.add(slots[i], request.prediction, request.prompt_len)
        batch = rng.sample(sorted(slots), rng.randint(min(1, len(slots)), len(slots)))
        sampled = []
        for i in batch:
            request = requests[i]
            if totals[i] < request.prompt_len:  # a chunk of its prefill: nothing is sampled
                totals[i] = min(totals[i] + rng.choice([1, 16, 100]), request.prompt_len)
                sampled.append(int(totals[i] in request.places))
            else:
                next_place = next(p for p in request.places if (i, p) not in drafts)
                step = min(rng.choice([1, 1, 2, 3, 8, 40, 200]), next_place - totals[i])
                totals[i] += step
                sampled.append(max(step, 1))
            engine.write(slots[i], request.tokens, totals[i])
        if not batch:
            continue
        for i, num, bits in zip(
            batch, sampled, engine.propose([slots[i] for i in batch], sampled), strict=True
        ):
            if num and totals[i] in requests[i].places:
                drafts[i, totals[i]] = bits
            ended = (i, requests[i].places[-1]) in drafts
            if ended or rng.random() < 0.03:  # a slot that is left may be overwritten without a word
                if rng.random() < 0.5:
                    drafter.remove(slots[i])
                del slots[i]
                waiting += [] if ended else [(i, requests[i])]
    return drafts


def at_once(engine: Engine, requests: Sequence[Request], totals: Sequence[int]) -> list[Bits]:
    """The drafts of requests that come with all their tokens, in slots and in an order drawn for them."""
    slots = engine.rng.sample(range(engine.drafter.max_slots), len(requests))
    order = engine.rng.sample(range(len(requests)), len(requests))
    for slot, r, total in zip(slots, requests, totals, strict=True):
        engine.drafter.add(slot, r.prediction, r.prompt_len)
        engine.write(slot, r.tokens, total)
    found = engine.propose([slots[i] for i in order], [engine.rng.choice([1, 3, 9]) for _ in order])
    return [found[order.index(i)] for i in range(len(requests))]


def request_of(rng: random.Random, sizes: Sizes) -> Request:
    alphabet = rng.choice([2, 5, sizes.vocab_size])
    prediction = rng.choices(range(alphabet), k=min(rng.choice([0, 1, 20, 90, 256, 257, 400]), sizes.longest))
    prompt = rng.choices(range(alphabet), k=rng.randint(0, sizes.capacity // 3))
    if prediction and rng.random() < 0.3:
        prompt = (prediction * 60)[: len(prompt)]
    num = rng.randint(PLACES, sizes.capacity - len(prompt))
    tokens = [*prompt, *edited(rng, prediction, alphabet, num)]
    tokens += rng.choices(range(alphabet), k=max(len(prompt) + PLACES - len(tokens), 0))
    places = sorted(rng.sample(range(len(prompt), len(tokens) + 1), PLACES))
    return Request(prediction, len(prompt), tokens, places)


def sizes_of(rng: random.Random) -> Sizes:
    vocab_size = rng.choice([6, 40, 3000])
    recipes = Recipes.from_lists(recipes_of(rng, min(vocab_size, 9), 60)) if rng.random() < 0.5 else None
    return Sizes(
        rng.choice([1, 4, 7, 16, 64, 128]), vocab_size, rng.choice([70, 200, 500]), rng.choice([60, 400]),
        settings_of(rng) if rng.random() < 0.7 else DrafterConfig(), recipes,
    )  # fmt: skip


def check_batch(
    tally: Tally,
    seed: int,
    sizes: Sizes,
    requests: Sequence[Request],
    old: Sequence[Engine],
    kinds: Counter[str],
) -> None:
    """`PLACES` drafts of each request, made in all ways."""
    rng = old[0].rng
    straight, other = one_by_one(old[0], requests), split(old[1], requests)
    by_kernel = rng.randrange(PLACES)
    for p in range(PLACES):
        totals = [r.places[p] for r in requests]
        fresh = at_once(Engine(rng, sizes, BATCH + rng.randint(0, 9)), requests, totals)
        few = rng.sample(range(len(requests)), 2)
        alone = {
            i: at_once(Engine(rng, sizes, rng.randint(1, 3)), [requests[i]], [totals[i]])[0] for i in few[:1]
        }
        kernel: dict[int, Bits] = {}
        if p == by_kernel:
            engine = Engine(rng, sizes, 4, "triton")
            kernel = dict(
                zip(few, at_once(engine, [requests[i] for i in few], [totals[i] for i in few]), strict=True)
            )
        for i, request in enumerate(requests):
            ways = {"one by one": straight[i, totals[i]], "split": other[i, totals[i]], "fresh": fresh[i]}
            ways |= {name: found[i] for name, found in (("alone", alone), ("kernel", kernel)) if i in found}
            kinds.update(ways.keys())
            kinds["drafts"] += fresh[i].length > 0
            tally.check(
                len(set(ways.values())) == 1,
                lambda r=request, total=totals[i], ways=ways: {
                    "group": seed, "sizes": {**vars(sizes), "config": vars(sizes.config)},
                    "prediction": r.prediction, "prompt_len": r.prompt_len, "tokens": r.tokens[:total],
                    "drafts": {name: bits.shown() for name, bits in ways.items()},
                },
            )  # fmt: skip


def run(c: Campaign) -> Iterator[Row]:
    tally = c.tally(
        "a draft is the same from any drafter, slot, batch and split", at_least=50_000, quick=1_000
    )
    kinds: Counter[str] = Counter()
    while tally.goes_on():
        seed = c.rng.randrange(2**32)
        rng = random.Random(seed)
        sizes = sizes_of(rng)
        old = Engine(rng, sizes, BATCH), Engine(rng, sizes, rng.randint(5, 2 * BATCH))
        kinds["settings"] += 1
        for _ in range(c.size(BATCHES, 2)):
            requests = [request_of(rng, sizes) for _ in range(BATCH)]
            check_batch(tally, seed, sizes, requests, old, kinds)
    yield tally.row(
        f"{kinds['settings']} settings; {kinds['drafts']:,} with tokens; {kinds['alone']:,} also alone, "
        f"{kinds['kernel']:,} also by the kernel"
    )


if __name__ == "__main__":
    main(run)
