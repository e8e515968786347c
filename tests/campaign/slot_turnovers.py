"""Slots of the V1 runner's drafter that requests with canary tokens take from each other."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm_fakes

from gpu_align.ops import constants
from gpu_align.step_log import read_step_log
from tests.campaign.campaign import Tally
from tests.campaign.canaries import VOCABULARY, Canaries, Request
from vllm_integration.frontend.usage import RequestUsage
from vllm_integration.seams import install
from vllm_integration.wire import request as wire
from vllm_integration.worker import proposer_v1


def shared_wrongly(drafter: Any, holders: Mapping[int, Request]) -> str:
    """Predictions of equal tokens and sharing key lie in one place of the drafter's memory, others in places that
    do not overlap; what is found otherwise, in words."""
    places: dict[Any, int] = {}
    for slot, request in holders.items():
        meta = drafter._state.slot_meta[slot].tolist()
        num = meta[constants.PREDICTION_LEN]
        if num:  # else it has none, or found no room
            # Without a key the V1 runner shares a request's prediction with itself alone.
            key = tuple(request.prediction), request.key if request.key or not request.text else request.name
            base = meta[constants.PREDICTION_BASE]
            if places.setdefault(key, base) != base:
                return f"{request.name} does not share its prediction"
    ends = sorted((base, base + len(tokens)) for (tokens, _), base in places.items())
    overlap = any(end > begin for (_, end), (begin, _) in pairwise(ends))
    return "predictions overlap" if overlap else ""


class RecountedEngine(vllm_fakes.FakeEngine):
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
    if rng.random() < 0.5:
        environment["GPU_ALIGN_ARENA_TOKENS"] = "2048"
    if rng.random() < 0.3:
        environment["GPU_ALIGN_DRAFT_WITHOUT_PREDICTION"] = "1"
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", environment))
        stack.enter_context(patch.object(proposer_v1, "install", lambda group: ""))
        stack.enter_context(patch.object(proposer_v1, "watch", lambda: None))
        stack.enter_context(patch.object(install, "_off_reason", None))
        sizes = {"K": rng.choice([1, 4, 16]), "max_num_seqs": rng.randint(1, 8), "max_model_len": 160}
        proposer = proposer_v1.PredictedOutputs(vllm_fakes.config(vocab_size=VOCABULARY, **sizes))
        proposer.load_model()
        proposer.log._decode = lambda ids: "".join(f"<{token}>" for token in ids)
        yield proposer


class V1Slots:
    """vLLM's V1 scheduler and runner in miniature around our drafter, slot table, ledger and step log."""

    def __init__(self, rng: random.Random, proposer: Any, logs: Path) -> None:
        self.rng, self.proposer, self.logs, self.kinds = rng, proposer, logs, Counter[str]()
        self.engine = RecountedEngine(proposer, max_model_len=160)
        self.canaries = Canaries(rng, longest=100, longest_output=40)
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.held: dict[str, int] = {}

    def arrive(self) -> None:
        request = self.canaries.request()
        extra = None
        if request.text is not None:
            encoded = wire.encode_token_ids("token_ids", request.prediction)
            extra = {wire.KEY: wire.Prediction(token_ids=encoded, sharing_key=request.key)}
        params = vllm_fakes.sampling(extra, max_tokens=len(request.output))
        self.requests[request.name] = request
        self.engine.submit(request.name, request.prompt, request.output, params)

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
        holders = {slot: self.requests[name] for name, slot in table.items()}
        if wrong := shared_wrongly(self.proposer.drafter, holders):
            yield "", wrong, False
        for name in gone:
            yield name, self.audit(name), name in before
        for name, slot in before.items():
            if name not in gone and table.get(name) != slot:
                yield name, "", True  # preempted; it is audited when it ends

    def audit(self, name: str) -> str:
        """The log and the usage of a request that has ended; what is wrong with them."""
        request, path = self.requests[name], self.logs / f"{name}.yaml"
        drafted_for = request.text is not None or self.proposer.settings.draft_without_prediction
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


def in_v1(seed: int, tally: Tally, turnovers: int, logs: Path) -> Counter[str]:
    """Turnovers of the V1 runner's slots; one counts when its request has left the slot, and its log and usage are
    audited where it has ended."""
    rng = random.Random(seed)
    with v1_drafter(logs, rng) as proposer:
        slots = V1Slots(rng, proposer, logs)
        while slots.kinds["turnovers"] < turnovers:
            for name, wrong, left in slots.step():
                request = slots.requests.get(name)
                slots.kinds["turnovers"] += left
                case = {"v1": seed, "request": request and vars(request), "wrong": wrong}
                tally.check(not wrong, case, count=int(left))
        stats = proposer.drafter.prediction_stats
    return slots.kinds + Counter(refused=stats.refused, evicted=stats.evicted, shared=stats.reused)
