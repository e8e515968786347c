"""Each extra of the plugin raises, in a step and at the start of a real engine, or lacks a name of vLLM, and costs
itself: the log has one line, drafts go on, the tokens are the model's own. Drafting itself raises, and goes on
after a pause. Around an engine the disk is full, or there is no Numba."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.vllm.clients import ask_all, chat, scrape
from tests.vllm.engines import Request, Run, V2Engine, prompt_of, serve
from tests.vllm.tiny_llama import build_bytes, greedy_by_transformers
from vllm_integration.seams.table import GROUPS

pytestmark = pytest.mark.vllm

K, N = 4, 24
WORKER, SCHEDULER = "vllm_integration.worker", "vllm_integration.scheduler"
RUNNERS = pytest.mark.parametrize("runner", ["V1", "V2"])


@dataclass(frozen=True)
class Fault:
    """A function that raises, and what that costs.

    place: "module:Class.name". part: of `guard.faults()` that is off then, "" where none is. says: the lines of
    the log. calls: so many raise, the first ones. drafts: whether verbatim predictions are drafted from as without
    the fault; None: mostly. runner: the one that has it.
    """

    name: str
    place: str
    part: str
    says: tuple[str, ...]
    calls: int = 1000
    drafts: bool | None = True
    runner: str = ""


LEDGER, DRAFTED = f"{SCHEDULER}.verification_ledger:VerificationLedger", f"{SCHEDULER}.draft_budget"
NO_USAGE, NO_LOG = ("counts no usage any more",), ("writes no step logs any more",)
NO_MEMORY, NO_TIMES = ("remembers no answers any more",), ("measures no step times any more",)
NO_REPORT = ("reports no drafts in this step", "reports no drafts for 60 s")
NO_SLOTS = ("schedules no drafts in this step", "schedules no drafts for 60 s")
NOT_NOW, NOT_DRAFTED = "drafts nothing in this step", ("drafts nothing for request",)
STEPS = (
    Fault("usage, in the scheduler", f"{LEDGER}.begin", "usage", NO_USAGE),
    Fault("usage, with the outputs", f"{LEDGER}.settle", "usage", NO_USAGE),
    Fault("step log", f"{WORKER}.step_log:LoggedRequest.record", "step log", NO_LOG),
    Fault("step log, at the end of a request", f"{WORKER}.step_log:DebugLog.write", "step log", NO_LOG),
    Fault("step log, when it is written", "gpu_align.drafter.step_log:dump", "step log", NO_LOG),
    Fault("step times", f"{WORKER}.step_timer:WallClock.elapsed_time", "step times", NO_TIMES),
    Fault("an answer is kept", f"{SCHEDULER}.schedulers:Recall.keep", "response memory", NO_MEMORY),
    Fault("earlier answers are given", f"{SCHEDULER}.schedulers:Recall.give", "response memory", NO_MEMORY),
    Fault("drafting, in one step", "gpu_align:Drafter.propose", "", (NOT_NOW,), 1, None),
    Fault("drafting, in each step", "gpu_align:Drafter.propose", "drafting",
          (NOT_NOW, "drafts nothing for 60 s"), drafts=False),
    Fault("drafting, of one request", f"{WORKER}.request_drafter:open_request", "", ("for request 0",), 1, None),
    Fault("a request is added", "gpu_align:Drafter.add", "", ("without its prediction",), 1, None),
    Fault("a request is removed", "gpu_align:Drafter.remove", "", NOT_DRAFTED, 1),
    Fault("draft reports", f"{WORKER}.proposer_v1:PredictedOutputsProposer.report", "draft reports", NO_REPORT,
          drafts=False, runner="V1"),
    Fault("draft reports", f"{WORKER}.draft_reporter:DraftReporter.report", "draft reports", NO_REPORT,
          drafts=False, runner="V2"),
    Fault("own draws", f"{WORKER}.own_draw:accept", "own draws",
          ("verifies no drafts by the request's own draw any more",), runner="V2"),
    Fault("draft slots", f"{DRAFTED}:DraftBudget.grant", "draft slots", NO_SLOTS, drafts=False, runner="V2"),
    Fault("draft slots, in one step", f"{DRAFTED}:DraftedRequests.take", "", NO_SLOTS[:1], 1, None, "V2"),
)  # fmt: skip
STARTS = (
    Fault("step log", f"{WORKER}.request_drafter:open_log", "step log", NO_LOG),
    Fault("step times", f"{WORKER}.step_timer:WallClock.__init__", "step times", NO_TIMES),
    Fault("response memory", f"{SCHEDULER}.schedulers:Recall.__init__", "response memory", NO_MEMORY),
    Fault("usage", f"{SCHEDULER}.schedulers:VerificationLedger", "usage", NO_USAGE),
    Fault("recipes", f"{WORKER}.request_drafter:load_recipes", "recipes", ("drafts without recipes any more",)),
    Fault("CUDA graphs", f"{WORKER}.graphs:add_graphs", "",
          ("runs only the steps that vLLM does with FULL CUDA graphs",), runner="V2"),
)  # fmt: skip
FAULTY = """
def raise_at(place, calls):
    import importlib
    module, _, attribute = place.partition(":")
    owner = importlib.import_module(module)
    *path, leaf = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, count = getattr(owner, leaf), 0
    def faulty(*args, **kwargs):
        nonlocal count
        count += 1
        if count <= calls:
            raise RuntimeError("a secret")
        return original(*args, **kwargs)
    setattr(owner, leaf, faulty)
    return lambda: setattr(owner, leaf, original)
"""
LOSE = """
def lose(groups):
    from dataclasses import replace
    from vllm_integration.seams import install
    gone = dict((each.groups, each) for each in install.SEAMS if each.groups in [(name,) for name in groups])
    assert len(gone) == len(groups), gone.keys()
    rest = [each for each in install.SEAMS if each not in gone.values()]
    install.SEAMS = (*rest, *(replace(each, attribute=each.attribute + "_") for each in gone.values()))
lose({groups})
"""
RESET = """
import gc
from vllm_integration.seams import guard
found = sorted(guard.faults())
gc.unfreeze()  # vLLM has frozen what there was at the start
for each in gc.get_objects():
    if type(each) is guard.Guard:
        each._count, each._until = 0, -float("inf")
        each._told.clear()
guard._faults.clear()
"""


class Bench:
    """A model and requests with known answers: three verbatim predictions, and one request without."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, build_bytes(folder / "model")
        greedy = greedy_by_transformers(self.model)
        prompts = [prompt_of(seed) for seed in range(4)]
        self.texts = [greedy(prompt, N) for prompt in prompts]
        self.requests = [
            Request(prompt, text if index < 3 else None, N)
            for index, (prompt, text) in enumerate(zip(prompts, self.texts, strict=True))
        ]

    @contextmanager
    def engine(
        self, runner: str, name: str, faults: tuple[Fault, ...] = (), before: str = "", **environment: str
    ) -> Iterator[V2Engine]:
        at_start = "".join(f"raise_at({fault.place!r}, 1000)\n" for fault in faults)
        directory = self.folder / f"{runner}-{name}"
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
                **environment,
            },
            before=before + (FAULTY + at_start if faults else ""),
        ) as engine:
            yield engine

    def accepted(self, run: Run) -> int:
        """Of the verbatim predictions. The answers are checked."""
        assert run.outputs == self.texts
        return sum(max(0, sampled - 1) for index in range(3) for _, _, sampled in run.of(index))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("extras"))


@RUNNERS
def test_a_step_that_fails_costs_its_part_alone(runner: str, bench: Bench) -> None:
    """One engine: each fault is taken back and forgotten before the next one."""
    with bench.engine(runner, "steps") as engine:
        verbatim = bench.accepted(engine.run(bench.requests))
        assert verbatim >= 3 * (N - 1 - N // (K + 1) - 2)
        for fault in STEPS:
            if fault.runner not in ("", runner):
                continue
            before = len(engine.warnings())
            engine.execute(f"{FAULTY}\nengine.undo = raise_at({fault.place!r}, {fault.calls})")
            accepted = bench.accepted(engine.run(bench.requests))
            engine.execute("engine.undo()")
            off, lines = engine.execute(RESET), engine.warnings()[before:]
            print(
                f"{runner:4}{fault.name:36}{accepted:4} of {verbatim} {', '.join(off) or '-':16} {lines[-1:]}"
            )
            assert off == [fault.part] * bool(fault.part), fault
            check_lines(lines, fault.says)
            if fault.drafts is None:
                assert verbatim / 2 < accepted < verbatim, fault
            else:
                assert accepted == verbatim if fault.drafts else accepted <= 3 * 3 * K, (fault, accepted)
        # And all is as it was.
        assert bench.accepted(engine.run(bench.requests)) == verbatim
        step_times_arrive(bench, engine)
        more = {"V1": drafting_goes_on_after_a_minute, "V2": trimmed_drafts_are_counted_as_rejected}
        more[runner](bench, engine)


TIMES = "from vllm_integration.wire import reports"
TAKE_TIMES = f"""
{TIMES}
from vllm_integration.worker import step_timer
step_timer.SELDOM, times, take = 1, [], reports.take
def taking(output):
    report = take(output)
    times.extend(report.times if report else ())
    return report
reports.take, engine.times, engine.take = taking, times, take
"""


def step_times_arrive(bench: Bench, engine: V2Engine) -> None:
    """With the tokens of each step, by another count."""
    engine.execute(TAKE_TIMES)
    run = engine.run(bench.requests)
    found = engine.execute(f"{TIMES}\nreports.take, found = engine.take, [[*each] for each in engine.times]")
    steps = filter(None, run.steps)  # an empty batch has no time
    assert [tokens for _, tokens, _ in found] == [sum(row[0] for row in step.values()) for step in steps]
    assert all(0 < ms < 60_000 and not in_graph for ms, _, in_graph in found)


def drafting_goes_on_after_a_minute(bench: Bench, engine: V2Engine) -> None:
    """And at once after two faults. A step takes ten seconds; the drafter is given again what it knew."""
    engine.execute("engine.runner.drafter.guard._clock = lambda: 10 * len(engine.steps)")
    for faults, without in ((2, 3), (3, 9)):
        engine.execute(f"{FAULTY}\nengine.undo = raise_at('gpu_align:Drafter.propose', {faults})")
        run = engine.run(bench.requests[:1])
        engine.execute("engine.undo()")
        drafts = [drafts for _, drafts, _ in run.of(0)]
        assert drafts[:-1] == [0] * without + [K] * (len(drafts) - 1 - without)
        assert drafts[-2] == K
    assert "works again" in engine.warnings()[-1]


def trimmed_drafts_are_counted_as_rejected(bench: Bench, engine: V2Engine) -> None:
    """Where what the device has trimmed cannot be read: drafts and their lengths go on."""
    engine.trim(0.02)
    trimmed = bench.accepted(engine.run(bench.requests))
    before = len(engine.warnings())
    engine.execute(f"{FAULTY}\nengine.undo = raise_at('{WORKER}.draft_reporter:_slots_left', 1000)")
    assert bench.accepted(engine.run(bench.requests)) == trimmed
    engine.execute("engine.undo()")
    assert engine.execute(RESET) == ["trimmed drafts"]
    check_lines(engine.warnings()[before:], ("counts drafts that the device trimmed as rejected any more",))
    engine.trim(None)


def check_lines(lines: list[str], says: tuple[str, ...]) -> None:
    assert [words in line for words, line in zip(says, lines, strict=True)] == [True] * len(says), lines
    assert all(re.search(r"(RuntimeError|AttributeError) at \S+:\d+ \S+", line) for line in lines), lines
    assert not any("a secret" in line for line in lines)


@RUNNERS
def test_parts_that_fail_at_the_start_cost_themselves_alone(runner: str, bench: Bench) -> None:
    faults = tuple(fault for fault in STARTS if fault.runner in ("", runner))
    with bench.engine(runner, "start", faults) as engine:
        lines = sorted(engine.warnings())
        off = engine.execute("from vllm_integration.seams import guard\nfound = sorted(guard.faults())")
        accepted = bench.accepted(engine.run(bench.requests))
    assert off == sorted(filter(None, {fault.part for fault in faults}))
    assert len(lines) == len(faults), lines
    for fault in faults:
        check_lines([line for line in lines if fault.says[0] in line], fault.says)
    assert accepted >= 3 * (N - 1 - N // (K + 1) - 2)


#: Groups of extras that an engine installs, those of one runner apart; and what has to be asked for.
MISSING = {
    "": ("usage", "step_log", "memory", "dump", "parameters", "samples", "recipes", "times"),
    "V1": ("usage_v1", "seeds"),
    "V2": ("graphs", "draws"),
}
#: Installed in a server that is asked for it, or with another drafter.
NOT_HERE = {"skeletons", "streams", "adaptive", "inner"}


def test_each_group_of_extras_is_lost_somewhere() -> None:
    extras = {name for name, group in GROUPS.items() if group.costs}
    assert extras == NOT_HERE.union(*MISSING.values())


@RUNNERS
def test_missing_names_cost_their_groups_alone(runner: str, bench: Bench) -> None:
    groups = (*MISSING[""], *MISSING[runner])
    with bench.engine(runner, "without", before=LOSE.format(groups=groups)) as engine:
        lines, installed = engine.log.read_text().splitlines(), engine.ask("seams")
        accepted = bench.accepted(engine.run(bench.requests))
    assert not any(installed[group] for group in groups)
    for group in groups:  # usage is missed by the scheduler, too
        assert any(f"gpu_align {GROUPS[group].costs}: " in line for line in lines), (group, lines)
    assert accepted >= 3 * (N - 1 - N // (K + 1) - 2)


VERSION = "from vllm_integration.seams import source_probe\nsource_probe.version_of = lambda *_: {!r}"
#: A file of vLLM's that cannot be found.
NO_FILE = """
from vllm_integration.seams.source_probe import Sources, probe_installed
probe_installed.cache_clear()
Sources.text = lambda self, module, text=Sources.text: None if module == {!r} else text(self, module)
"""
TWO = """
from importlib.metadata import EntryPoint
from vllm_integration.seams import install
points = [EntryPoint("gpu_align", "a:b", "vllm.x"), EntryPoint("gpu_align", "c:d", "vllm.x")]
install.entry_points = lambda points=points, **_: points
"""
OFF = "gpu_align is off, vLLM serves without predicted outputs: "
#: A vLLM that is not as known: code before the start, the lines of the log, whether requests are drafted for.
OTHERS = {
    "an older version": (VERSION.format("0.31.2"), [f"{OFF}vLLM 0.31.2 is older than 0.32.0"], False),
    "a newer version, a file of an extra missing, two plugins": (
        VERSION.format("0.99.0") + NO_FILE.format("vllm.logging_utils.dump_input") + TWO,
        [
            "gpu_align: not run with this version, 0.99.0, but with ",
            f"gpu_align {GROUPS['dump'].costs}: ",
            "2 plugins are called gpu_align, vLLM loads the last one: ",
        ],
        True,
    ),
    "a file of the core missing": (NO_FILE.format("vllm.v1.engine.input_processor"), [OFF], False),
    "a name of the core missing": (LOSE.format(groups=("v1",)), [OFF], False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_vllm_costs_one_line_and_no_answer(other: str, bench: Bench) -> None:
    before, says, drafts = OTHERS[other]
    with bench.engine("V1", other.replace(" ", "-"), before=before) as engine:
        accepted, lines = bench.accepted(engine.run(bench.requests)), engine.log.read_text().splitlines()
        print(f"V1  {other:58} {accepted:4}")
        assert [sum(words in line for line in lines) for words in says] == [1] * len(says), lines
        assert bool(accepted) is drafts


# --- around an engine ---

HIDE_NUMBA = """
import sys
hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "numba"}
for name in hidden:
    del sys.modules[name]
sys.modules["numba"] = None
from gpu_align.ops import host
assert not host.COMPILED
del sys.modules["numba"]  # vLLM imports it for a drafter of its own
sys.modules.update(hidden)
"""
#: From the second file of the step log on the system says that there is no space left.
FULL_DISK = """
import os
from types import SimpleNamespace
from gpu_align.ops import files
calls = []
def open_full(path, flags, mode=0o777):
    calls.extend([path] * (".yaml." in str(path)))
    return os.open("/dev/full", os.O_WRONLY) if len(calls) > 1 else os.open(path, flags, mode)
files.os = SimpleNamespace(**{**vars(os), "open": open_full})
"""
#: A pattern of the one line; code before and after the start.
AROUND = {
    "a full disk": (r"writes no step logs any more: OSError \(No space left on device\) at ", "", FULL_DISK),
    "no Numba": (" is slow, in plain Python: Numba is not installed", HIDE_NUMBA, ""),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_fault_around_an_engine_costs_one_line(name: str, bench: Bench) -> None:
    pattern, before, after = AROUND[name]
    with bench.engine("V1", name.replace(" ", "-"), before=before) as engine:
        engine.execute(after)
        for _ in range(2):
            assert bench.accepted(engine.run(bench.requests)) >= 3 * (N - 1 - N // (K + 1) - 2)
        assert [bool(re.search(pattern, line)) for line in engine.warnings()] == [True]
        for path in engine.steps.iterdir():  # none is half-written
            log = yaml.safe_load(path.read_text())
            assert sum(len(step["new"]) for step in log["steps"]) == log["usage"]["output_tokens"] > 0


#: Extras of the API server: the function that raises, and the words of its line.
FRONT = {
    "vllm_integration.frontend.middleware:packs_of": "does not say what this server is any more",
    "vllm_integration.frontend.middleware:scan": "does not limit request bodies in this step",
}


def test_extras_of_the_api_server_cost_themselves(tiny_model: Path, tmp_path: Path) -> None:
    """All of them raise, each time."""
    environment = {"GPU_ALIGN_STRICT": "0", "GPU_ALIGN_RECIPES": "off"}
    before = FAULTY + "".join(f"raise_at({place!r}, 1000)\n" for place in FRONT)
    with serve(tiny_model, tmp_path, environment=environment, runner="V1", before=before) as server:
        (plain,) = ask_all(server.url, [chat(1, N)])
        (answer,) = ask_all(server.url, [chat(1, N, plain.texts[0])])
        assert answer.texts == plain.texts
        assert answer.accepted_rejected[0] >= N - 4
        assert scrape(server.url)["gpu_align_requests_total"] == 1
        lines = [line for line in server.output.read_text().splitlines() if " ERROR " in line]
    for words in FRONT.values():
        assert sum(words in line for line in lines) == 1, lines
    assert not any("a secret" in line for line in lines)
