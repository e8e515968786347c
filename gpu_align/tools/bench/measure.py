"""Sends the requests: the first run, warm-ups, the turns of each stage, the check of answers that differ."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from .client import Alternatives, Answer, BenchError, Client, RequestRefusedError, Verdict, is_near_tie
from .data import Choice, Pair, SentPredictions, make_predictions

#: In the order of tables. `ngram` is vLLM's own drafter, on a server of its own.
MODES = ("none", "prediction", "unrelated", "ngram")
MAX_CONCURRENCY = 4096


@dataclass(frozen=True)
class BenchSettings:
    """How to measure.

    Attributes:
        concurrency: requests in flight, a measurement each.
        modes: a selection of `MODES`, in their order.
        rounds: how often each combination is measured.
        requests: requests of one combination in one round; 0: the pairs once, and at least two each stream.
        max_tokens: the most output tokens of a request.
        prediction: which predictions to send, see `make_predictions`.
        tie_margin: the largest difference of two log probabilities that counts as a near tie.
        timeout_s: the longest wait for a piece of an answer.
        fresh_prefix: whether each request is prefilled anew.
    """

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    modes: tuple[str, ...] = MODES[:3]
    rounds: int = 3
    requests: int = 0
    max_tokens: int = 1024
    prediction: Choice = "auto"
    tie_margin: float = 0.25
    timeout_s: float = 600.0
    fresh_prefix: bool = True

    def requests_at(self, concurrency: int, pairs: int) -> int:
        """Return the number of requests of one turn."""
        return self.requests or max(pairs, 2 * concurrency)

    def num_requests(self, pairs: int) -> int:
        """Return how many requests the first run and all turns send."""
        each = sum(self.requests_at(streams, pairs) for streams in self.concurrency)
        return pairs + each * len(self.modes) * self.rounds


class Turn(NamedTuple):
    """One measurement: a mode at a concurrency, in a round."""

    round: int
    concurrency: int
    mode: str


def turns(modes: Sequence[str], concurrency: Sequence[int], rounds: int) -> Iterator[Turn]:
    """Every mode at every concurrency in every round.

    The modes of one concurrency run one after another, so that a slow minute hits all of them. The first of them
    changes from round to round, so that none is always the first.
    """
    for number in range(rounds):
        for place, streams in enumerate(concurrency):
            shift = (number + place) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                yield Turn(number, streams, mode)


def parse_modes(text: str) -> tuple[str, ...]:
    """Read ``none,prediction``; a name that is none of `MODES`, or no name at all, raises BenchError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        found = unknown[0] if unknown else text
        raise BenchError(f"--modes: expected some of {','.join(MODES)}, found {found!r}", usage=True)
    return tuple(mode for mode in MODES if mode in names)


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Read ``1,8,32``; what is no number from 1 to `MAX_CONCURRENCY` raises BenchError."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) if word.isascii() and word.isdigit() and len(word) < 9 else 0 for word in words]
    if not all(1 <= number <= MAX_CONCURRENCY for number in numbers):
        raise BenchError(
            f"--concurrency: expected numbers from 1 to {MAX_CONCURRENCY} as in 1,8,32, found {text!r}",
            usage=True,
        )
    return tuple(dict.fromkeys(numbers))


#: How long `/metrics` may lag behind the last answer.
SETTLE_S = 3.0
#: How long other counters may still move once all output tokens are counted.
REST_S = 0.5
_POLL_S = 0.05


#: Counters of `/metrics`, and what they are called here.
_COUNTERS = {
    "vllm:generation_tokens_total": "generated",
    "vllm:request_success_total": "requests",
    "vllm:spec_decode_num_drafts_total": "vllm_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "vllm_drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "vllm_accepted",
    "gpu_align_steps_total": "plugin_steps",
}


@dataclass(frozen=True)
class Counts:
    """Counters of one moment, or what they counted between two.

    Attributes:
        generated: output tokens of all requests.
        requests: finished requests.
        plugin_steps: forward passes that produced tokens of a request that gets drafts (our plugin's counter).
        vllm_drafts: steps of a request that verified draft tokens, as vLLM counts them.
        vllm_drafted, vllm_accepted: draft tokens as vLLM counts them, also after an answer's end.
        drafts: draft tokens that the plugin verified, by (source, verdict).
        has_plugin: whether the server has our plugin's counters.
        has_drafts: whether it has vLLM's counters of speculative decoding.
        info: labels of `gpu_align_info`, empty where there is none.
    """

    generated: int = 0
    requests: int = 0
    plugin_steps: int = 0
    vllm_drafts: int = 0
    vllm_drafted: int = 0
    vllm_accepted: int = 0
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)
    has_plugin: bool = False
    has_drafts: bool = False
    info: dict[str, str] = field(default_factory=dict)

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        numbers = {name: getattr(self, name) - getattr(before, name) for name in _COUNTERS.values()}
        drafts = Counter({key: n - before.drafts[key] for key, n in self.drafts.items()})
        return Counts(**numbers, drafts=drafts, has_plugin=self.has_plugin, has_drafts=self.has_drafts)

    @property
    def accepted(self) -> int:
        """Draft tokens that the model agreed with, from all sources."""
        return self._verdict("accepted") if self.has_plugin else self.vllm_accepted

    @property
    def rejected(self) -> int:
        """Draft tokens that were verified and refused."""
        return self._verdict("rejected") if self.has_plugin else self.vllm_drafted - self.vllm_accepted

    @property
    def steps(self) -> int:
        """Forward passes that produced tokens, a pass counted once for each request in it.

        The plugin counts them for requests that get drafts. Other requests get one token a step. With vLLM's own
        drafts this is the larger of two lower bounds: the output tokens less the accepted ones, of which some may
        be beyond an answer's end; and the steps with drafts and one prefill a request.
        """
        if self.has_plugin or not self.vllm_drafts:
            return self.plugin_steps or self.generated
        return max(self.generated - self.vllm_accepted, self.vllm_drafts + self.requests)

    def by_source(self) -> dict[str, dict[str, int]]:
        """Return accepted and rejected draft tokens of each source that had any."""
        sources = sorted({source for (source, _), n in self.drafts.items() if n})
        verdicts = ("accepted", "rejected")
        return {source: {v: self.drafts[source, v] for v in verdicts} for source in sources}

    def _verdict(self, verdict: str) -> int:
        return sum(n for (_, found), n in self.drafts.items() if found == verdict)


def parse(text: str) -> Counts:
    """Read the counters of a `/metrics` page, summed over engines and API servers; else ValueError."""
    numbers: Counter[str] = Counter()
    drafts: Counter[tuple[str, str]] = Counter()
    has_plugin, info = False, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            has_plugin |= sample.name.startswith("gpu_align_")
            if name := _COUNTERS.get(sample.name):
                numbers[name] += int(sample.value)
            elif sample.name == "gpu_align_draft_tokens_total":
                drafts[sample.labels["source"], sample.labels["verdict"]] += int(sample.value)
            elif sample.name == "gpu_align_info":
                info = dict(sample.labels)
    return Counts(
        **numbers, drafts=drafts, has_plugin=has_plugin, has_drafts="vllm_drafts" in numbers, info=info
    )


async def scrape(fetch: Callable[[], Awaitable[str | None]]) -> Counts | None:
    """Return the counters; None where the server has no `/metrics` that vLLM wrote."""
    text = await fetch()
    try:
        return parse(text) if text and "vllm:generation_tokens" in text else None
    except (ValueError, KeyError, OverflowError):
        return None


async def settled(fetch: Callable[[], Awaitable[str | None]], before: Counts, tokens: int) -> Counts | None:
    """Return what was counted since `before`, once all `tokens` output tokens are in it and nothing moves.

    The counters of the last step may come a moment after its tokens. After `SETTLE_S` seconds, or `REST_S` seconds
    after all tokens are in it, it returns what there is: other clients may keep a server busy.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    last: Counts | None = None
    while True:
        now = await scrape(fetch)
        if now is None:
            return None
        found = now.since(before)
        if found == last and found.generated >= tokens:
            return found
        if found.generated >= tokens:
            deadline = min(deadline, loop.time() + REST_S)
        if loop.time() >= deadline:
            return found
        last = found
        await asyncio.sleep(_POLL_S)


PERCENTILES = (50, 90, 99)


@dataclass
class Sample:
    """One turn: a mode at a concurrency in one round.

    Attributes:
        turn: which.
        answers: (pair, answer) of each request.
        seconds: wall time from the first request to the last answer.
        counts: what `/metrics` counted meanwhile; None without one.
        different: (pair, text) of each answer that is not the first run's.
    """

    turn: Turn
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    seconds: float = 0.0
    counts: Counts | None = None
    different: list[tuple[int, str]] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.output_tokens for _, answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams a second."""
        return self.output_tokens / self.seconds

    @property
    def steps(self) -> int:
        """Verification steps. vLLM's own drafts are not counted by step; no step sends more than one piece."""
        if self.counts is None:
            return 0
        exact = self.counts.has_plugin or not self.counts.vllm_drafts
        pieces = sum(1 + len(answer.gaps) for _, answer in self.answers)
        return self.counts.steps if exact else max(self.counts.steps, pieces)


@dataclass
class Result:
    """All that a run knows; a file and a page can be made of it at any moment.

    Attributes:
        about: version, model, tokenizer, servers, settings, data.
        samples: finished turns.
        verdicts: of each different (pair, text), once it has been checked.
        notes: sentences that a reader must know.
        complete: whether all turns are there.
    """

    about: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    verdicts: dict[tuple[int, str], Verdict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def runs(self) -> list[dict[str, Any]]:
        """Return one object a mode and concurrency, all rounds together."""
        modes = list(dict.fromkeys(self.about.get("settings", {}).get("modes", ())))
        found = {(sample.turn.mode, sample.turn.concurrency) for sample in self.samples}
        order = sorted(found, key=lambda key: (key[1], modes.index(key[0]) if key[0] in modes else 0))
        return [self._run(mode, concurrency) for mode, concurrency in order]

    def as_json(self) -> dict[str, Any]:
        """Return the whole result, without dates and without any text of a request."""
        return {**self.about, "complete": self.complete, "notes": self.notes, "runs": self.runs()}

    def _run(self, mode: str, concurrency: int) -> dict[str, Any]:
        samples = [s for s in self.samples if (s.turn.mode, s.turn.concurrency) == (mode, concurrency)]
        answers = [answer for sample in samples for _, answer in sample.answers]
        tokens = sum(sample.output_tokens for sample in samples)
        verdicts = [self.verdicts.get(key) for sample in samples for key in sample.different]
        # The worst verdict of all answers; None while one has not been checked.
        identical = next((v for v in ("no", None, "near-tie") if v in verdicts), "yes")
        return {
            "mode": mode,
            "concurrency": concurrency,
            "requests": len(answers),
            "output_tokens": tokens,
            "tokens_per_s": round(tokens / sum(sample.seconds for sample in samples), 2),
            "ttft_ms": _percentiles([answer.ttft_s for answer in answers]),
            "itl_ms": _percentiles([gap for answer in answers for gap in answer.token_gaps_s()]),
            **_drafts(samples),
            "identical": identical,
            "different": len(verdicts),
            "near_ties": verdicts.count("near-tie"),
            "piece_ms": _percentiles([seconds for answer in answers for seconds, _ in answer.gaps]),
            "speed_up": self._speed_up(samples),
            "rounds": [{"seconds": round(s.seconds, 4), "output_tokens": s.output_tokens} for s in samples],
        }

    def _speed_up(self, samples: Sequence[Sample]) -> dict[str, float] | None:
        """Tokens a second as a multiple of mode none in the same round: median, least, largest."""
        rates = {s.turn: s.tokens_per_s for s in self.samples if s.turn.mode == "none"}
        pairs = [(sample, rates.get(sample.turn._replace(mode="none"))) for sample in samples]
        ratios = [sample.tokens_per_s / rate for sample, rate in pairs if rate is not None]
        if not ratios or samples[0].turn.mode == "none":
            return None
        values = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        return {name: round(value, 4) for name, value in values.items()}


def _drafts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Steps, accepted and rejected draft tokens: of `/metrics`, else of `usage`, else None."""
    counts = [sample.counts for sample in samples if sample.counts is not None]
    if len(counts) == len(samples):
        sources: dict[str, Counter[str]] = {}
        for count in counts:
            for source, verdicts in count.by_source().items():
                sources.setdefault(source, Counter()).update(verdicts)
        return {
            "steps": sum(sample.steps for sample in samples),
            "accepted": sum(count.accepted for count in counts),
            "rejected": sum(count.rejected for count in counts),
            "by_source": {source: dict(verdicts) for source, verdicts in sources.items()},
        }
    known = [answer for sample in samples for _, answer in sample.answers if answer.accepted is not None]
    return {
        "steps": None,
        "accepted": sum(answer.accepted or 0 for answer in known) if known else None,
        "rejected": sum(answer.rejected or 0 for answer in known) if known else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 in milliseconds; None without values."""
    found = np.percentile(seconds, PERCENTILES).tolist() if seconds else [None] * len(PERCENTILES)
    return {
        f"p{p}": None if value is None else round(value * 1000, 3)
        for p, value in zip(PERCENTILES, found, strict=True)
    }


#: Called with what is being done and the number of requests that are now finished.
Advance = Callable[[str, int], None]
T = TypeVar("T")

FIRST_RUN_STREAMS = 8
WARM_UP_TOKENS = 32
#: The client's share of a core beyond which its own work is part of the latencies.
BUSY = 0.85


class Session:
    """One run over one set of pairs; `result` is complete up to the last finished turn at any moment.

    Args:
        pairs: [P] the edits; those that the server refuses are left out in the first run.
        settings: how to measure.
        result: what is filled.
        advance: the progress.
        predict: makes the predictions of the pairs and the outputs of the first run; None: `make_predictions`.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        settings: BenchSettings,
        result: Result,
        advance: Advance,
        predict: Callable[[Sequence[Pair], Sequence[str]], SentPredictions] | None = None,
    ) -> None:
        self.pairs = list(pairs)
        self.settings = settings
        self.result = result
        self._advance = advance
        self._predict = predict or partial(make_predictions, choice=settings.prediction)
        self._outputs: list[str] = []
        self._predictions: Mapping[str, Sequence[str]] = {}

    async def stage(self, clients: Mapping[str, Client]) -> None:
        """Measure all modes of one stage, interleaved. The first stage begins with the first run.

        Raises:
            BenchError: a server fails, refuses all pairs, or sends what is no answer.
        """
        if not self._outputs:
            await self._first_run(clients.get("none") or next(iter(clients.values())))
        for mode, client in clients.items():
            await self._warm_up(mode, client)
        for turn in turns(list(clients), self.settings.concurrency, self.settings.rounds):
            self.result.samples.append(await self._turn(turn, clients[turn.mode]))
        await self._check_differences(clients)

    async def _first_run(self, client: Client) -> None:
        """Answer each pair once, without predictions. Its outputs are what all later ones are compared with."""
        outputs: dict[int, str] = {}
        refusals: list[str] = []

        async def answer(index: int) -> None:
            try:
                outputs[index] = (await self._send(client, "none", index, self.settings.max_tokens)).text
            except RequestRefusedError as error:
                refusals.append(f"pair {self.pairs[index].id}: {error}")
            self._advance("first run", 1)

        await _each(range(len(self.pairs)), FIRST_RUN_STREAMS, answer)
        if not outputs:
            raise BenchError(f"the server refused every pair; {refusals[0]}")
        if refusals:
            self.result.note(f"{len(refusals)} of {len(self.pairs)} pairs are left out: {refusals[0]}")
        kept = sorted(outputs)
        self.pairs = [self.pairs[index] for index in kept]
        self._outputs = [outputs[index] for index in kept]
        predictions = self._predict(self.pairs, self._outputs)
        self._predictions = predictions.texts
        before, after = (predictions.sources.count(source) for source in ("before", "output"))
        self.result.about["predictions"] = {"pairs": len(kept), "before": before, "output": after}
        if "prediction" in self.settings.modes:
            self.result.note(predictions.sentence())

    async def _warm_up(self, mode: str, client: Client) -> None:
        streams = max(self.settings.concurrency)
        tokens = min(self.settings.max_tokens, WARM_UP_TOKENS)

        async def answer(number: int) -> None:
            await self._send(client, mode, number % len(self.pairs), tokens)

        await _each(range(min(2 * streams, max(8, streams))), streams, answer)

    async def _turn(self, turn: Turn, client: Client) -> Sample:
        """Send the requests of one turn; `/metrics` is read before and after."""
        requests = self.settings.requests_at(turn.concurrency, len(self.pairs))
        sample = Sample(turn)
        name = f"{turn.mode}, {turn.concurrency} at a time"
        self._advance(name, 0)

        async def answer(number: int) -> None:
            index = (turn.round * requests + number) % len(self.pairs)
            try:
                found = await self._send(client, turn.mode, index, self.settings.max_tokens)
            except BenchError as error:
                raise type(error)(f"{name}, pair {self.pairs[index].id}: {error}", log=error.log) from error
            sample.answers.append((index, found))
            self._advance(name, 1)

        before = await scrape(client.metrics)
        started, busy = time.perf_counter(), time.process_time()
        await _each(range(requests), turn.concurrency, answer)
        sample.seconds = time.perf_counter() - started
        if time.process_time() - busy > BUSY * sample.seconds:
            self.result.note(
                f"This client kept a core busy at {turn.concurrency} requests at a time: the server may be faster "
                "than measured there."
            )
        texts = ((index, found.text) for index, found in sample.answers)
        sample.different = [(index, text) for index, text in texts if text != self._outputs[index]]
        if before is not None:
            sample.counts = await settled(client.metrics, before, sample.output_tokens)
        counted = sample.counts.generated if sample.counts else 0
        if sample.counts is None:
            self.result.note(
                f"no /metrics of vLLM at {client.base_url}: steps are unknown, and accepted and rejected are "
                "those of `usage`."
            )
        elif counted > sample.output_tokens:
            self.result.note(
                f"{client.base_url} also served others: /metrics counted {counted:,} output tokens where this run "
                f"got {sample.output_tokens:,}. Steps, accepted and rejected include theirs."
            )
        elif counted < sample.output_tokens:
            self.result.note(
                f"/metrics of {client.base_url} counted {counted:,} output tokens where this run got "
                f"{sample.output_tokens:,}: not all replicas answer there. Steps and draft tokens are too low."
            )
        return sample

    async def _check_differences(self, clients: Mapping[str, Client]) -> None:
        """Ask for log probabilities where answers differ, once a pair, and decide which are near ties."""
        client = clients.get("none") or next(iter(clients.values()))
        found = dict.fromkeys(key for sample in self.result.samples for key in sample.different)
        open_keys = [key for key in found if key not in self.result.verdicts]
        places: dict[int, list[Alternatives]] = {}

        async def ask(index: int) -> None:
            try:
                messages = self.pairs[index].messages()
                places[index] = await client.alternatives(messages, self.settings.max_tokens)
            except BenchError:
                places[index] = []  # a server that gives no log probabilities: the difference stays one

        await _each(dict.fromkeys(index for index, _ in open_keys), FIRST_RUN_STREAMS, ask)
        for index, text in open_keys:
            tie = is_near_tie(self._outputs[index], text, places[index], self.settings.tie_margin)
            self.result.verdicts[index, text] = "near-tie" if tie else "no"

    async def _send(self, client: Client, mode: str, index: int, max_tokens: int) -> Answer:
        prediction = self._predictions[mode][index] if mode in self._predictions else None
        return await client.stream(self.pairs[index].messages(), max_tokens, prediction)


async def _each(items: Iterable[T], streams: int, work: Callable[[T], Awaitable[None]]) -> None:
    """Run `work` on every item, at most `streams` at a time; the first error stops all."""
    waiting = iter(items)

    async def stream() -> None:
        for item in waiting:
            await work(item)

    tasks = [asyncio.ensure_future(stream()) for _ in range(streams)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
