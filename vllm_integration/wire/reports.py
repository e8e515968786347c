"""The worker's report to the scheduler about its drafts: one more attribute of vLLM's `ModelRunnerOutput`, an
object, between processes pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_align.drafter.step_log import SOURCES

#: The source of a draft that the model's own drafter made.
DRAFT_MODEL = SOURCES.index("draft_model")
#: Parts of the plugin without which nothing is drafted: the drafter, the reports, and the slots in the scheduler.
DRAFTS = DRAFTING, REPORTS, SLOTS = "drafting", "draft reports", "draft slots"
INNER_DRAFTER = "inner drafter"
#: The attribute of vLLM's `ModelRunnerOutput` that carries a `DraftReport`.
ATTRIBUTE = "gpu_align_draft_report"
#: Why a prediction is not used, or not all of it. The scheduler passes the index of one of these on.
REFUSALS = ("", "tokens", "malformed", "room")

Ints = npt.NDArray[np.integer[Any]]
Shorts = npt.NDArray[np.int16]


class StepDrafts(NamedTuple):
    """The drafts that one step of a worker made for B requests.

    age: steps of the worker since then. position: [B] tokens of the request when its draft was made.
    length: [B] drafts. source: [B] places in `step_log.SOURCES`, 0 where the length is 0.
    survival: [B, K] see `survival_levels`.
    """

    req_ids: Sequence[str]
    age: int
    position: Ints
    length: Ints
    source: Ints
    survival: npt.NDArray[np.uint8]


class StepTime(NamedTuple):
    """A step that has run. ms: of the device, NaN if not known. tokens: of all requests, prompts and drafts
    included. in_graph: whether it was a FULL CUDA graph; False on V1."""

    ms: float
    tokens: int
    in_graph: bool


class DraftReport(NamedTuple):
    """drafts: those whose copies have arrived on the host, the oldest first. trimmed: request → draft slots that
    this very step verified, where the device trims them. refused: request → one of `REFUSALS`. faults: part
    of the plugin that is off in the worker → why. times: of steps whose time is known by now. plain_graphs_alone:
    whether plain steps have FULL CUDA graphs, and drafts of mixed lengths none; comes with whatever else there
    is."""

    drafts: Sequence[StepDrafts] = ()
    trimmed: Mapping[str, int] = {}
    refused: Mapping[str, str] = {}
    faults: Mapping[str, str] = {}
    times: Sequence[StepTime] = ()
    plain_graphs_alone: bool = False


def attach(model_runner_output: Any, report: DraftReport) -> None:
    """Let a step's output carry a report that is not empty."""
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
