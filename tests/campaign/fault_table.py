"""The faults that are injected, and what the table of docs/developer/faults.md says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNNERS = ("V1", "V2")

OFF = r"ERROR .*gpu_align is off, vLLM serves without predicted outputs: .*injected fault"
REFUSED = r"WARNING .*Request \S+ is served without its prediction: RuntimeError: injected fault"
NO_SLOTS = r"ERROR .*gpu_align schedules no drafts any more: RuntimeError: injected fault"
NO_USAGE = r"ERROR .*gpu_align counts no usage any more: RuntimeError: injected fault"
NEITHER = r"ERROR .*gpu_align counts no usage and schedules no drafts any more: RuntimeError: injected fault"
INJECTED = "injected fault"
NO_LOG = r"ERROR .*gpu_align writes no step logs any more .*"
NO_RECIPES = r"WARNING .*gpu_align drafts without recipes .*PackError"


@dataclass(frozen=True)
class Fault:
    """A fault, and what the table says of it.

    place: the function that raises at its `call`-th call; "" where `before` or `after` do it, code around the
    start of the engine.
    line: the one line in the log; "" for none. refused: requests of the first batch that are served without their
    prediction. drafts, usage, logs: whether the second batch has them.
    """

    name: str
    place: str = ""
    line: str = ""
    call: int = 3
    refused: int = 0
    drafts: bool = True
    usage: bool = True
    logs: bool = True
    before: str = ""
    after: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    runners: tuple[str, ...] = RUNNERS


WORKER, SCHEDULER = "vllm_integration.worker", "vllm_integration.scheduler"
LEDGER = f"{SCHEDULER}.verification_ledger:VerificationLedger"
TABLE = f"{SCHEDULER}.draft_budget:DraftedRequests"
V1, V2 = ("V1",), ("V2",)
#: Whatever is drafted for nobody has no step log; usage says that nothing was drafted.
NO_DRAFTS: dict[str, Any] = {"drafts": False, "logs": False}
#: No directory can be made below a file, not even by root.
NO_HOME = tuple(
    (name, "{file}/home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
)
FAULTS = (
    Fault("propose", "gpu_align:Drafter.propose", OFF, **NO_DRAFTS),
    Fault("add", "gpu_align:Drafter.add", REFUSED, refused=1),
    Fault("remove", "gpu_align:Drafter.remove", OFF, call=2, **NO_DRAFTS),
    Fault("reading a prediction", f"{WORKER}.request_drafter:open_request", OFF, **NO_DRAFTS),
    Fault("cut", f"{WORKER}.requests:RequestState.room", OFF, **NO_DRAFTS, runners=V1),
    Fault(
        "cut", f"{SCHEDULER}.schedulers:_WithDraftBudget._cut_to_slots", NO_SLOTS, drafts=False, runners=V2
    ),
    Fault("grant", f"{WORKER}.requests:SlotTable.acquire", OFF, **NO_DRAFTS, runners=V1),
    Fault("grant", f"{SCHEDULER}.draft_budget:DraftBudget.grant", NO_SLOTS, drafts=False, runners=V2),
    Fault("account, step begins", f"{LEDGER}.begin", NO_USAGE, usage=False),
    Fault("account, step ends", f"{LEDGER}.settle", NO_USAGE, usage=False),
    Fault("table of requests", f"{TABLE}.take", NEITHER, usage=False, runners=V1),
    Fault("table of requests", f"{TABLE}.take", NEITHER, usage=False, drafts=False, runners=V2),
    Fault("report", f"{WORKER}.proposer_v1:PredictedOutputs.report", OFF, **NO_DRAFTS, runners=V1),
    Fault("report", f"{WORKER}.draft_reporter:DraftReporter.copy", OFF, **NO_DRAFTS, runners=V2),
    Fault("log, record", f"{WORKER}.requests:RequestState.record", NO_LOG + INJECTED, logs=False),
    Fault("log, finish", f"{WORKER}.step_log:DebugLog._log_of", NO_LOG + INJECTED, logs=False),
    Fault("log, write", "gpu_align.step_log:dump", NO_LOG + INJECTED, call=2, logs=False),
    Fault("disk full", "", NO_LOG + "No space left on device", after="injected.fill_the_disk(2)", logs=False),
    Fault("read-only home", before="injected.cache_numba_in({file!r} + '/numba')", environment=NO_HOME),
    Fault("no Numba", before="injected.hide_numba()"),
    Fault("corrupt Numba cache", before="injected.cache_numba_in({cache!r})"),
    Fault("corrupt recipe pack", "", NO_RECIPES, environment=(("GPU_ALIGN_RECIPES", "{file}"),)),
)
