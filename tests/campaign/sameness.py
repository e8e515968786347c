"""A draft is a function of the prediction and the tokens so far: the same bits however a request came to them.

One draft counts when it was made in all of these ways, and all its bits are the same:

    split        by a drafter that is old: slots and batch order drawn for each step, other requests beside it,
                 tokens in steps of one to many; preempted and brought back, taken back now and then
    one by one   by another old one that sees each token alone, the request in a slot of its own
    fresh        by a drafter made a moment ago, which gets all tokens at once
    alone        the same with this request as the only one (a share of the drafts)
    kernel       the same by the kernel, interpreted (a share of the drafts)

The first is a `StepBatch`, which compares with the oracle, too.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence

if os.environ.get("TRITON_INTERPRET") == "1":
    import fast_interpreter

    fast_interpreter.speed_up()

import torch

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.gpu_align.step_batch import Drafted, Running, StepBatch, drafted

torch.set_num_threads(1)

#: Drafts of one batch, before another one takes its place.
ONE_BATCH = 1_500


class Rows:
    """The tensors of an engine, with tokens of others wherever a row has none of its own."""

    def __init__(self, batch: StepBatch, max_slots: int, backend: str = "reference") -> None:
        self.drafter = batch.make(backend, max_slots)
        self.token_ids = torch.randint(0, batch.alphabet, (max_slots, batch.capacity), dtype=torch.int32)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32)

    def propose(self, slots: Sequence[int], sampled: Sequence[int]) -> list[Drafted]:
        inputs = torch.tensor(slots), torch.tensor(sampled, dtype=torch.int32)
        return drafted(self.drafter, self.token_ids, self.total_len, *inputs)

    def write(self, slot: int, request: Running, total: int) -> None:
        self.token_ids[slot, :total] = torch.tensor(request.tokens[:total], dtype=torch.int32)
        self.total_len[slot] = total


class OneByOne:
    def __init__(self, batch: StepBatch) -> None:
        self._rows, self._slots = Rows(batch, 2 * batch.max_slots), dict[int, tuple[int, Running]]()

    def draft(self, request: Running, running: Sequence[Running]) -> Drafted:
        """After each token that is new; running: who keeps a slot."""
        rows, kept = self._rows, {id(r) for r in running}
        self._slots = {key: held for key, held in self._slots.items() if key in kept}
        if id(request) not in self._slots:
            taken = {slot for slot, _ in self._slots.values()}
            slot = next(slot for slot in range(len(rows.total_len)) if slot not in taken)
            request.enter(rows.drafter, slot)
            rows.total_len[slot] = min(request.prompt_len, request.done) - 1
            self._slots[id(request)] = slot, request
        slot, _ = self._slots[id(request)]
        found: list[Drafted] = []
        for total in range(min(int(rows.total_len[slot]) + 1, request.done), request.done + 1):
            rows.write(slot, request, total)
            found = rows.propose([slot], [1])
        return found[0]


def at_once(
    batch: StepBatch, requests: Sequence[Running], others: int, backend: str = "reference"
) -> list[Drafted]:
    """The drafts of requests that come with all their tokens, in slots and in an order drawn for them."""
    rng, rows = batch.rng, Rows(batch, len(requests) + others, backend)
    slots = rng.sample(range(len(requests) + others), len(requests))
    order = rng.sample(range(len(requests)), len(requests))
    for slot, request in zip(slots, requests, strict=True):
        request.enter(rows.drafter, slot)
        rows.write(slot, request, request.done)
    found = rows.propose([slots[i] for i in order], [rng.choice([1, 3, 9]) for _ in order])
    return [found[order.index(i)] for i in range(len(requests))]


def check_step(tally: Tally, seed: int, batch: StepBatch, slow: OneByOne, kinds: Counter[str]) -> None:
    """The drafts of one step of an old batch, made in all ways."""
    rng = batch.rng
    rows = [row for row in batch.random_step() if row.request is not None]
    requests = [row.request for row in rows if row.request is not None]
    if not requests:
        return
    fresh = at_once(batch, requests, rng.randint(0, 9))
    few = rng.randrange(len(requests))
    some = {
        name: at_once(batch, [requests[few]], rng.randint(0, 2), backend)[0]
        for name, backend, share in (("alone", "reference", 0.2), ("kernel", "triton", 0.05))
        if rng.random() < share
    }
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        ways = {"split": row.expected, "fresh": fresh[i]}
        ways["one by one"] = slow.draft(request, list(batch.running.values()))
        ways |= some if i == few else {}
        kinds.update(ways.keys())
        kinds["drafts"] += fresh[i].length > 0
        holds = not row.wrong and all(way == row.expected for way in ways.values())
        case = {
            "group": seed,
            "wrong": row.wrong,
            **row.of,
            "drafts": {k: w._asdict() for k, w in ways.items()},
        }
        tally.check(holds, case)


def run(c: Campaign) -> Iterator[Row]:
    tally = c.tally(
        "a draft is the same from any drafter, slot, batch and split", at_least=50_000, quick=1_000
    )
    kinds: Counter[str] = Counter()
    while tally.goes_on():
        seed = c.rng.randrange(2**32)
        batch = StepBatch.draw(random.Random(seed), ["reference"])
        slow, wanted = OneByOne(batch), tally.count + c.size(ONE_BATCH, 100)
        kinds["settings"] += 1
        while tally.count < wanted:
            check_step(tally, seed, batch, slow, kinds)
    yield tally.row(
        f"{kinds['settings']} settings; {kinds['drafts']:,} with tokens; {kinds['alone']:,} also alone, "
        f"{kinds['kernel']:,} also by the kernel"
    )


if __name__ == "__main__":
    main(run)
