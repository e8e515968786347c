"""Usage and counters against a recount from the step logs' tokens.

A batch of requests to one V1 server: chat, completions with two prompts and responses, streamed and not, ends by
stop strings, n = 2, preemptions. How many tokens an answer has is told by its text: a token is a word. From the
log of each choice, its drafts and tokens alone, everything is counted again. That must be the `usage` of the
response, and summed up what `/metrics` moved by. vLLM's own counters of drafts, which know nothing of sources or
stop strings, must be the sums over all steps of the logs.

Clients that go away in the middle: counters lie between what the client had read and what the engine did.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from request_server import serve
from tiny_llama import build
from usage_harness import chat, question, variants

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.http_client import Answer, Client, read_answer, request_head
from tests.campaign.recount import (
    OURS,
    Logs,
    Step,
    details,
    expected_samples,
    of_prediction,
    recount,
    samples_of_choice,
    scrape,
    whole_steps,
)

CLIENTS = 24
N = 32
#: 512 tokens of cache for 24 requests of about 40: some are preempted.
FLAGS = ["--max-num-seqs=24", "--block-size=32", "--num-gpu-blocks-override=16", "--max-model-len=256"]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BATCH = f"{CHAT}/batch"
FIRST_WORD = 4  # token id of w0
VLLM = {
    "verified": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass
class Asked:
    """A request and its answer. tokens: of each choice."""

    path: str
    body: dict[str, Any]
    choices: int
    raw: bytes = b""

    @cached_property
    def answer(self) -> Answer:
        return read_answer(self.raw)

    @property
    def predicts(self) -> bool:
        return "prediction" in self.body or "vllm_xargs" in self.body

    @property
    def tokens(self) -> int:
        return len(self.answer.texts[0].split()) + 1 if "stop" in self.body else N


def make(draw: random.Random, plain: Sequence[str], *, leaves: bool = False) -> Asked:
    """A request with a prediction. plain: the answers to the questions 0, 1, … leaves: a stream without a stop
    string, which would make rejected of accepted tokens at an end that the client may see or not."""
    seed = draw.randrange(len(plain))
    hint = draw.choice(
        [*variants(plain[seed], draw.randrange(2**30)).values(), None]
    )  # None: earlier answers
    kinds = ["chat", "chat", "n", "completions", "responses"]
    kind = draw.choice([*kinds, *["stop", "batch"] * (not leaves)])
    streamed = kind != "batch" and (leaves or draw.random() < 0.4)
    more: dict[str, Any] = {"ignore_eos": True, **({"stream": True} if streamed else {})}
    if kind == "stop":
        more["stop"] = [plain[seed].split()[draw.randrange(3, N)]]
    if kind == "n":
        more["n"] = 2
    body = chat(seed, N, hint, **more)
    if hint is not None and draw.random() < 0.3:  # the same as token ids, or as text
        del body["prediction"]
        token_ids = [int(word[1:]) + FIRST_WORD for word in hint.split()]
        body["vllm_xargs"] = {"gpu_align_prediction": draw.choice([hint, token_ids])}
    if kind == "batch":
        return Asked(BATCH, {**body, "messages": [question(seed), question(seed + 1)]}, 2)
    if kind not in ("completions", "responses"):
        return Asked(CHAT, body, more.get("n", 1))
    text = body.pop("messages")[0]["content"]
    if kind == "completions":
        return Asked(COMPLETIONS, {**body, "prompt": [text, f"{text} w1"]}, 2)
    del body["max_tokens"]
    body.pop("stream_options", None)
    return Asked(RESPONSES, {**body, "input": question(seed), "max_output_tokens": N}, 1)


async def ask_all(url: str, requests: Sequence[Asked], *, leave: random.Random | None = None) -> None:
    """Send all of them, `CLIENTS` at once. leave: the clients go away in the middle of the answer."""
    waiting = iter(requests)

    async def client() -> None:
        async with Client(url) as connection:
            for asked in waiting:
                body = json.dumps(asked.body).encode()
                if leave is None:
                    _, asked.raw = await connection.post(asked.path, body)
                else:
                    asked.raw = await leave_early(connection, asked.path, body, leave.randrange(1, 12))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def leave_early(connection: Client, path: str, body: bytes, events: int) -> bytes:
    """Read so many events of a stream, then close the connection; the events."""
    writer = await connection.open()
    writer.write(request_head("POST", path, len(body)) + body)
    seen = []
    while len(seen) < events:
        line = await connection.reader.readline()
        if line.startswith(b"data: {"):
            seen.append(line)
        if not line or line.startswith((b"data: [DONE]", b"event: response.completed")):
            break
    connection.close()
    return b"".join(seen)


def check_usage(tally: Tally, asked: Asked, logs: list[dict[str, Any]]) -> list[list[Step]]:
    """One response; the steps of each of its choices."""
    steps = [recount(log, asked.tokens) for log in logs] if asked.answer.texts else []
    joined = [step for choice in steps for step in choice]
    of_hint = of_prediction(joined)
    # Rejected tokens are billed.
    written = asked.tokens * asked.choices + of_hint[1] if asked.answer.texts else None
    if not asked.predicts:
        of_hint = -1, -1
    expected = written, of_hint, details(joined)
    answer = asked.answer
    found = answer.written, answer.accepted_rejected, answer.details.get("gpu_align", {})
    holds = len(logs) == asked.choices and found == expected
    if (
        asked.body.get("temperature") == 0 and len(logs) == 1 and asked.answer.texts
    ):  # the log is the log of this answer
        words = [f"w{t - FIRST_WORD}" for step in logs[0]["steps"] for t in step["new"]][: asked.tokens]
        holds &= words[: len(asked.answer.texts[0].split())] == asked.answer.texts[0].split()
    case = {
        "path": asked.path,
        "body": asked.body,
        "answer": asked.raw.decode(),
        "usage": found,
        "recount": expected,
    }
    tally.check(holds, {**case, "logs": logs})
    return steps


class Counts:
    def __init__(self, c: Campaign, url: str, logs: Logs) -> None:
        self.url, self.logs, self.draw = url, logs, c.rng
        self.size, self.leaving = c.size(200, 30), c.size(20, 10)
        self.usage = c.tally("usage of a response = recount from its step logs", 2000, 60)
        self.counters = c.tally("counters on /metrics = sum of the recounts, sample by sample", 150, 30)
        self.aborted = c.tally(
            "clients that go away: counters between what they read and what was done", 200, 10
        )
        self.sums: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        plain = [Asked(CHAT, chat(seed, N, ignore_eos=True), 1) for seed in range(40)]
        asyncio.run(ask_all(url, plain))
        self.plain = [asked.answer.texts[0] for asked in plain]

    def batch(self) -> None:
        """Requests that are all answered: everything is exact."""
        requests = [make(self.draw, self.plain) for _ in range(self.size)]
        before = scrape(self.url)
        asyncio.run(ask_all(self.url, requests))
        logs = self.gather(requests)
        after = scrape(self.url)
        steps = [check_usage(self.usage, *pair) for pair in zip(requests, logs, strict=True)]
        for asked in requests:
            self.kinds["streams"] += "stream" in asked.body
            self.kinds["stop strings"] += "stop" in asked.body
            self.kinds["with n = 2"] += "n" in asked.body
            self.kinds["without prediction"] += not asked.predicts
        lengths = [
            (mine[0]["prediction_tokens"] if mine else 0) if asked.predicts else None
            for asked, mine in zip(requests, logs, strict=True)
        ]
        expected = expected_samples(list(zip(lengths, steps, strict=True)))
        self.sums.update(expected)
        after.subtract(before)
        for name in sorted({name for name in {*expected, *after} if name.startswith((OURS, "lost"))}):
            case = {"sample": name, "moved by": after[name], "recount": expected[name]}
            self.counters.check(after[name] == expected[name], case)
        self.compare_with_vllm(
            after, [step for choices in steps for choice in choices for step in choice], logs
        )
        self.kinds["preemptions"] += after["vllm:num_preemptions_total"]

    def compare_with_vllm(
        self, moved: Counter[str], steps: Sequence[Step], logs: list[list[dict[str, Any]]]
    ) -> None:
        """The engine does not see stop strings: steps beyond them ran, and vLLM counts those that had ended before
        the front end aborted the request."""
        ran = [step for mine in logs for log in mine for step in recount(log, 2**30)]
        for field, name in VLLM.items():
            least, most = (sum(getattr(step, field) for step in some) for some in (steps, ran))
            case = {"sample": name, "least": least, "moved by": moved[name], "most": most}
            self.counters.check(least <= moved[name] <= most, case)
            self.sums[name] += moved[name]

    def abort(self) -> None:
        """Streams that nobody reads to their end."""
        requests = [make(self.draw, self.plain, leaves=True) for _ in range(self.leaving)]
        before = scrape(self.url)
        asyncio.run(ask_all(self.url, requests, leave=self.draw))
        logs = self.gather(requests, seconds=0.5)
        after = scrape(self.url)
        after.subtract(before)
        least, most = Counter[str](), Counter[str]()
        for asked, mine in zip(requests, logs, strict=True):
            seen = sum(len(text.split()) for text in asked.answer.texts) if asked.choices == 1 else 0
            for log in mine:
                least.update(samples_of_choice(whole_steps(log, seen)))
                most.update(samples_of_choice(recount(log, 2**30)))
        names = {name for name in most if not name.startswith(f"{OURS}realign")}
        wrong = {n: (least[n], after[n], most[n]) for n in names if not least[n] <= after[n] <= most[n]}
        # A choice that no step had begun when the client went away has no log.
        begun = all(mine or not any(asked.answer.texts) for asked, mine in zip(requests, logs, strict=True))
        holds = not wrong and begun
        self.aborted.check(
            holds, {"least, found, most": wrong, "ids": [a.answer.id for a in requests]}, count=len(requests)
        )

    def gather(self, requests: Sequence[Asked], seconds: float = 30) -> list[list[dict[str, Any]]]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and scrape(self.url)["vllm:num_requests_running"]:
            time.sleep(0.1)
        # A step, which writes the logs, of a request that nothing is drafted for.
        asyncio.run(ask_all(self.url, [Asked(CHAT, chat(0, 2, vllm_xargs={"memory": 0}), 1)]))
        return [
            self.logs.of(asked.answer.id, asked.choices, seconds) if asked.answer.id else []
            for asked in requests
        ]


def run(c: Campaign) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model")
        variables = {"GPU_ALIGN_USAGE_DETAILS": "1", "GPU_ALIGN_BILL_REJECTED": "1"}
        variables |= {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"}
        with serve(model, Path(folder), *FLAGS, environment=variables, runner="V1") as server:
            counts = Counts(c, server.url, Logs(server.logs))
            while counts.usage.goes_on() or counts.aborted.goes_on():
                counts.batch()
                counts.abort()
            told = server.output.read_text()
    yield counts.usage.row(", ".join(f"{amount:,} {kind}" for kind, amount in counts.kinds.items()))
    told_of = "gpu_align did not" in told or "gpu_align is off" in told or "counts no usage" in told
    counts.counters.check(not told_of, told[-3000:], count=0)
    sample = f'{OURS}prediction_tokens_total{{verdict="%s"}}'
    accepted, rejected = counts.sums[sample % "accepted"], counts.sums[sample % "rejected"]
    drafted = f"{counts.sums[VLLM['verified']]:,} drafts by vLLM's own count"
    yield counts.counters.row(f"{accepted:,} prediction tokens accepted, {rejected:,} rejected; {drafted}")
    yield counts.aborted.row()


if __name__ == "__main__":
    main(run)
