"""Injected faults: each costs what the table of docs/developer/faults.md says, on both model runners.

Requests with predictions, recipes and earlier answers are served twice by a real engine. The fault happens while
the first batch is served, or when the engine starts. Their texts are compared with those of `transformers`; what
goes on in the second batch, and the log of the whole run, with what the table promises. A server whose engine core
is killed is compared with one that has no plugin.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from request_server import serve
from tiny_llama import build, build_bytes, greedy_by_transformers
from v2_harness import Request, Run, V2Engine, edited, prompt_of

from tests.campaign import injected
from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.questions import ask, chat, is_whole, text_of

K, NUM_TOKENS = 4, 14
INJECTED_CODE = Path(__file__).with_name("injected.py")
KILL = "kill -9 of the engine core"
#: Faults that a short run injects.
QUICK = ("propose", "log, write", "remembering an answer", "corrupt recipe pack")
RUNNERS = ("V1", "V2")

FAULTY = r"RuntimeError at \S*injected\.py:\d+ faulty"
REFUSED = rf"WARNING .*Request \S+ is served without its prediction: {FAULTY}"
OF_A_STEP = rf"ERROR .*gpu_align drafts nothing in this step: {FAULTY}"
OF_A_REQUEST = rf"ERROR .*gpu_align drafts nothing for request \S+: {FAULTY}"
NO_SLOTS = rf"ERROR .*gpu_align schedules no drafts in this step: {FAULTY}"
NO_REPORT = rf"ERROR .*gpu_align reports no drafts in this step: {FAULTY}"
NO_USAGE = rf"ERROR .*gpu_align counts no usage any more: {FAULTY}"
NO_LOG = r"ERROR .*gpu_align writes no step logs any more: "
NO_MEMORY = rf"ERROR .*gpu_align remembers no answers any more: {FAULTY}"
NO_MISSES = rf"ERROR .*gpu_align counts no recipe misses any more: {FAULTY}"
ANEW = r"WARNING .*gpu_align's code on the host is compiled anew with each start: "
PLAIN = r"WARNING .*gpu_align's code on the host is slow, in plain Python: Numba is not installed"
NO_RECIPES = r"WARNING .*gpu_align drafts without recipes .*PackError"


@dataclass(frozen=True)
class Fault:
    """A fault, and what the table says of it.

    place: the function that raises at its `call`-th call; "" where `before` or `after` do it, code around the
    start of the engine.
    line: the one line in the log; "" for none. refused: requests of the first batch that are served without their
    prediction. usage, logs: whether the second batch has them; logs None: one of the first is missing.
    """

    name: str
    place: str = ""
    line: str = ""
    call: int = 3
    refused: int = 0
    usage: bool = True
    logs: bool | None = True
    before: str = ""
    after: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    runners: tuple[str, ...] = RUNNERS


WORKER, SCHEDULER = "vllm_integration.worker", "vllm_integration.scheduler"
LEDGER = f"{SCHEDULER}.verification_ledger:VerificationLedger"
TABLE = f"{SCHEDULER}.draft_budget:DraftedRequests"
V1, V2 = ("V1",), ("V2",)
#: No directory can be made below a file, not even by root.
NO_HOME = tuple(
    (name, "{file}/home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
)
FAULTS = (
    Fault("propose", "gpu_align:Drafter.propose", OF_A_STEP),
    Fault("add", "gpu_align:Drafter.add", REFUSED, refused=1),
    Fault("remove", "gpu_align:Drafter.remove", OF_A_REQUEST, call=2),
    Fault(
        "reading a prediction", f"{WORKER}.request_drafter:open_request", OF_A_REQUEST, refused=1, logs=None
    ),
    Fault("cut", f"{WORKER}.requests:StopRule.room", OF_A_REQUEST, logs=None, runners=V1),
    Fault(
        "cut",
        f"{SCHEDULER}.schedulers:PredictedOutputsV1Scheduler._cut_to_slots",
        NO_SLOTS,
        runners=V2,
    ),
    Fault("grant", f"{WORKER}.proposer_v1:PredictedOutputs._sync", OF_A_REQUEST, logs=None, runners=V1),
    Fault("grant", f"{SCHEDULER}.draft_budget:DraftBudget.grant", NO_SLOTS, runners=V2),
    Fault("account, step begins", f"{LEDGER}.begin", NO_USAGE, usage=False),
    Fault("account, step ends", f"{LEDGER}.settle", NO_USAGE, usage=False),
    Fault("table of requests", f"{TABLE}.take", NO_SLOTS),
    Fault("report", f"{WORKER}.proposer_v1:PredictedOutputs.report", NO_REPORT, runners=V1),
    Fault("report", f"{WORKER}.draft_reporter:DraftReporter.copy", OF_A_STEP, runners=V2),
    Fault("log, record", f"{WORKER}.step_log:LoggedRequest.record", NO_LOG + FAULTY, logs=False),
    Fault("log, finish", f"{WORKER}.step_log:DebugLog._log_of", NO_LOG + FAULTY, logs=False),
    Fault("log, write", "gpu_align.tools.step_log:dump", NO_LOG + FAULTY, call=2, logs=False),
    Fault(
        "disk full",
        "",
        NO_LOG + r"OSError \(No space left on device\) at ",
        after="injected.fill_the_disk(2)",
        logs=False,
    ),
    Fault("remembering an answer", f"{SCHEDULER}.schedulers:Recall.keep", NO_MEMORY),
    Fault("giving an answer", f"{SCHEDULER}.schedulers:Recall.give", NO_MEMORY),
    Fault(
        "counting misses",
        f"{WORKER}.miss_log:MissLog.take",
        NO_MISSES,
        environment=(("GPU_ALIGN_RECIPE_MISSES", "{file}-misses"),),
    ),
    Fault(
        "read-only home and installation",
        "",
        ANEW,
        environment=NO_HOME,
        before="injected.cache_numba_in({file!r} + '/numba', alone=True)",
    ),
    Fault("no Numba", "", PLAIN, before="injected.hide_numba()"),
    Fault("corrupt Numba cache", "", ANEW, before="injected.cache_numba_in({cache!r})"),
    Fault("corrupt recipe pack", "", NO_RECIPES, environment=(("GPU_ALIGN_RECIPES", "{file}"),)),
)


class Bench:
    """A model, requests with known answers, a folder; engines with a fault in each."""

    def __init__(self, c: Campaign, folder: Path) -> None:
        self.folder = folder
        #: Whose tokens the recipes that come with the library can be told in.
        self.model = build_bytes(folder / "bytes")
        greedy = greedy_by_transformers(self.model)
        prompts = [prompt_of(c.rng.randrange(10**6)) for _ in range(6)]
        self.texts = [greedy(prompt, NUM_TOKENS) for prompt in prompts]
        #: Verbatim, with edits, foreign, and one request without.
        self.predictions = [
            *self.texts[:3],
            edited(self.texts[3], c.rng.randrange(10**6)),
            prompt_of(c.rng.randrange(10**6)),
            None,
        ]
        self.requests = [
            Request(prompt, prediction, NUM_TOKENS, arrives=index)
            for index, (prompt, prediction) in enumerate(zip(prompts, self.predictions, strict=True))
        ]
        self.file = folder / "file"
        self.file.write_bytes(c.rng.randbytes(999))
        self.cache = folder / "numba"

    def garbled_cache(self, rng: random.Random) -> Path:
        """What Numba has cached, each file cut short or overwritten."""
        copy = self.folder / f"garbled-{rng.random()}"
        shutil.copytree(self.cache, copy)
        files = [path for path in copy.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert files, "nothing was cached"
        for path in files:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] if rng.random() < 0.5 else rng.randbytes(len(data)))
        return copy

    def serve(self, fault: Fault, runner: str, cache: Path | None) -> Found:
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        names = {"file": str(self.file), "cache": str(cache)}
        code = f"import runpy, types\ninjected = types.SimpleNamespace(**runpy.run_path({str(INJECTED_CODE)!r}))\n"
        after = fault.after or (fault.place and f"injected.raise_at({fault.place!r}, {fault.call})")
        with V2Engine(
            self.model,
            directory,
            num_draft_tokens=K,
            step_log=True,
            runner=runner,
            environment={
                "GPU_ALIGN_STRICT": "0",
                "GPU_ALIGN_RECIPES": "base",
                "GPU_ALIGN_MEMORY_TOKENS": "1000",
                "GPU_ALIGN_MAX_PREDICTION_TOKENS": "64",
                **{name: value.format(**names) for name, value in fault.environment},
            },
            before=code + fault.before.format(**names),
            after=code + after,
        ) as engine:
            first = engine.run(self.requests)
            logs_of_first = set(engine.steps.glob("*"))
            second = engine.run(self.requests)
            found = set(engine.steps.iterdir()) if engine.steps.exists() else set()
            return Found(first, second, found & logs_of_first, found - logs_of_first, engine.warnings())


@dataclass
class Found:
    """What an engine did: its two batches, the files after each, the lines of the log."""

    first: Run
    second: Run
    logs_of_first: set[Path]
    logs_of_second: set[Path]
    lines: list[str]

    def differs(self, bench: Bench, fault: Fault) -> list[str]:
        """In what this is not what the table promises; empty where it is."""
        predicted = [index for index, prediction in enumerate(bench.predictions) if prediction is not None]
        promised_lines = (
            [bool(re.search(fault.line, line)) for line in self.lines] if fault.line else self.lines
        )
        unread = [path.name for path in self.logs_of_first | self.logs_of_second if not is_whole(path)]
        undrafted = [i for i in predicted[:4] if not any(drafts for _, drafts, _ in self.first.of(i))]
        kept = [answer["usage"] is not None for answer in self.second.answers]
        drafted = sum(answer["usage"]["drafted"] for answer in self.second.answers if answer["usage"])
        every = len(bench.requests)  # with earlier answers and recipes each is drafted for
        drafts = sum(drafts for step in self.second.steps for _, drafts, _ in step.values())
        checks = {
            "texts": self.first.outputs == self.second.outputs == bench.texts,
            f"lines {self.lines}": promised_lines == [True] * bool(fault.line),
            f"files {unread}": not unread,
            f"drafts {drafts}": bool(drafts) and bool(self.second.accepted),
            f"refused {undrafted}": not fault.refused or len(undrafted) == fault.refused,
            f"usage {kept}": set(kept) == {fault.usage},
            f"drafted {drafted}": bool(drafted) == fault.usage,
            f"logs {len(self.logs_of_second)}": len(self.logs_of_second) == every * (fault.logs is not False),
        }
        return [name for name, holds in checks.items() if not holds]


def run(c: Campaign) -> Iterator[Row]:
    for fault in FAULTS:  # a short run injects few; all of them are somewhere
        if fault.place:
            injected.owner_of(fault.place)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(c, Path(folder))
        for runner in RUNNERS[: 1 if c.quick else None]:
            faults = [f for f in FAULTS if runner in f.runners and (not c.quick or f.name in QUICK)]
            tally = c.tally(
                f"injected faults, {runner}: each costs what the docs say", len(faults) + 1, len(faults)
            )
            if not c.quick:  # which fills Numba's cache
                none = Fault("none", before="injected.cache_numba_in({cache!r})")
                differs = bench.serve(none, runner, bench.cache).differs(bench, none)
                tally.check(not differs, case={"runner": runner, "without a fault": differs}, count=0)
            for fault in faults:
                _check(tally, bench, fault, runner, c.rng)
            names = [fault.name for fault in faults]
            if not c.quick:
                _check_kill(tally, bench, runner)
                names.append(KILL)
            yield tally.row(", ".join(names))


def _killed(bench: Bench, runner: str, *, plugin: bool) -> dict[str, Any]:
    """What becomes of a server whose engine core is killed while it serves six requests, after six others."""
    directory = Path(tempfile.mkdtemp(dir=bench.folder))
    model = build(directory / "model")
    greedy = greedy_by_transformers(model)
    questions = [ask(greedy, prompt_of(seed), NUM_TOKENS) for seed in range(6)]
    long = [{**q.predicted(q.token_ids[::-1]), "max_tokens": 200} for q in questions]
    environment = {"GPU_ALIGN_STRICT": "0", "GPU_ALIGN_RECIPES": "off"}
    start = partial(serve, model, directory, environment=environment, runner=runner)
    with start(plugin=plugin) as server, ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda q: chat(server.url, q.predicted(q.token_ids)), questions)
        texts = [text_of(*answer) for answer in answers]
        pending = [pool.submit(chat, server.url, body) for body in long]
        time.sleep(0.25)
        for process in server.engine_processes():
            process.kill()
        told = {
            "texts": texts == [q.text for q in questions],
            "statuses": sorted({each.result()[0] for each in pending}),
            "server has ended": server.has_ended(60),
        }
    if plugin:
        files = sorted(server.logs.glob("*.yaml"))
        told["whole logs"] = [path.name for path in files if not is_whole(path)] == [] != files
        with start() as server:
            status, answer = chat(server.url, questions[0].predicted(questions[0].token_ids))
            details = answer["usage"]["completion_tokens_details"] if status == 200 else {}
            told["after a restart"] = bool(details.get("accepted_prediction_tokens"))
            told["logs stay"] = set(files) <= {*server.logs.glob("*.yaml")}
    return told


def _check_kill(tally: Tally, bench: Bench, runner: str) -> None:
    without = _killed(bench, runner, plugin=False)
    ours = _killed(bench, runner, plugin=True)
    added = {"whole logs": True, "after a restart": True, "logs stay": True}
    holds = without["texts"] and ours == {**without, **added}
    tally.check(holds, case={"runner": runner, "fault": KILL, "with": ours, "without the plugin": without})


def _check(tally: Tally, bench: Bench, fault: Fault, runner: str, rng: random.Random) -> None:
    cache = bench.garbled_cache(rng) if "{cache" in fault.before else None
    found = bench.serve(fault, runner, cache)
    differs = found.differs(bench, fault)
    tally.check(
        not differs, case={"runner": runner, "fault": fault.name, "place": fault.place, "differs": differs}
    )


if __name__ == "__main__":
    main(run)
