"""Sends the requests: the first run, warm-ups, the turns of each stage."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..console import Advance, counted, lasting
from ..inputs import Pair
from .client import Answer, BenchError, Client, Counts, RequestRefusedError
from .data import Choice, SentPredictions, make_predictions

#: In the order of tables. `plain` is none on the server that none does not use, `ngram` vLLM's own drafter there.
MODES = ("none", "prediction", "unrelated", "context", "conversation", "plain", "ngram")
#: Modes that are measured only where they are named.
ASKED_FOR = ("context", "conversation", "plain")
#: Further fields of a mode's requests.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "context": {"vllm_xargs": {"gpu_align": "on"}},
    "conversation": {"vllm_xargs": {"conversation": True}},
}


@dataclass(frozen=True)
class BenchSettings:
    concurrency: tuple[int, ...]  #: requests in flight, a measurement each
    modes: tuple[str, ...]  #: in the order of tables, for instance a selection of `MODES`
    rounds: int  #: how often each combination is measured
    max_tokens: int  #: the most output tokens of a request
    requests: int = 0  #: of one combination in one round; 0: the pairs once, and at least two each stream
    prediction: Choice = "auto"  #: see `make_predictions`
    timeout_s: float = 600.0  #: the longest wait for a piece of an answer
    fresh_prefix: bool = True  #: each request is prefilled anew

    def requests_at(self, concurrency: int, pairs: int) -> int:
        return self.requests or max(pairs, 2 * concurrency)


class Pace(NamedTuple):
    """The speed of a server in the first run."""

    tokens: float  #: of an answer, on average
    rate: float  #: tokens a second
    streams: int  #: requests in flight

    def seconds(self, requests: int, concurrency: int) -> float:
        """Of so many requests without drafts, at most: more streams are as fast together, fewer as fast each."""
        return requests * self.tokens / (self.rate * min(1.0, concurrency / self.streams))


def planned_s(settings: BenchSettings, pairs: int, pace: Pace) -> float:
    each = (pace.seconds(settings.requests_at(n, pairs), n) for n in settings.concurrency)
    return sum(each) * len(settings.modes) * settings.rounds


def fitted(settings: BenchSettings, pairs: int, pace: Pace) -> BenchSettings:
    """Leave out the highest concurrencies, then requests, until the turns end in `MOST_S`."""
    while (seconds := planned_s(settings, pairs, pace)) > MOST_S and len(settings.concurrency) > 1:
        settings = replace(settings, concurrency=settings.concurrency[:-1])
    if seconds <= MOST_S or settings.requests:
        return settings
    requests = settings.requests_at(settings.concurrency[0], pairs)
    return replace(settings, requests=max(1, int(requests * MOST_S / seconds)))


class Turn(NamedTuple):
    """One measurement: a mode at a concurrency, in a round."""

    round: int
    concurrency: int
    mode: str


def turns(modes: Sequence[str], concurrency: Sequence[int], rounds: int) -> Iterator[Turn]:
    """Every mode at every concurrency in every round. Those of one concurrency run one after another, so that a
    slow minute hits all of them, and the first of them changes from round to round."""
    for number in range(rounds):
        for place, streams in enumerate(concurrency):
            shift = (number + place) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                yield Turn(number, streams, mode)


@dataclass
class Sample:
    turn: Turn
    answers: list[tuple[int, Answer]] = field(default_factory=list)  #: (pair, answer) of each request
    seconds: float = 0.0  #: wall time from the first request to the last answer
    counts: Counts | None = None  #: what `/metrics` counted meanwhile; None without one
    different: int = 0  #: answers that are not the first run's

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for _, answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def steps(self) -> int:
        """Verification steps; no step sends more than one piece."""
        pieces = sum(len(answer.pieces) for _, answer in self.answers)
        return self.counts.steps(pieces) if self.counts is not None else 0


@dataclass
class Result:
    """All that a run knows; a file and a page can be made of it at any moment."""

    about: dict[str, Any] = field(default_factory=dict)  #: version, model, tokenizer, servers, settings, data
    samples: list[Sample] = field(default_factory=list)  #: finished turns
    notes: list[str] = field(default_factory=list)  #: sentences that a reader must know
    complete: bool = False  #: whether all turns are there

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def runs(self) -> list[dict[str, Any]]:
        """One object a mode and concurrency, all rounds together."""
        modes = list(self.about.get("settings", {}).get("modes", ()))
        grouped: dict[tuple[int, int], list[Sample]] = {}
        for sample in self.samples:
            grouped.setdefault((sample.turn.concurrency, modes.index(sample.turn.mode)), []).append(sample)
        return [self._run(grouped[key]) for key in sorted(grouped)]

    def as_json(self) -> dict[str, Any]:
        """Without dates, and without any text of a request."""
        return {**self.about, "complete": self.complete, "notes": self.notes, "runs": self.runs()}

    def _run(self, samples: Sequence[Sample]) -> dict[str, Any]:
        answers = [answer for sample in samples for _, answer in sample.answers]
        tokens = sum(sample.output_tokens for sample in samples)
        different = sum(sample.different for sample in samples)
        gaps = [seconds for answer in answers for seconds, _ in answer.pieces[1:]]
        return {
            "mode": samples[0].turn.mode,
            "concurrency": samples[0].turn.concurrency,
            "requests": len(answers),
            "output_tokens": tokens,
            "tokens_per_s": round(tokens / sum(sample.seconds for sample in samples), 2),
            "ttft_ms": _percentiles([answer.pieces[0][0] for answer in answers]),
            "itl_ms": _percentiles([gap for answer in answers for gap in answer.token_gaps_s()]),
            **_drafts(samples, answers),
            "identical": "no" if different else "yes",
            "different": different,
            "piece_ms": _percentiles(gaps),
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


def _drafts(samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, Any]:
    """Steps, accepted and rejected draft tokens: of `/metrics`, else of `usage`, else None."""
    counts = [sample.counts for sample in samples if sample.counts is not None]
    if len(counts) == len(samples):
        total = Counts(has_plugin=counts[0].has_plugin)
        for count in counts:
            total.numbers.update(count.numbers)
            total.drafts.update(count.drafts)
        return {
            "steps": sum(sample.steps for sample in samples),
            "accepted": total.accepted,
            "rejected": total.rejected,
            "by_source": total.by_source(),
        }
    known = [answer for answer in answers if answer.accepted is not None]
    return {
        "steps": None,
        "accepted": sum(answer.accepted or 0 for answer in known) if known else None,
        "rejected": sum(answer.rejected or 0 for answer in known) if known else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 in milliseconds; None without values."""
    if not seconds:
        return dict.fromkeys(("p50", "p90", "p99"))
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1000, 3) for p in (50, 90, 99)}


def is_loop(text: str) -> bool:
    """Whether a text ends in a loop: its last ``max(3 * p, 60)`` characters repeat every p, for some p."""
    tails = ((period, text[-max(3 * period, 60) :]) for period in range(1, len(text) // 3 + 1))
    return any(len(tail) >= 60 and tail[period:] == tail[:-period] for period, tail in tails)


T = TypeVar("T")

FIRST_RUN_STREAMS = 8
#: Seconds that the turns may take without a given concurrency.
MOST_S = 600.0
WARM_UP_TOKENS = 32
#: Pieces come in bursts where the median time between them is below this share of the mean, of so many pieces.
BURST, FEW_PIECES = 0.2, 20
#: The client's share of a core beyond which its own work is part of the latencies.
BUSY = 0.85


@dataclass
class Session:
    """One run over one set of pairs; `result` is complete up to the last finished turn at any moment."""

    pairs: list[Pair]  #: the edits; those that the server refuses are left out in the first run
    settings: BenchSettings
    result: Result
    #: makes the predictions of the pairs and the outputs of the first run; None: `make_predictions`
    predict: Callable[[Sequence[Pair], Sequence[str]], SentPredictions] | None = None
    tell: Callable[[str], object] = lambda _: None  #: told the plan
    fit: bool = False  #: whether concurrencies and requests are cut down to what the server does in `MOST_S`
    #: told what is being done, and of requests as they are finished
    advance: Advance = lambda name, done, total=None: None
    most_streams: int | None = None  #: the most requests that the server runs at once; None: unknown

    def __post_init__(self) -> None:
        self._outputs: list[str] = []
        self._sent = SentPredictions({}, [])

    async def stage(self, clients: Mapping[str, Client]) -> None:
        """Measure all modes of one stage, interleaved. The first stage begins with the first run. BenchError: a
        server fails, refuses all pairs, or sends what is no answer."""
        if not self._outputs:
            self._plan()
            await self._first_run(clients.get("none") or next(iter(clients.values())))
        for mode, client in clients.items():
            await self._warm_up(mode, client)
        for turn in turns(list(clients), self.settings.concurrency, self.settings.rounds):
            self.result.samples.append(await self._turn(turn, clients[turn.mode]))

    def _plan(self, pace: Pace | None = None) -> None:
        """Say what will be sent; with the pace of the first run, also how long it takes."""
        settings, pairs = self.settings, len(self.pairs)
        if self.fit:
            limit = self.most_streams or max(settings.concurrency)
            levels = dict.fromkeys(min(streams, limit) for streams in settings.concurrency)
            settings = replace(settings, concurrency=tuple(levels))
            settings = settings if pace is None else fitted(settings, pairs, pace)
            if settings != self.settings:
                self.settings = settings
                self.result.about["settings"] = asdict(settings)
        each = sum(settings.requests_at(streams, pairs) for streams in settings.concurrency)
        requests = each * len(settings.modes) * settings.rounds + (pairs if pace is None else 0)
        levels_text = ", ".join(map(str, settings.concurrency))
        plan = f"plan: {counted(requests, 'request')}, {levels_text} at a time, "
        if pace is None:
            self.tell(f"{plan}at most {requests * settings.max_tokens:,} tokens")
            return
        seconds = planned_s(settings, pairs, pace)
        self.advance("", 0, max(1, round(1000 * seconds)))
        tokens = f"about {requests * pace.tokens:,.0f} tokens, at {pace.rate:,.0f} a second in the first run"
        self.tell(f"{plan}{tokens}: at most {lasting(seconds)}")

    async def _first_run(self, client: Client) -> None:
        """Answer each pair once, without predictions. Its outputs are what all later ones are compared with."""
        outputs: dict[int, str] = {}
        refusals: list[str] = []
        tokens, started = 0, time.perf_counter()

        async def answer(index: int) -> None:
            nonlocal tokens
            try:
                found = await self._send(client, "none", index, self.settings.max_tokens)
                outputs[index], tokens = found.text, tokens + found.output_tokens
            except RequestRefusedError as error:
                refusals.append(f"pair {self.pairs[index].id}: {error}")
            self.advance(f"first run, {len(outputs) + len(refusals)} of {len(self.pairs)} edits", 0)

        await _each(range(len(self.pairs)), FIRST_RUN_STREAMS, answer)
        if not outputs:
            raise BenchError(f"the server refused every pair; {refusals[0]}")
        if refusals:
            self.result.note(f"{len(refusals)} of {len(self.pairs)} pairs are left out: {refusals[0]}")
        kept = sorted(outputs)
        self.pairs = [self.pairs[index] for index in kept]
        self._outputs = [outputs[index] for index in kept]
        if loops := [p.id for p, text in zip(self.pairs, self._outputs, strict=True) if is_loop(text)]:
            self.result.note(
                f"{len(loops)} of {counted(len(kept), 'answer')} end in a loop, the first that of {loops[0]}: "
                "a loop is drafted at no cost, so these figures tell little about edits."
            )
        tokens = max(tokens, 1)
        rate = tokens / (time.perf_counter() - started)
        self._pace = Pace(tokens / len(kept), rate, min(FIRST_RUN_STREAMS, len(kept)))
        self._plan(self._pace)
        predict = self.predict or partial(make_predictions, choice=self.settings.prediction)
        self._sent = predict(self.pairs, self._outputs)
        sources = {source: self._sent.sources.count(source) for source in ("before", "output")}
        self.result.about["predictions"] = {"pairs": len(kept), **sources}
        if "prediction" in self.settings.modes:
            self.result.note(self._sent.sentence())

    async def _warm_up(self, mode: str, client: Client) -> None:
        streams = max(self.settings.concurrency)
        tokens = min(self.settings.max_tokens, WARM_UP_TOKENS)

        async def answer(number: int) -> None:
            await self._send(client, mode, self._sent.pair_of.get(mode, number % len(self.pairs)), tokens)

        await _each(range(min(2 * streams, max(8, streams))), streams, answer)

    async def _turn(self, turn: Turn, client: Client) -> Sample:
        """Send the requests of one turn; `/metrics` is read before and after."""
        requests = self.settings.requests_at(turn.concurrency, len(self.pairs))
        sample = Sample(turn)
        name = f"{turn.mode}, {turn.concurrency} at a time"
        self.advance(name, 0)

        async def answer(number: int) -> None:
            index = self._sent.pair_of.get(turn.mode, (turn.round * requests + number) % len(self.pairs))
            try:
                found = await self._send(client, turn.mode, index, self.settings.max_tokens)
            except BenchError as error:
                raise type(error)(f"{name}, pair {self.pairs[index].id}: {error}", log=error.log) from error
            sample.answers.append((index, found))
            self.advance(name, round(1000 * self._pace.seconds(1, turn.concurrency)))

        before = await client.counts()
        started, busy = time.perf_counter(), time.process_time()
        await _each(range(requests), turn.concurrency, answer)
        sample.seconds = time.perf_counter() - started
        if time.process_time() - busy > BUSY * sample.seconds:
            self.result.note(
                f"This client kept a core busy at {turn.concurrency} requests at a time: the server may be faster "
                "than measured there."
            )
        gaps = [seconds for _, found in sample.answers for seconds, _ in found.pieces[1:]]
        if len(gaps) >= FEW_PIECES and statistics.median(gaps) < BURST * statistics.fmean(gaps):
            self.result.note(
                f"Pieces of {client.base_url} come in bursts, half of them right after another: the front end "
                "or what is between collects them. TTFT and the time between tokens are those of the bursts."
            )
        sample.different = sum(found.text != self._outputs[index] for index, found in sample.answers)
        if before is not None:
            sample.counts = await client.counted(before, sample.output_tokens)
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

    async def _send(self, client: Client, mode: str, index: int, max_tokens: int) -> Answer:
        prediction = self._sent.texts[mode][index] if mode in self._sent.texts else None
        fields = self._sent.fields.get(mode, FIELDS.get(mode))
        return await client.stream(self.pairs[index].messages(), max_tokens, prediction, fields)


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
