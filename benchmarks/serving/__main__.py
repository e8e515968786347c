"""Throughput of drafting rules on paper: ``python -m benchmarks.serving``; README.md has the assumptions.

Replays real edits at batch 1 to 1,024: every place of a batch goes through the corpus, request after request; in
each step a rule grants draft slots, what they bring is looked up in a trace of the drafter, and the step takes as
long as its tokens need (`Roofline`). After a change of the drafter run it again: it fails if the plugin's defaults
(`vllm_integration.config.settings`) then lose by useless predictions or rejected drafts.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

import gpu_align
from benchmarks import tables
from benchmarks.corpus import build as corpus
from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorOptions
from gpu_align.predictors.base import count_accepted
from gpu_align.tools.simulate.policies import sizes_for
from gpu_align.tools.simulate.replay import Record, read_records, recipes_for
from vllm_integration.scheduler.draft_budget import DraftBudget, DraftedRequests
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DraftReport, StepDrafts, StepTime, survival_levels

Ints = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]
K = 32
BATCHES = (1, 16, 64, 256, 1024)
#: Batches of the tables; the JSON has all.
COLUMNS = BATCHES
#: What is traced, and how many of its output tokens.
CORPUS, MAX_TOKENS = Path(".cache/corpus.jsonl.gz"), 30_000
TRACES = Path(".cache/serving")
#: Microseconds that a step of the drafter takes.
DRAFTER_US = 15.0
#: The plugin's defaults are never below this share of the throughput without drafts; from 64 requests on.
NEVER_BELOW, IN_LARGE = 0.97, 0.99
#: Noise of the step times that the plugin sees; how many are something else's, and by what factors.
NOISE, OUTLIERS, FACTORS = 0.05, 0.02, (3.0, 30.0)
#: Steps in which a rule that learns gets to know the requests of a batch.
WARM_UP = 300


# A step on paper. Units: bytes a second, operations a second (dense, no sparsity), bytes.


class Gpu(NamedTuple):
    """One GPU of a data sheet. link: NVLink, one direction."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float
    memory: float
    link: float


class Model(NamedTuple):
    """A decoder with grouped-query attention. embedding: of its parameters; looked up, not multiplied. Of a
    mixture of experts, `top` of `experts` for each token: always, the parameters that all tokens use."""

    name: str
    params: float
    embedding: float
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    experts: int = 1
    top: int = 1
    always: float = 0.0


# NVIDIA's data sheets, SXM, without sparsity (B200: of a DGX, an eighth), and the config.json of Llama 3.1.
H100 = Gpu("H100", 3.35e12, 989e12, 1979e12, 80e9, 450e9)
H200 = Gpu("H200", 4.8e12, 989e12, 1979e12, 141e9, 450e9)
B200 = Gpu("B200", 8.0e12, 2250e12, 4500e12, 180e9, 900e9)
SMALL = Model("8B", 8.03e9, 0.53e9, 32, 4096, 32)
LARGE = Model("70B", 70.6e9, 1.05e9, 80, 8192, 64)
# Their config.json: a token uses 3.0, 5.1 and 37 of 10⁹ parameters. DeepSeek's latent cache is as large as one
# head of 288.
QWEN = Model("Qwen3-30B-A3B", 30.5e9, 0.31e9, 48, 2048, 32, 4, 128, 151_936, 128, 8, 1.2e9)
GPT_OSS = Model("gpt-oss-120b", 117e9, 0.58e9, 36, 2880, 64, 8, 64, 201_088, 128, 4, 1.5e9)
DEEPSEEK = Model("DeepSeek-V3", 671e9, 0.93e9, 61, 7168, 128, 1, 288, 129_280, 256, 8, 16.2e9)
BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Roofline:
    """A step's time; `ms` has the formula. Shares, softness and overhead fit an H200 (`checked`).

    With several GPUs each holds its share of weights, KV cache, heads and vocabulary.
    """

    gpu: Gpu
    model: Model
    dtype: str
    #: Tokens of KV cache that each request reads, on average.
    context: int
    gpus: int = 1
    #: What good kernels reach of a data sheet's bandwidth and operations.
    bandwidth_share: float = 0.7
    compute_share: float = 0.6
    #: Memory and arithmetic overlap well, not perfectly. Where both sides of a soft maximum are equal the time is
    #: 2**(1/4) = 1.19 times either; a hard maximum would make drafts up to there free.
    softness: float = 2.0
    #: What a step costs whatever is in it; scheduling that is not hidden, launches, sampling.
    overhead_ms: float = 0.5
    #: Bytes a vocabulary entry and token: logits written and read in bf16, converted to float32, read twice
    #: (softmax or argmax, comparison with the draft).
    logits_bytes: float = 16.0
    #: Latency of one exchange between GPUs, twice a layer.
    exchange_us: float = 8.0
    #: Share of the memory that weights and KV cache may fill (vLLM's default).
    memory_share: float = 0.92
    #: Grouped products of experts reach this share of the dense ones.
    grouped_share: float = 0.7
    #: Share of a draft's experts that are its neighbour's beyond chance: 0.18 gives Mixtral's 62 % of tokens that
    #: have an expert in common with the one before, in place of 46 % (arXiv 2401.04088, table 5).
    repeats: float = 0.0
    #: Tokens of the largest CUDA graph, 0: of any size. Beyond it the host launches for so long meanwhile.
    captured: int = 0
    launch_ms_a_layer: float = 0.2

    @property
    def name(self) -> str:
        many = f"{self.gpus} × " if self.gpus > 1 else ""
        more = ", repeats" * (self.repeats > 0) + f", graphs to {self.captured}" * (self.captured > 0)
        return f"{many}{self.gpu.name}, {self.model.name} {self.dtype}, context {self.context:,}{more}"

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache a token on one GPU; in fp8 the cache is fp8, too."""
        m = self.model
        return 2 * m.layers * m.kv_heads * m.head_dim * BYTES[self.dtype] / self.gpus

    def fits(self, batch: int) -> bool:
        """Whether so many requests fit in memory."""
        held = self.model.params * BYTES[self.dtype] / self.gpus + batch * self.context * self.kv_bytes
        return held <= self.gpu.memory * self.memory_share

    def ms(self, batch: int, tokens: npt.ArrayLike) -> Times:
        """Milliseconds of a step over `batch` requests that verifies `tokens` tokens in all."""
        t = np.asarray(tokens, dtype=np.float64)
        m, bandwidth = self.model, self.gpu.bandwidth * self.bandwidth_share
        bf16 = self.gpu.bf16 * self.compute_share
        operations = getattr(self.gpu, self.dtype) * self.compute_share
        read = used = (m.params - m.embedding) / self.gpus
        if m.experts > 1:
            alone, share = batch + (t - batch) * (1 - self.repeats), m.top / m.experts
            routed = m.params - m.embedding - m.always
            read = (m.always + routed * (1 - (1 - share) ** alone)) / self.gpus
            used = (m.always + routed * share) / self.gpus
            operations *= self.grouped_share
        linear = self._soft_max(read * BYTES[self.dtype] / bandwidth, 2 * used * t / operations)
        attention = self._soft_max(
            batch * self.context * self.kv_bytes / bandwidth,
            4 * m.layers * m.q_heads * m.head_dim * self.context / self.gpus * t / bf16,
        )
        logits = t * m.vocab * self.logits_bytes / self.gpus / bandwidth
        exchange: Times | float = 0.0
        if self.gpus > 1:
            exchange = 2 * m.layers * (self.exchange_us * 1e-6 + t * m.hidden * 2 / self.gpu.link)
        ms = self.overhead_ms + 1e3 * (linear + attention + logits + exchange)
        launches = self._soft_max(m.layers * self.launch_ms_a_layer, ms)
        return np.asarray(np.where((t > self.captured) & (self.captured > 0), launches, ms))

    def _soft_max(self, a: Times | float, b: Times) -> Times:
        high = np.maximum(a, b)
        power = (a / high) ** self.softness + (b / high) ** self.softness
        return np.asarray(high * power ** (1 / self.softness))


DENSE = Roofline(H200, SMALL, "bf16", 500)
SETUPS = [
    DENSE,
    replace(DENSE, captured=512),
    Roofline(B200, SMALL, "fp8", 8_000),
    Roofline(H100, LARGE, "bf16", 2_000, 4),
    Roofline(H200, QWEN, "bf16", 500),
    Roofline(H200, QWEN, "bf16", 500, repeats=0.18, captured=512),
    Roofline(H200, GPT_OSS, "fp8", 2_000),
    Roofline(H200, DEEPSEEK, "fp8", 2_000, 8),
]
#: The setups whose numbers are shown; the first is the measured one. The worst case is over all of them.
SHOWN = tuple(SETUPS[i].name for i in (0, 4, 6, 7))
#: What edits and half a batch gain at least: setup, what, batch → speed-up. Of the dense one 0.99 of what the
#: fixed rule of commit 22d4d3af gained. Of lone requests on mixtures of experts 0.97 of what this rule gains with
#: late reports where it knows the machine's curve, 1.76 and 2.27; with reports in time 1.94 and 2.53.
LEAST = {
    (0, "edit"): {1: 8.07, 16: 6.91, 64: 3.03, 256: 1.68},
    (0, "half"): {64: 2.58, 256: 1.56},
    (4, "edit"): {1: 2.22, 16: 7.7, 64: 8.3, 256: 3.9},
    (4, "half"): {256: 3.4},
    (6, "edit"): {1: 1.7, 16: 5.1, 64: 9.0, 256: 6.4},
    (6, "half"): {256: 4.8},
}


# Traces: what the drafter would do at every position of known outputs.

#: Confidences travel as integers over this.
ONE = 65_535


class Trace(NamedTuple):
    """Drafts at every position of some outputs, joined: after 1 to L - 1 tokens of each, P in all.

    Attributes:
        start: [R + 1] int64: record ``r`` has rows ``start[r]`` to ``start[r + 1]``.
        length: [P] int16: drafts proposed, ``0 <= length <= K``. Drafts after the end of the output count:
            an engine that does not know the end verifies them.
        matched: [P] int16: how many of them, from the first, are what the output goes on with.
        survival: [P, K] uint16 in units of 1/`ONE`: the drafter's own estimate that drafts 0..k are all
            accepted; 0 beyond `length`, and at least 1 before it.
    """

    start: Ints
    length: npt.NDArray[np.int16]
    matched: npt.NDArray[np.int16]
    survival: npt.NDArray[np.uint16]


@lru_cache
def load_trace(mix: str) -> Trace:
    """The trace of one of `MIXES`."""
    if mix == "rejected":
        trace = load_trace("unrelated")
        return trace._replace(matched=np.zeros_like(trace.matched))
    with np.load(TRACES / f"{mix}.npz") as file:
        return Trace(**file)


def make_traces() -> None:
    """Record the traces of the drafter as it is served, with recipes; the corpus is fetched if it is not there."""
    if not CORPUS.exists():
        corpus.main([str(CORPUS)])
    records = read_records(CORPUS, "tekken")
    recipes, half = recipes_for(records), len(records) // 2
    # Predictions moved half the list on: another file, mostly of another package.
    moved = [*records[half:], *records[:half]]
    unrelated = [replace(r, prediction=other.prediction) for r, other in zip(records, moved, strict=True)]
    TRACES.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("edit", records), ("unrelated", unrelated)):
        parts = (chosen[::every] for every in range(1, len(chosen) + 1))
        few = next(part for part in parts if sum(len(r.output) for r in part) <= MAX_TOKENS)
        rows = [_rows(record, recipes) for record in few if len(record.output) > 1]
        start = np.cumsum([0, *(len(length) for length, _, _ in rows)])
        trace = Trace(start, *(np.concatenate(columns) for columns in zip(*rows, strict=True)))
        np.savez_compressed(TRACES / f"{name}.npz", **trace._asdict())


def _rows(record: Record, recipes: gpu_align.Recipes | None) -> tuple[Any, Any, Any]:
    """``(length, matched, survival)`` of a record."""
    num_output = len(record.output)
    # Room after the end: a draft that runs past it is as long as the drafter made it.
    sizes = sizes_for([record], recipes)
    room = sizes._replace(max_context_len=sizes.max_context_len + K)
    ours = PredictedOutputTokenPredictor(recipes=recipes, **room._asdict())
    ours.reset(record.prompt, PredictorOptions(K, prediction=tuple(record.prediction)))
    lengths, matched = np.zeros((2, num_output - 1), dtype=np.int16)
    survival = np.zeros((num_output - 1, K), dtype=np.uint16)
    for p in range(1, num_output):
        ours.push_tokens(record.output[p - 1 : p])
        draft = ours.predict_tokens()
        lengths[p - 1] = len(draft)
        matched[p - 1] = count_accepted(draft, record.output[p : p + len(draft)])
        estimate = np.cumprod(np.array(ours.confidence))
        survival[p - 1, : len(draft)] = np.maximum(np.rint(estimate * ONE), 1)
    return lengths, matched, survival


# Rules: how many drafts of each request a step verifies.

#: Before a step of B requests: [B] drafts proposed, [B, K] the drafter's estimates in units of 1/`ONE`, 0 beyond
#: them, and [B] the number of each request, below 0 for one without a prediction → [B] draft slots,
#: ``0 <= slots <= K``. Each costs a verified token, whether or not it holds a draft.
Rule = Callable[[Ints, npt.NDArray[np.uint16], Ints], Ints]


class Plugin:
    """The plugin's own policy, `DraftBudget` with its defaults, run as its schedulers run it.

    late: steps since what is known when the next step is planned. 0: synchronous scheduling. 1 or 2: asynchronous
    scheduling, where a step is planned while the one before it runs; 2 if its drafts' copies are not there by the
    time when its tokens are. What a step accepted, and its time, is known with its tokens: one step late in either
    case. It learns step times as it goes.
    """

    def __init__(self, late: int, captured: int = 0) -> None:
        self.late, self._captured = late, captured or 1 << 20
        self._requests = DraftedRequests(False, K)
        self._budget = DraftBudget(self._requests, K, captured=self._captured)
        self._told: deque[StepDrafts] = deque()
        self._ids: list[str] = []
        self._live: dict[int, Any] = {}
        self._ended: deque[tuple[Any, list[str], Ints, Ints, StepTime]] = deque()

    def __call__(self, length: Ints, survival: npt.NDArray[np.uint16], number: Ints) -> Ints:
        numbers = number.tolist()
        if numbers != [*self._live]:
            # As much of vLLM's requests as the policy looks at; they never come near their last tokens.
            params = [
                SimpleNamespace(extra_args=args, max_tokens=1 << 30) for args in ({wire.KEY: True}, None)
            ]
            self._live = {
                n: self._live.get(n)
                or SimpleNamespace(request_id=str(n), sampling_params=params[n < 0], output_token_ids=())
                for n in numbers
            }
            self._ids = [request.request_id for request in self._live.values()]
            self._requests.keep_only(dict.fromkeys(self._ids))
            for request in self._live.values():
                self._requests.add(request)
        ids = self._ids
        levels = survival_levels(survival / ONE, length)
        unknown = np.zeros_like(length)
        self._told.append(StepDrafts(ids, self.late, unknown, length, unknown, levels))
        told = [self._told.popleft()] if len(self._told) > self.late else []
        self._requests.take(DraftReport(told))
        if len(self._ended) > min(self.late, 1):
            granted, before, slots, accepted, time = self._ended.popleft()
            self._budget.settle(self._requests.rows_of(before), slots, accepted + 1, granted)
            self._budget.observe([time])
        given = self._budget.grant([*self._live.values()], exact=not self.late, batch_size=len(ids))
        return np.array(given, dtype=np.int64)

    def settle(self, slots: Ints, accepted: Ints, ms: float) -> None:
        """[B] each: what the step of the last grant verified, and what of it is output; and how long it took."""
        tokens = len(slots) + int(slots.sum())
        time = StepTime(ms, tokens, tokens <= self._captured)
        self._ended.append((self._budget.granted, self._ids, slots, accepted, time))


#: Name → a new rule, and what it is, in the table.
RULES: dict[str, tuple[Callable[[int], Rule], str]] = {
    "lengths": (lambda _: lambda length, *_: length, "every draft"),
    "plugin": (lambda captured: Plugin(0, captured), "default, synchronous"),
    "plugin, late by 1": (lambda captured: Plugin(1, captured), "default, asynchronous"),
}
#: The rule of the table in docs/worth-it.md, as vLLM schedules by default.
SHOWN_RULE = "plugin, late by 1"
#: Tokens verified, tokens produced and milliseconds, one entry a step.
Steps = tuple[Ints, Ints, Times]
#: Predictions: the old version of the file, another file, and such that the model agrees with no draft: the worst.
MIXES = ("edit", "unrelated", "rejected")
#: Edits in every second place, and no prediction in the others.
HALF = "half"


def simulate(
    trace: Trace,
    rule: Rule,
    batch: int,
    cost: Roofline,
    min_steps: int = 120,
    max_steps: int = 5_000,
    every: int = 1,
) -> Steps:
    """Let `batch` requests decode side by side under `rule`, from places that are spread evenly over the trace,
    until as many tokens are produced as it has rows. After a record's last row the next one begins, another
    request.

    A rule that learns (it has a `settle`) first gets `WARM_UP` steps that are not counted. Then every request is
    back at its first place: the requests of a running batch are not new, and the rule knows them. Only the order
    of the places is random, and depends on `batch` alone. every: which places have a prediction. The times that it
    learns from have noise, and some are far off.
    """
    num_rows = len(trace.length)
    end = np.repeat(trace.start[1:], np.diff(trace.start))
    rng = np.random.default_rng(batch)
    row = ((np.arange(batch) + rng.random(batch)) * num_rows / batch).astype(np.int64)[rng.permutation(batch)]
    request = np.where(np.arange(batch) % every, -1 - np.arange(batch), np.arange(batch))
    first = row
    settle = getattr(rule, "settle", None)
    warm_up = WARM_UP if settle else 0
    verified: list[int] = []
    produced: list[int] = []
    times: list[float] = []
    total = 0
    while warm_up or len(verified) < min_steps or (total < num_rows and len(verified) < max_steps):
        length = trace.length[row] * (request >= 0)
        granted = rule(length, trace.survival[row], request)
        if granted.min() < 0 or granted.max() > K:
            raise ValueError(f"rule: expected 0 to {K} slots, found {granted}")
        accepted = np.minimum(granted, np.minimum(length, trace.matched[row]))
        new = np.minimum(accepted + 1, end[row] - row)
        ms = float(cost.ms(batch, batch + granted.sum())) + DRAFTER_US / 1e3
        if settle is not None:
            settle(granted, accepted, ms * seen_as(rng))
        request = request + np.where(request < 0, -batch, batch) * (row + new == end[row])
        row = (row + new) % num_rows
        if warm_up:
            warm_up -= 1
            row = row if warm_up else first
            continue
        verified.append(batch + int(granted.sum()))
        produced.append(int(new.sum()))
        times.append(ms)
        total += produced[-1]
    return np.array(verified), np.array(produced), np.array(times)


def seen_as(rng: np.random.Generator) -> float:
    """By what factor a step's time is off where it is measured."""
    factor = rng.normal(1, NOISE)
    return float(factor * rng.uniform(*FACTORS) if rng.random() < OUTLIERS else factor)


def speedup(steps: Steps, cost: Roofline, batch: int) -> float:
    """Throughput over that of the same batch without drafts and without a drafter."""
    _, produced, times = steps
    return float(produced.mean() / times.mean() * cost.ms(batch, batch) / batch)


def speedups(name: str, mix: str) -> dict[str, Any]:
    """One rule under one mix: ``{"worst": [batch], "shown": {setup: [batch]}}``, the least speed-up over the
    setups (of rules that are not shown: the first alone), and one by one. A batch that does not fit in memory
    counts like any other: a shorter context would make it fit. Of `HALF` the requests without a prediction are
    ``"others"``.
    """
    every = 2 if mix == HALF else 1
    trace = load_trace(MIXES[0] if mix == HALF else mix)
    rows, others = {}, {}
    for cost in SETUPS if name == SHOWN_RULE else SETUPS[:1]:
        runs = [(simulate(trace, RULES[name][0](cost.captured), b, cost, every=every), b) for b in BATCHES]
        rows[cost.name] = [round(speedup(steps, cost, batch), 3) for steps, batch in runs]
        # The others get a token in each step.
        others[cost.name] = [round(float(cost.ms(b, b) / steps[2].mean()), 3) for steps, b in runs]
    worst = np.min(list(rows.values()), axis=0).tolist()
    found = {"worst": worst, "shown": rows}
    return found | ({"others": others} if mix == HALF else {})


#: Where requests come and go: batches without drafts, tokens of an answer at most, milliseconds simulated.
OPEN_BATCHES, OPEN_TOKENS, OPEN_MS = (16, 64, 256), 512, 60_000.0


def come_and_go(rule: Any, trace: Trace, arrives: Times, number: Ints, row: Ints, end: Ints) -> Iterator[Any]:
    """Serve requests that arrive at these milliseconds, each from a row of the trace to another one, on the shown
    setup. Of each decode step: when it ends, milliseconds, requests, tokens it made; [2] those of edits and of
    others, whose number is below 0."""
    row, now, rng = row.copy(), 0.0, np.random.default_rng(len(row))
    while (row < end).any():
        on = np.flatnonzero((arrives <= now) & (row < end))
        if not len(on):
            now = float(arrives[row < end].min())
            continue
        is_other = number[on] < 0
        length = trace.length[row[on]] * ~is_other
        slots = rule(length, trace.survival[row[on]], number[on])
        accepted = np.minimum(slots, np.minimum(length, trace.matched[row[on]]))
        new = np.minimum(accepted + 1, end[on] - row[on])
        ms = float(DENSE.ms(len(on), len(on) + slots.sum()))
        getattr(rule, "settle", lambda *_: None)(slots, accepted, ms * seen_as(rng))
        row[on] += new
        now += ms
        yield now, ms, np.bincount(is_other, minlength=2), np.bincount(is_other, new, minlength=2)


def rules_of_two() -> dict[str, Any]:
    """None, and the plugin's default."""
    return {"none": lambda length, *_: 0 * length, "plugin": RULES[SHOWN_RULE][0](0)}


def arrivals(batch: int) -> dict[str, list[float]]:
    """Requests that arrive at random, every second one an edit, as fast as keeps `batch` of them without drafts.

    Returns, without and with the plugin, the requests at a time, and the milliseconds a token of edits and others.
    The first quarter is not counted.
    """
    trace, rng = load_trace(MIXES[0]), np.random.default_rng(batch)
    size = np.minimum(np.diff(trace.start), OPEN_TOKENS)
    every_ms = size.mean() * float(DENSE.ms(batch, batch)) / batch
    count = int(1.1 * OPEN_MS / every_ms)
    arrives, record = np.cumsum(rng.exponential(every_ms, count)), rng.integers(len(size), size=count)
    first = trace.start[record] + rng.integers(np.diff(trace.start)[record] - size[record] + 1)
    number = np.arange(count)
    number[1::2] *= -1
    found: dict[str, list[float]] = {}
    for name, rule in rules_of_two().items():
        steps = come_and_go(rule, trace, arrives, number, first, first + size[record])
        counted = [step for step in takewhile(lambda step: step[0] < OPEN_MS, steps) if step[0] > OPEN_MS / 4]
        held, ms = sum(step[1] * step[2] for step in counted), sum(step[1] for step in counted)
        tokens = sum(step[3] for step in counted)
        found[name] = [round(float(x), 2) for x in (held.sum() / ms, *(held / tokens))]
    return found


#: Batches that begin together and end with their last request, tokens of each, and what they gain at least.
CLOSED_BATCHES, CLOSED_TOKENS, CLOSED_LEAST = (16, 64, 256), 256, 1.0


def closed(batch: int) -> dict[str, float]:
    """Throughput over that without drafts of `batch` requests which begin together and write as many tokens each:
    edits, and an edit in every second place. The server has served such a batch before."""
    trace, rng = load_trace(MIXES[0]), np.random.default_rng(batch)
    fits = np.flatnonzero(np.diff(trace.start) >= CLOSED_TOKENS)
    record = rng.choice(fits, batch)
    first = trace.start[record] + rng.integers(np.diff(trace.start)[record] - CLOSED_TOKENS + 1)
    found: dict[str, float] = {}
    for mix, every in ((MIXES[0], 1), (HALF, 2)):
        until = {}
        for name, rule in rules_of_two().items():
            for place in (np.arange(batch), np.arange(batch, 2 * batch)):
                number = np.where(place % every, -1 - place, place)
                steps = come_and_go(rule, trace, np.zeros(batch), number, first, first + CLOSED_TOKENS)
                until[name] = [ended for ended, *_ in steps]
        found[mix] = round(until["none"][-1] / until["plugin"][-1], 3)
    return found


def losses(results: dict[str, Any]) -> list[str]:
    """A line for each batch in which one of the plugin's rules loses by useless predictions, or where every draft
    is rejected, and for each gain that is less than `LEAST`, or than `CLOSED_LEAST` of a closed batch."""
    found, table = [], results["rules"]
    for batch, mix in product(CLOSED_BATCHES, (MIXES[0], HALF)):
        if (value := results["closed"][str(batch)][mix]) < CLOSED_LEAST:
            found.append(f"a closed batch of {batch}, {mix}: {value:.3f}, less than {CLOSED_LEAST}")
    for name, mix in product((name for name in table if name.startswith("plugin")), MIXES[1:]):
        for batch, value in zip(BATCHES, table[name][mix]["worst"], strict=True):
            if value < (least := IN_LARGE if batch >= 64 else NEVER_BELOW):
                found.append(f"{name}, {mix}, batch {batch}: {value:.3f} of no drafts, less than {least}")
    for (setup, mix), gains in LEAST.items():
        row = table[SHOWN_RULE][mix]["shown"][SETUPS[setup].name]
        for batch, least in gains.items():
            if (value := row[BATCHES.index(batch)]) < least:
                found.append(f"{SETUPS[setup].name}, {mix}, batch {batch}: {value:.3f}, less than {least}")
    return found


def _numbers(row: list[float], fits: list[bool]) -> list[str]:
    at = [BATCHES.index(batch) for batch in COLUMNS]
    return [f"{row[i]:.2f}" + ("" if fits[i] else " ×") for i in at]


def one_setup(results: dict[str, Any]) -> str:
    """The speed-up over no drafts: edits on the first shown setup by batch, and the worst of all setups."""
    setup, fits = next(iter(results["fits"].items()))
    rows = []
    for name, rule in results["rules"].items():
        worst = (f"{min(rule[mix]['worst']):.3f}" for mix in ("unrelated", "rejected"))
        rows.append([f"`{name}`", *_numbers(rule["edit"]["shown"][setup], fits), *worst, RULES[name][1]])
    columns = [*(f"{batch:,}" for batch in COLUMNS), "worst, unrelated", "worst, rejected"]
    return tables.table(["rule", *columns, ""], rows, f"l{'r' * len(columns)}l")


def gains(results: dict[str, Any]) -> str:
    """The plugin's default on the shown setups, in asynchronous scheduling."""
    found, rows = results["rules"][SHOWN_RULE], []
    for setup in SHOWN:
        shown = {mix: found[mix]["shown"] for mix in ("edit", "unrelated", HALF)}
        shown["others"] = found[HALF]["others"]
        fits = results["fits"][setup]
        rows += [[f"{setup}: {mix}", *_numbers(of[setup], fits)] for mix, of in shown.items()]
        rows[-1][1] = "–"  # a batch of one has no others
    return tables.table(["", *(f"{batch:,}" for batch in COLUMNS)], rows)


def machines(results: dict[str, Any]) -> str:
    """Edits by the default rule on the shown setups; the least that another file as prediction gives."""
    found, rows = results["rules"][SHOWN_RULE], []
    for setup in SHOWN:
        least = min(found["unrelated"]["shown"][setup])
        rows.append([setup, *_numbers(found["edit"]["shown"][setup], results["fits"][setup]), f"{least:.2f}"])
    return tables.table(["", *(f"{batch:,}" for batch in COLUMNS), "another file, least"], rows)


def open_loop(results: dict[str, Any]) -> str:
    """Requests that come and go, without drafts and with the plugin."""
    found = results["arrivals"]
    names = ("requests at a time", "ms a token, edits", "ms a token, the others")
    rows = [[name, *(" → ".join(f"{row[i]:.{min(i, 1)}f}" for row in one.values()) for one in found.values())]
            for i, name in enumerate(names)]  # fmt: skip
    return tables.table(["batch without drafts", *found], rows)


def begun_together(results: dict[str, Any]) -> str:
    """Closed batches, by batch size."""
    found = results["closed"]
    rows = [[mix, *(f"{one[mix]:.2f}" for one in found.values())] for mix in (MIXES[0], HALF)]
    return tables.table(["", *found], rows)


def captured(results: dict[str, Any]) -> str:
    """Edits and half a batch, by the tokens of the largest CUDA graph."""
    found, rows = results["rules"][SHOWN_RULE], []
    for cost, name in ((SETUPS[1], f"up to {SETUPS[1].captured} tokens"), (SETUPS[0], "of any size")):
        for mix in (MIXES[0], HALF):
            shown = found[mix]["shown"][cost.name]
            rows.append([f"{name}: {mix}", *(f"{shown[BATCHES.index(b)]:.2f}" for b in CLOSED_BATCHES)])
    return tables.table(["graphs", *map(str, CLOSED_BATCHES)], rows)


def checked(results: dict[str, Any]) -> str:
    """Milliseconds of a step of 8B in bf16 on an H200, as measured and by `Roofline`."""
    measured = {row["name"]: row for row in tables.read("gpu")["throughput"]["rows"]}
    cost = Roofline(H200, SMALL, "bf16", context=450)
    batches, rows = (1, 16, 64, 256), []
    for case, tokens in (("none, no drafts", 1), ("ngram, exact text in the prompt", 17)):
        found = ((measured[f"batch {b}: {case}"]["step_ms"], float(cost.ms(b, b * tokens))) for b in batches)
        rows.append([f"{tokens} a request", *(f"{ms:.1f} / {model:.1f}" for ms, model in found)])
    return tables.table(["tokens, measured / model", *map(str, batches)], rows)


def main(
    keep_traces: Annotated[bool, typer.Option("--keep-traces", help="use the traces that are there")] = False,
    write: Annotated[bool, typer.Option("--write", help="into benchmarks/results and the pages")] = False,
) -> None:
    """Throughput of drafting rules on paper, from real edits and step-time curves."""
    if not keep_traces:
        make_traces()
    trace, mixes = load_trace("edit"), (*MIXES, HALF)
    table = {rule: {mix: speedups(rule, mix) for mix in mixes} for rule in RULES}
    results = {
        "made_by": "python -m benchmarks.serving",
        "versions": {"gpu_align": gpu_align.__version__, "python": platform.python_version()},
        "records": len(trace.start) - 1,
        "positions": len(trace.length),
        "num_draft_tokens": K,
        "drafter_us": DRAFTER_US,
        "batches": list(BATCHES),
        "fits": {cost.name: [cost.fits(b) for b in BATCHES] for cost in SETUPS if cost.name in SHOWN},
        "setups": [cost.name for cost in SETUPS],
        "rules": table,
        "arrivals": {str(batch): arrivals(batch) for batch in OPEN_BATCHES},
        "closed": {str(batch): closed(batch) for batch in CLOSED_BATCHES},
    }
    typer.echo(one_setup(results))
    if write:
        tables.write_json(tables.RESULTS / "serving.json", results)
        tables.fill_file(
            tables.DOCS / "worth-it.md",
            {"gains": gains, "open": open_loop, "closed": begun_together},
            results,
        )
        tables.fill_file(tables.DOCS / "tuning.md", {"captured": captured}, results)
        tables.fill_file(tables.ROOT / "README.md", {"machines": machines}, results)
        fill = {"edit": one_setup, "checked": checked}
        tables.fill_file(Path(__file__).with_name("README.md"), fill, results)
    found = losses(results)
    for line in found:
        typer.echo(f"error: {line}", err=True)
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
