"""Slots that go from request to request, with canary tokens: nothing of one request is in what another one gets.

The V1 runner's drafter (V2's slots: `test_greedy`). Each request's prompt, prediction and output are token ids
that no other request has, unless both bring the same prediction, the other one has answered the same tenant, or
both use a pack of recipes. No other token may be in a draft (its padding included), a step log or its texts.
Equal predictions lie in one place of memory exactly where their tenants are equal. Usage is what a recount says.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from gpu_align import Recipes
from gpu_align.ops import layout
from gpu_align.tools.step_log import SOURCES, read_step_log
from tests.gpu_align.step_harness import edited
from tests.vllm_integration.fakes import FakeEngine, config, sampling
from vllm_integration.frontend.usage import RequestUsage
from vllm_integration.scheduler.schedulers import Recall
from vllm_integration.seams import install
from vllm_integration.wire import request as wire
from vllm_integration.worker import proposer_v1, request_drafter

torch.set_num_threads(1)

#: Turnovers of one drafter, before another one takes its place.
ONE_DRAFTER = 50
#: Ids of a range, and the first of the first range. All have as many digits, more than any other number in a log.
SPAN, FIRST = 64, 10_000_000
VOCABULARY = 99_000_000
#: Different tokens of a range in use: few, so that drafts match everywhere.
ALPHABET = 24
LONGEST, LONGEST_OUTPUT, MAX_MODEL_LEN = 100, 40, 160
#: Pack → the range of its contexts, which any request may write, and that of its continuations, which none does.
PACKS = {"one": (0, 1), "other": (2, 3)}
FIRST_OF_REQUESTS = 4


def token(number: int, index: int) -> int:
    return FIRST + number * SPAN + index


def packs() -> Recipes:
    after = range(0, ALPHABET, 3)
    return Recipes.join({
        name: Recipes.from_lists(
            [([token(context, i)], [token(range_, i), token(range_, i + 1)], [0.9, 0.8]) for i in after]
        )
        for name, (context, range_) in PACKS.items()
    })  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A prediction that several requests bring, of one tenant and of others."""

    tokens: tuple[int, ...] = ()
    range: int = -1


@dataclass
class Request:
    """prompt and output come from its own range and from its text's, an output also from contexts of packs.

    extra: what it brings under `wire.KEY`; None: nothing. ranges: whose tokens may be in what it gets.
    """

    number: int
    text: Text
    tenant: str | None
    prompt: list[int]
    output: list[int]
    extra: wire.Prediction | None
    ranges: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def takes_part(self) -> bool:
        """In the memory of earlier answers."""
        return self.extra is None or self.extra.memory is not False

    def foreign(self, tokens: Iterable[int]) -> list[int]:
        """Those that are in none of its ranges."""
        return [token for token in tokens if (token - FIRST) // SPAN not in self.ranges]


class Canaries:
    """Makes requests; none shares a range with another, except through a text that both bring."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ranges = rng, FIRST_OF_REQUESTS
        self.texts: deque[Text] = deque(maxlen=6)
        #: Tenant → the answers that it may be given.
        self.answers: defaultdict[str | None, list[list[int]]] = defaultdict(list)

    def tokens(self, number: int, num: int) -> list[int]:
        return [token(number, self.rng.randrange(ALPHABET)) for _ in range(num)]

    def take_range(self) -> int:
        self.ranges += 1
        return self.ranges

    def text(self, number: int) -> Text:
        num = self.rng.choice([1, 2, 20, 60, 255, 256, 257, LONGEST])
        return Text(tuple(self.tokens(number, min(num, LONGEST))), number)

    def request(self) -> Request:
        rng, number = self.rng, self.take_range()
        kind, text = rng.random(), Text()
        if kind < 0.45:
            text = self.text(number)
        elif kind < 0.75:  # one that several bring
            if not self.texts or rng.random() < 0.2:
                self.texts.append(self.text(self.take_range()))
            text = rng.choice(self.texts)
        prompt = self.tokens(number, rng.choice([1, 2, 9, 30]))
        if rng.random() < 0.3:
            prompt += text.tokens[:20]
        num = rng.randint(2, LONGEST_OUTPUT)
        output = list(text.tokens) if rng.random() < 0.3 else edited(rng, list(text.tokens), 1, num)
        # What an edit brings is 0 there.
        output = [self.tokens(number, 1)[0] if each == 0 else each for each in output]
        output = (output + self.tokens(number, 2))[:num]
        contexts = [context for context, _ in PACKS.values()]
        output = [
            token(rng.choice(contexts), rng.randrange(ALPHABET)) if rng.random() < 0.05 else t for t in output
        ]
        recipes = rng.choice([None, (), *((name,) for name in PACKS)])
        encoded = wire.encode_token_ids("token_ids", list(text.tokens))
        given = wire.Prediction(encoded, recipes=recipes, memory=rng.choice([None, None, False]))
        extra = given if kind < 0.9 else None
        tenant = rng.choice([None, "one", "other"])
        earlier = self.answers[tenant]
        if not text.tokens and earlier and rng.random() < 0.5:  # what its tenant was told before
            output = [*rng.choice(earlier)[:num], *output][:num]
        request = Request(number, text, tenant, prompt, output, extra)
        used = PACKS.keys() if extra is None or recipes is None else recipes
        request.ranges = {number, text.range, *contexts, *(PACKS[name][1] for name in used)}
        request.ranges |= {(each - FIRST) // SPAN for each in output}
        if request.takes_part and not text.tokens:
            request.ranges |= {(each - FIRST) // SPAN for answer in earlier for each in answer}
        return request


def held_wrongly(drafter: Any, holders: Mapping[int, tuple[Request, Any]]) -> str:
    """Each slot has its request's prompt length, text and kind; equal texts of one tenant lie in one place of the
    drafter's memory, others in places that do not overlap. What is found otherwise, in words."""
    places: dict[Any, int] = {}
    for slot, (request, params) in holders.items():
        meta = drafter._state.slot_meta[slot].tolist()
        base, num = meta[layout.PREDICTION_BASE], meta[layout.PREDICTION_LEN]
        if meta[layout.OUTPUT_START] != len(request.prompt):
            return f"{request.name} has another prompt length"
        if num:  # else it has none, or found no room
            given = params.extra_args[wire.KEY]
            tokens = wire.decode_token_ids(given.token_ids).tolist()
            held = drafter._state.prediction_tokens[base : base + num].tolist()
            if held != tokens or meta[layout.TEXT_KIND] != given.kind:
                return f"{request.name} has another text, or of another kind"
            if bool(given.kind) == bool(request.text.tokens):
                return f"{request.name} has a text of kind {given.kind}"
            if foreign := request.foreign(tokens):
                return f"{request.name} has a text with foreign tokens {foreign}"
            if places.setdefault((tuple(tokens), request.tenant), base) != base:
                return f"{request.name} does not share its text"
    ends = sorted((base, base + len(tokens)) for (tokens, _), base in places.items())
    overlap = any(end > begin for (_, end), (begin, _) in pairwise(ends))
    return "texts overlap" if overlap else ""


class RecountedEngine(FakeEngine):
    """Counts on its own what each request was given to verify, and what it accepted."""

    def step(self, finished: tuple[str, ...] = (), prefilling: tuple[str, ...] = ()) -> dict[str, list[int]]:
        scheduled = {name: len(draft) for name, draft in self.drafts.items()}
        sampled = super().step(finished, prefilling)
        self.recount: dict[str, RequestUsage] = getattr(self, "recount", {})
        for name, tokens in sampled.items():
            if tokens:
                usage = self.recount.setdefault(name, RequestUsage())
                usage.output_tokens += len(tokens)
                usage.add_step(0, scheduled.get(name, 0), len(tokens) - 1)
        return sampled


@contextmanager
def v1_drafter(logs: Path, rng: random.Random) -> Iterator[Any]:
    """The drafter that vLLM's V1 runner makes, without vLLM; its logs tell tokens as ``<id>``."""
    environment = {"GPU_ALIGN_DEBUG_DIR": str(logs), "GPU_ALIGN_STRICT": "1", "GPU_ALIGN_RECIPES": "off"}
    recipes = packs() if rng.random() < 0.7 else None
    if rng.random() < 0.5:
        environment["GPU_ALIGN_ARENA_TOKENS"] = "2048"
    if rng.random() < 0.3:
        environment["GPU_ALIGN_DRAFT_WITHOUT_PREDICTION"] = "1"
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", environment))
        stack.enter_context(patch.object(proposer_v1, "install", lambda group: ""))
        stack.enter_context(patch.object(proposer_v1, "watch", lambda: None))
        stack.enter_context(patch.object(install, "_off_reason", None))
        stack.enter_context(patch.object(request_drafter, "load_recipes", lambda *_: recipes))
        sizes = {
            "K": rng.choice([1, 4, 16]),
            "max_num_seqs": rng.randint(1, 8),
            "max_model_len": MAX_MODEL_LEN,
        }
        proposer = proposer_v1.PredictedOutputs(config(vocab_size=VOCABULARY, **sizes))
        proposer.load_model()
        proposer.log._decode = lambda ids: "".join(f"<{token}>" for token in ids)
        yield proposer


class V1Slots:
    """vLLM's V1 scheduler and runner in miniature around our drafter, slot table, ledger and step log."""

    def __init__(self, rng: random.Random, proposer: Any, logs: Path) -> None:
        self.rng, self.proposer, self.logs, self.kinds = rng, proposer, logs, Counter[str]()
        self.engine = RecountedEngine(proposer, max_model_len=MAX_MODEL_LEN)
        self.canaries = Canaries(rng)
        self.recall = Recall(max_tokens=500, most=proposer.capacity)
        self.requests: dict[str, Request] = {}
        #: What our scheduler makes of each.
        self.scheduled: dict[str, Any] = {}
        self.waiting: list[str] = []

    def arrive(self) -> None:
        request = self.canaries.request()
        extra = None if request.extra is None else {wire.KEY: request.extra}
        scheduled = SimpleNamespace(
            sampling_params=sampling(extra, max_tokens=len(request.output)),
            cache_salt=request.tenant,
            prompt_token_ids=request.prompt,
        )
        wire.put_back(scheduled)
        self.recall.give(scheduled)
        self.requests[request.name], self.scheduled[request.name] = request, scheduled
        self.engine.submit(request.name, request.prompt, request.output, scheduled.sampling_params)

    def leave(self, name: str) -> None:
        """A request has written its answer."""
        request = self.requests[name]
        self.scheduled[name].output_token_ids = self.engine.written[name]
        self.recall.keep(self.scheduled[name])
        if request.takes_part:
            self.canaries.answers[request.tenant].append(self.engine.written[name])

    def step(self) -> Iterator[tuple[str, str, bool]]:
        """One engine step: a request that was checked, what was wrong with it, and whether it has left a slot."""
        rng, engine, table = self.rng, self.engine, self.proposer.slots
        ended = [r for r in engine.rows if len(engine.written[r]) == len(engine.outputs[r])]
        aborted = [r for r in engine.rows if r not in ended and rng.random() < 0.04]
        self.kinds["aborted"] += len(aborted)
        for name in [r for r in engine.rows if r not in (*ended, *aborted)]:
            if rng.random() < 0.05:
                engine.rows.remove(name)
                engine.drafts.pop(name, None)
                self.waiting.append(name)
                self.kinds["preempted"] += 1
        gone = (*ended, *aborted)
        for name in ended:
            self.leave(name)
        rng.shuffle(engine.rows)
        while len(set(engine.rows) - set(gone)) < len(self.proposer.token_ids) and rng.random() < 0.7:
            if self.waiting and rng.random() < 0.5:
                engine.rows.append(self.waiting.pop(0))
            else:
                self.arrive()
        before = dict(table)
        prefilling = tuple(r for r in engine.rows if rng.random() < 0.05)
        engine.step(finished=gone, prefilling=prefilling)
        for name, draft in engine.drafts.items():
            wrong = self.requests[name].foreign(draft)
            self.kinds["drafts"] += bool(draft)
            if wrong:
                yield name, f"foreign tokens {wrong} in its draft", False
        params = {name: self.scheduled[name].sampling_params for name in table}
        holders = {slot: (self.requests[name], params[name]) for name, slot in table.items()}
        if wrong := held_wrongly(self.proposer.drafter, holders):
            yield "", wrong, False
        for name in gone:
            yield name, self.audit(name), name in before
        for name, slot in before.items():
            if name not in gone and table.get(name) != slot:
                yield name, "", True  # preempted; it is audited when it ends

    def audit(self, name: str) -> str:
        """The log and the usage of a request that has ended; what is wrong with them."""
        request, path = self.requests[name], self.logs / f"{name}.yaml"
        drafted_for = request.extra is not None or self.proposer.settings.draft_without_prediction
        recount = self.engine.recount.get(name, RequestUsage())
        usage = self.engine.usage.get(name, RequestUsage())
        if not drafted_for:
            return "counted without drafts" if name in self.engine.usage or path.exists() else ""
        counts = [(u.steps, u.output_tokens, u.drafted, u.accepted) for u in (usage, recount)]
        if counts[0] != counts[1]:
            return f"steps, tokens, drafted, accepted are counted as {counts[0]}, not {counts[1]}"
        raw, log = path.read_text(), read_step_log(path)
        path.unlink()
        self.kinds["logs"] += 1
        self.kinds.update(step.source for step in log.steps if step.proposed)
        numbers = re.findall(r"(?<![\d.])\d{8,}", re.sub(r"duration_us: \d+", "", raw))
        numbers += [t for step in log.steps for t in (*step.proposed, *step.new)]
        if wrong := request.foreign(map(int, numbers)):
            return f"foreign tokens {wrong} in its log"
        new = [token for step in log.steps for token in step.new]
        if (log.request_id, log.prompt_tokens, new) != (name, len(request.prompt), self.engine.written[name]):
            return "its log is of another request"
        logged = log.usage()
        if logged != usage.as_dict():
            return f"its log counts {logged}, its usage {usage.as_dict()}"
        return ""


def test_slots_that_change_hands_bring_nothing_foreign(
    count: Callable[[int], int], rng: random.Random, tmp_path: Path
) -> None:
    """A turnover: a request has left a slot. Where it has ended, its log and its usage are audited."""
    seen: Counter[str] = Counter()
    while seen["turnovers"] < count(200):
        folder = tmp_path / str(seen["turnovers"])
        with v1_drafter(folder, rng) as proposer:
            slots = V1Slots(rng, proposer, folder)
            while slots.kinds["turnovers"] < ONE_DRAFTER:
                for name, wrong, left in slots.step():
                    assert not wrong, (wrong, slots.requests.get(name))
                    slots.kinds["turnovers"] += left
            seen += slots.kinds
            seen["shared"] += proposer.drafter.prediction_stats.reused
    assert {"preempted", "aborted", "drafts", "logs", "shared", *SOURCES[1:4]} <= {*+seen}, seen
