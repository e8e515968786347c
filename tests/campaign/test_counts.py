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
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm import clients
from tests.vllm.clients import (
    Answer,
    LoggedStep,
    Logs,
    chat,
    of_prediction,
    question,
    read_answer,
    recount,
    variants,
)
from tests.vllm.engines import serve
from vllm_integration.scheduler.draft_budget import TOGETHER

pytestmark = pytest.mark.vllm

OURS = "gpu_align_"
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


async def leave_early(url: str, requests: Sequence[Asked], draw: random.Random) -> None:
    """Read some events of each stream, then close the connection."""

    async def leave(client: httpx.AsyncClient, asked: Asked, events: int) -> None:
        seen: list[str] = []
        async with client.stream("POST", asked.path, json=asked.body) as answer:
            async for line in answer.aiter_lines():
                seen += [line] * line.startswith("data: {")
                if len(seen) == events:
                    break
        asked.raw = "\n".join(seen).encode()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(leave(client, asked, draw.randrange(1, 12)) for asked in requests))


def ask_all(url: str, requests: Sequence[Asked]) -> None:
    bodies = asyncio.run(clients.post_all(url, [(asked.path, asked.body) for asked in requests]))
    for asked, body in zip(requests, bodies, strict=True):
        asked.raw = body


def expected_samples(requests: Sequence[tuple[int | None, list[list[LoggedStep]]]]) -> Counter[str]:
    """What `/metrics` moves by. requests: tokens of the prediction, if any, and the steps of each choice."""
    found: Counter[str] = Counter()
    for length, choices in requests:
        if length is not None:
            found[f"{OURS}requests_total"] += 1
            found[f"{OURS}prediction_length_tokens_count"] += 1
            found[f"{OURS}prediction_length_tokens_sum"] += length
        for steps in choices:
            found.update(samples_of_choice(steps))
            accepted, rejected = of_prediction(steps)
            found[f"{OURS}acceptance_ratio_count"] += accepted + rejected > 0
    return +found


def samples_of_choice(steps: Sequence[LoggedStep]) -> Counter[str]:
    found: Counter[str] = Counter({f"{OURS}steps_total": len(steps)})
    diverged = False
    for index, (source, verified, accepted) in enumerate(steps):
        if not verified:
            found["lost"] += index > 0
            continue
        found[f'{OURS}drafts_total{{source="{source}"}}'] += 1
        found[f"{OURS}accepted_length_tokens_count"] += 1
        found[f"{OURS}accepted_length_tokens_sum"] += accepted
        for verdict, tokens in (("accepted", accepted), ("rejected", verified - accepted)):
            found[f'{OURS}draft_tokens_total{{source="{source}",verdict="{verdict}"}}'] += tokens
            if source == "prediction":
                found[f'{OURS}prediction_tokens_total{{verdict="{verdict}"}}'] += tokens
        if source == "prediction":
            found[f"{OURS}realignments_total"] += diverged and accepted > 0
            diverged = accepted < verified
    return found


def details(steps: Sequence[LoggedStep]) -> dict[str, Any]:
    """The further counts of `GPU_ALIGN_USAGE_DETAILS`."""
    by_source: dict[str, dict[str, int]] = {}
    for step in steps:
        if step.verified:
            of = by_source.setdefault(step.source, {"drafted": 0, "accepted": 0})
            of["drafted"] += step.verified
            of["accepted"] += step.accepted
    drafted = sum(step.verified for step in steps)
    return {"steps": len(steps), "drafted": drafted, "by_source": by_source}


def whole_steps(log: dict[str, Any], num_tokens: int) -> list[LoggedStep]:
    """The steps whose tokens all lie within the first `num_tokens`."""
    steps, written = recount(log, 2**30), 0
    for index, logged in enumerate(log["steps"]):
        written += len(logged["new"])
        if written > num_tokens:
            return steps[:index]
    return steps


def counters(url: str) -> Counter[str]:
    """The samples that are compared; those of steps lost for any reason as "lost"."""
    found: Counter[str] = Counter()
    theirs = "vllm:spec_decode_num", "vllm:num_preemptions_total", "vllm:num_requests_"
    for name, value in clients.scrape(url, *theirs).items():
        if name.startswith(f"{OURS}steps_lost_total"):
            found["lost"] += int(value)
        elif re.match(rf"{OURS}\w+_(total|count|tokens_sum)", name):
            found[name] = int(value)
        elif name.startswith(theirs):
            found[name.partition("{")[0]] += int(value)
    return found


def check_usage(asked: Asked, logs: list[dict[str, Any]]) -> list[list[LoggedStep]]:
    """One response; the steps of each of its choices. Rejected tokens are billed."""
    answer = asked.answer
    steps = [recount(log, asked.tokens) for log in logs] if answer.texts else []
    joined = [step for choice in steps for step in choice]
    of_hint = of_prediction(joined)
    written = asked.tokens * asked.choices + of_hint[1] if answer.texts else None
    expected = written, of_hint if asked.predicts else (-1, -1), details(joined)
    found = answer.written, answer.accepted_rejected, answer.details.get("gpu_align", {})
    assert len(logs) == asked.choices, asked
    for log in logs:
        check_log(log)
    assert found == expected, (asked, logs)
    if (
        asked.body.get("temperature") == 0 and len(logs) == 1 and answer.texts
    ):  # the log is that of this answer
        words = words_of([token for step in logs[0]["steps"] for token in step["new"]])[: asked.tokens]
        text = answer.texts[0].split()
        assert words[: len(text)] == text, (asked, logs)
    return steps


def check_log(log: dict[str, Any]) -> None:
    """Texts, cursors and candidates of a log agree with its tokens. The model writes no newlines."""
    steps = log["steps"]
    text = "".join(step["accepted_text"] + step["own_text"] for step in steps)
    assert steps[-1]["prefix"] == {"tokens": [token for step in steps for token in step["new"]], "text": text}
    assert [s["cursor_before"] for s in steps[1:]] == [s["cursor_after"] for s in steps[:-1]]
    assert all(step["cursor_after"] <= log["prediction_tokens"] for step in steps)
    assert all(step["new_lines"] == [] for step in steps)
    assert sum(len(line["tokens"]) for line in log["prediction_lines"]) == log["prediction_tokens"]
    for step in steps:
        assert (step["candidate"] is None) == (not step["proposed"])
        assert not step["verified"] or step["candidate"]["source"] == step["source"]
        assert step["proposed_text"].split() == words_of(step["proposed"])


def words_of(token_ids: Sequence[int]) -> list[str]:
    return [f"w{token - FIRST_WORD}" if token >= FIRST_WORD else "<assistant>" for token in token_ids]


class Traffic:
    """Requests to a server, its step logs, and its answers to the questions 0, 1, …"""

    def __init__(self, url: str, logs: Path, rng: random.Random) -> None:
        self.url, self.logs, self.rng = url, Logs(logs), rng
        plain = [Asked(CHAT, chat(seed, N, ignore_eos=True), 1) for seed in range(40)]
        ask_all(url, plain)
        self.plain = [asked.answer.texts[0] for asked in plain]

    def logs_of(self, requests: Sequence[Asked], seconds: float = 30) -> list[list[dict[str, Any]]]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and counters(self.url)["vllm:num_requests_running"]:
            time.sleep(0.1)
        # A step, which writes the logs, of a request that nothing is drafted for.
        ask_all(self.url, [Asked(CHAT, chat(0, 2, vllm_xargs={"memory": 0}), 1)])
        found = (self.logs.of(a.answer.id, a.choices, seconds) if a.answer.id else [] for a in requests)
        return [*found]

    def check_answered(self, size: int) -> Counter[str]:
        """Requests that are all answered: everything is exact. Which kinds they were of."""
        requests = [make(self.rng, self.plain) for _ in range(size)]
        before = counters(self.url)
        ask_all(self.url, requests)
        logs, after = self.logs_of(requests), counters(self.url)
        after.subtract(before)
        steps = [check_usage(*pair) for pair in zip(requests, logs, strict=True)]
        lengths = [
            (mine[0]["prediction_tokens"] if mine else 0) if asked.predicts else None
            for asked, mine in zip(requests, logs, strict=True)
        ]
        expected = expected_samples(list(zip(lengths, steps, strict=True)))
        names = {name for name in {*expected, *after} if name.startswith((OURS, "lost"))}
        assert {n: after[n] for n in names} == {n: expected[n] for n in names}
        # The engine does not see stop strings: steps beyond them ran, and vLLM counts those that had ended before
        # the front end aborted the request.
        some = [step for choices in steps for choice in choices for step in choice]
        ran = [step for mine in logs for log in mine for step in recount(log, 2**30)]
        for part, name in VLLM.items():
            least, most = (sum(getattr(step, part) for step in each) for each in (some, ran))
            assert least <= after[name] <= most, (name, least, after[name], most)
        kinds = Counter({"preemptions": after["vllm:num_preemptions_total"]})
        kinds["accepted"] = expected[f'{OURS}prediction_tokens_total{{verdict="accepted"}}']
        for asked in requests:
            kinds.update([name for name in ("stream", "stop", "n") if name in asked.body])
            kinds.update([asked.path, *["memory"] * (not asked.predicts)])
        return kinds

    def check_left(self, size: int) -> None:
        """Streams that nobody reads to their end."""
        requests = [make(self.rng, self.plain, leaves=True) for _ in range(size)]
        before = counters(self.url)
        asyncio.run(leave_early(self.url, requests, self.rng))
        logs, after = self.logs_of(requests, seconds=0.5), counters(self.url)
        after.subtract(before)
        least, most = Counter[str](), Counter[str]()
        for asked, mine in zip(requests, logs, strict=True):
            seen = sum(len(text.split()) for text in asked.answer.texts) if asked.choices == 1 else 0
            # A choice that no step had begun when the client went away has no log.
            assert mine or not any(asked.answer.texts), asked
            for log in mine:
                # The last ones may not have been told yet.
                least.update(samples_of_choice(whole_steps(log, seen)[: 1 - TOGETHER]))
                most.update(samples_of_choice(recount(log, 2**30)))
        names = {name for name in most if not name.startswith(f"{OURS}realign")}
        assert {n: (least[n], after[n], most[n]) for n in names if not least[n] <= after[n] <= most[n]} == {}


def test_usage_and_counters_are_a_recount_of_the_step_logs(
    tiny_model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    variables = {"GPU_ALIGN_USAGE_DETAILS": "1", "GPU_ALIGN_BILL_REJECTED": "1"}
    variables |= {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"}
    met = Counter[str]()
    with serve(tiny_model, tmp_path, *FLAGS, environment=variables, runner="V1") as server:
        traffic = Traffic(server.url, server.logs, rng)
        for _ in range(count(2)):
            met += traffic.check_answered(30)
            traffic.check_left(10)
        told = server.output.read_text()
    wanted = {CHAT, COMPLETIONS, RESPONSES, BATCH, "stream", "stop", "n", "memory", "preemptions", "accepted"}
    assert wanted <= set(met), met
    assert [w for w in ("gpu_align did not", "gpu_align is off", "counts no usage") if w in told] == []
