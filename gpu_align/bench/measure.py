"""Sends the requests: the first run, warm-ups, the turns of each stage, the check of answers that differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gpu_align.bench.client import Alternatives, Answer, Client, RequestRefusedError
from gpu_align.bench.data import Pair
from gpu_align.bench.errors import BenchError
from gpu_align.bench.identity import is_near_tie
from gpu_align.bench.metrics import scrape, settled
from gpu_align.bench.plan import Settings, Turn, turns
from gpu_align.bench.predictions import Predictions, make_predictions
from gpu_align.bench.result import Result, Sample

#: Called with what is being done and the number of requests that are now finished.
Advance = Callable[[str, int], None]
T = TypeVar("T")

FIRST_RUN_STREAMS = 8
WARM_UP_TOKENS = 32
#: The client's share of a core beyond which its own work is part of the latencies.
BUSY = 0.85
_UNMEASURED = (
    "no /metrics of vLLM at {url}: steps are unknown, and accepted and rejected are those of `usage`."
)


class Session:
    """One run over one set of pairs; `result` is complete up to the last finished turn at any moment.

    Args:
        pairs: [P] the edits; those that the server refuses are left out in the first run.
        settings: how to measure.
        result: what is filled.
        advance: the progress.
    """

    def __init__(self, pairs: Sequence[Pair], settings: Settings, result: Result, advance: Advance) -> None:
        self.pairs = list(pairs)
        self.settings = settings
        self.result = result
        self._advance = advance
        self._outputs: list[str] = []
        self._predictions = Predictions([], [], [])

    def expected_requests(self, modes: Sequence[str]) -> int:
        """Return how many requests the first run and all turns send."""
        each = sum(self.settings.requests_at(c, len(self.pairs)) for c in self.settings.concurrency)
        return len(self.pairs) + each * len(modes) * self.settings.rounds

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
                found = await client.stream(self.pairs[index].messages(), self.settings.max_tokens, None)
                outputs[index] = found.text
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
        self._predictions = make_predictions(self.pairs, self._outputs, self.settings.prediction)
        predicted = {"pairs": len(kept), "before": self._predictions.sources.count("before")}
        self.result.about["predictions"] = predicted | {"output": self._predictions.sources.count("output")}
        if "prediction" in self.settings.modes:
            self.result.note(self._predictions.sentence())

    async def _warm_up(self, mode: str, client: Client) -> None:
        streams = max(self.settings.concurrency)
        tokens = min(self.settings.max_tokens, WARM_UP_TOKENS)

        async def answer(number: int) -> None:
            index = number % len(self.pairs)
            await client.stream(self.pairs[index].messages(), tokens, self._prediction(mode, index))

        await _each(range(min(2 * streams, max(8, streams))), streams, answer)

    async def _turn(self, turn: Turn, client: Client) -> Sample:
        """Send the requests of one turn; `/metrics` is read before and after."""
        requests = self.settings.requests_at(turn.concurrency, len(self.pairs))
        sample = Sample(turn)
        answers: list[tuple[int, Answer]] = []
        name = f"{turn.mode}, {turn.concurrency} at a time"
        self._advance(name, 0)

        async def answer(number: int) -> None:
            index = (turn.round * requests + number) % len(self.pairs)
            try:
                prediction = self._prediction(turn.mode, index)
                found = await client.stream(
                    self.pairs[index].messages(), self.settings.max_tokens, prediction
                )
            except BenchError as error:
                raise type(error)(f"{name}, pair {self.pairs[index].id}: {error}", log=error.log) from error
            answers.append((index, found))
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
        for index, found in answers:
            self._take(sample, index, found)
        if before is not None:
            sample.counts = await settled(client.metrics, before, sample.output_tokens)
        self._note_counts(sample, client)
        return sample

    def _take(self, sample: Sample, index: int, answer: Answer) -> None:
        sample.requests += 1
        sample.output_tokens += answer.output_tokens
        sample.ttft_s.append(answer.ttft_s)
        sample.token_gaps_s += answer.token_gaps_s()
        sample.piece_gaps_s += [seconds for seconds, _ in answer.gaps]
        if answer.accepted is not None:
            accepted, rejected = sample.usage or (0, 0)
            sample.usage = (accepted + answer.accepted, rejected + (answer.rejected or 0))
        if answer.text != self._outputs[index]:
            sample.different.append((index, answer.text))

    def _note_counts(self, sample: Sample, client: Client) -> None:
        if sample.counts is None:
            self.result.note(_UNMEASURED.format(url=client.base_url))
        elif sample.counts.generated > sample.output_tokens:
            self.result.note(
                f"{client.base_url} also served others: /metrics counted {sample.counts.generated:,} output "
                f"tokens where this run got {sample.output_tokens:,}. Steps, accepted and rejected include theirs."
            )
        elif sample.counts.generated < sample.output_tokens:
            self.result.note(
                f"/metrics of {client.base_url} counted {sample.counts.generated:,} output tokens where this run "
                f"got {sample.output_tokens:,}: not all replicas answer there. Steps and draft tokens are too low."
            )

    async def _check_differences(self, clients: Mapping[str, Client]) -> None:
        """Ask for log probabilities where answers differ, once a pair, and decide which are near ties."""
        client = clients.get("none") or next(iter(clients.values()))
        found = dict.fromkeys(key for sample in self.result.samples for key in sample.different)
        open_keys = [key for key in found if key not in self.result.verdicts]
        places: dict[int, list[Alternatives]] = {}

        async def ask(index: int) -> None:
            try:
                places[index] = await client.alternatives(
                    self.pairs[index].messages(), self.settings.max_tokens
                )
            except BenchError:
                places[index] = []  # a server that gives no log probabilities: the difference stays one

        await _each(dict.fromkeys(index for index, _ in open_keys), FIRST_RUN_STREAMS, ask)
        for index, text in open_keys:
            tie = is_near_tie(self._outputs[index], text, places[index], self.settings.tie_margin)
            self.result.verdicts[index, text] = "near-tie" if tie else "no"

    def _prediction(self, mode: str, index: int) -> str | None:
        texts = {"prediction": self._predictions.useful, "unrelated": self._predictions.unrelated}
        return texts[mode][index] if mode in texts else None


async def _each(
    items: Sequence[T] | dict[T, Any] | range, streams: int, work: Callable[[Any], Awaitable[None]]
) -> None:
    """Run `work` on every item, at most `streams` at a time; the first error stops all."""
    waiting = iter(items)

    async def stream() -> None:
        for item in waiting:
            await work(item)

    await _all([stream() for _ in range(min(streams, len(items)))])


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
