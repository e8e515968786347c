"""The worker's report to the scheduler about its drafts: one more attribute of vLLM's `ModelRunnerOutput`, which
goes from the one to the other as an object, between processes pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_align.tools.step_log import SOURCES

#: The source of a draft that the model's own drafter made.
DRAFT_MODEL = SOURCES.index("draft_model")
#: Parts of the plugin without which nothing is drafted: the drafter, the reports, and the slots in the scheduler.
DRAFTS = DRAFTING, REPORTS, SLOTS = "drafting", "draft reports", "draft slots"
#: That of the model's own drafter.
INNER_DRAFTER = "inner drafter"
#: The attribute of vLLM's `ModelRunnerOutput` that carries a `DraftReport`.
ATTRIBUTE = "gpu_align_draft_report"
#: Why a prediction is not used, or not all of it. The scheduler passes the index of one of these on.
REFUSALS = ("", "cut", "dropped", "no_room")

Ints = npt.NDArray[np.integer[Any]]


class Graphs(NamedTuple):
    """full: the steps that a server runs with FULL CUDA graphs. others: why it runs others without, and what would
    give it; empty where there are none."""

    full: str
    others: str = ""


_PLAIN, _WHOLE = "steps without drafts", "steps with K drafts for every request"
#: By name what the worker has found; the scheduler passes the place in this order on, which is 15 at most.
GRAPHS = {
    "unknown": Graphs(""),
    "all": Graphs("all steps"),
    "decode": Graphs("all decode steps"),
    "no mode": Graphs("no steps", "cudagraph_mode has none"),
    "off": Graphs("only the steps that vLLM does", "GPU_ALIGN_CUDA_GRAPHS=0"),
    "failed": Graphs("only the steps that vLLM does", "no more could be added"),
    "pipeline": Graphs(_WHOLE, "only the last pipeline stage drafts, and all stages have to pad alike"),
    "microbatches": Graphs(_WHOLE, "microbatches are captured for one number of tokens a request"),
    "states": Graphs(_WHOLE, "the model has layers with recurrent states"),
    "context": Graphs(f"{_PLAIN} and {_WHOLE}", "context parallelism"),
    "backend": Graphs(
        f"{_PLAIN} and {_WHOLE}",
        "graphs of the attention backend take one length for all requests, those of FlashAttention 3 and of "
        "--attention-backend TRITON_ATTN any",
    ),
}


class StepDrafts(NamedTuple):
    """The drafts that one step of a worker made for B requests.

    age: steps of the worker since then. position: [B] tokens of the request when its draft was made.
    length: [B] drafts. source: [B] places in `step_log.SOURCES`, 0 where the length is 0.
    survival: [B, K] see `survival_levels`; [B, 0] on V1, which does not schedule by it.
    """

    req_ids: Sequence[str]
    age: int
    position: Ints
    length: Ints
    source: Ints
    survival: npt.NDArray[np.uint8]


class DraftReport(NamedTuple):
    """drafts: those whose copies have arrived on the host, the oldest first. trimmed: request → draft slots that
    this very step verified, where the device trims them. refused: request → one of `REFUSALS`. faults: part
    of the plugin that is off in the worker → why. graphs: place in `GRAPHS`, which comes with whatever else
    there is."""

    drafts: Sequence[StepDrafts] = ()
    trimmed: Mapping[str, int] = {}
    refused: Mapping[str, str] = {}
    faults: Mapping[str, str] = {}
    graphs: int = 0


def attach(model_runner_output: Any, report: DraftReport) -> None:
    """Let a step's output carry a report, if there is anything in it."""
    if model_runner_output is not None and any(report[:-1]):
        setattr(model_runner_output, ATTRIBUTE, report)


def take(model_runner_output: Any) -> DraftReport | None:
    """Take the report off an output, if it has one: vLLM has one object for all its empty ones."""
    report: DraftReport | None = getattr(model_runner_output, ATTRIBUTE, None)
    if report is not None:
        delattr(model_runner_output, ATTRIBUTE)
    return report


def survival_levels(survival: npt.NDArray[np.floating[Any]], length: Ints) -> npt.NDArray[np.uint8]:
    """[B, K] in units of 1/255, rounded down but at least 1; 0 beyond `length`. survival: [B, K] the product of
    the confidences so far, the estimate that a draft and all before it are accepted. length: [B], at most K."""
    levels: npt.NDArray[np.uint8] = np.maximum(survival * 255, 1).astype(np.uint8)
    levels[np.arange(levels.shape[1]) >= np.asarray(length)[:, None]] = 0
    return levels
