"""Everything that usage and metrics say, counted again from the drafts and tokens of step logs alone."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import usage_harness
import yaml
from vllm_harness import is_live

OURS = "gpu_align_"


class Step(NamedTuple):
    source: str
    verified: int
    accepted: int


def recount(log: dict[str, Any], num_tokens: int) -> list[Step]:
    """The steps of an output of so many tokens.

    A draft is accepted where the output has the same token at the same place; a step's last token is the model's
    own, whatever it is.
    """
    steps, written = [], 0
    for logged in log["steps"]:
        if written >= num_tokens:
            break
        drafts, new = logged["proposed"][: logged["verified"]], logged["new"]
        accepted = 0
        while accepted < min(len(drafts), len(new) - 1, num_tokens - written):
            if drafts[accepted] != new[accepted]:
                break
            accepted += 1
        steps.append(Step(logged["source"], len(drafts), accepted))
        written += len(new)
    return steps


def of_prediction(steps: Sequence[Step]) -> tuple[int, int]:
    """Accepted and rejected tokens of the prediction."""
    own = [step for step in steps if step.source == "prediction"]
    accepted = sum(step.accepted for step in own)
    return accepted, sum(step.verified for step in own) - accepted


def expected_samples(requests: Sequence[tuple[int | None, list[list[Step]]]]) -> Counter[str]:
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


def samples_of_choice(steps: Sequence[Step]) -> Counter[str]:
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


def details(steps: Sequence[Step]) -> dict[str, Any]:
    """The further counts of `GPU_ALIGN_USAGE_DETAILS`."""
    by_source: dict[str, dict[str, int]] = {}
    for step in steps:
        if step.verified:
            of = by_source.setdefault(step.source, {"drafted": 0, "accepted": 0})
            of["drafted"] += step.verified
            of["accepted"] += step.accepted
    drafted = sum(step.verified for step in steps)
    return {"steps": len(steps), "drafted": drafted, "by_source": by_source}


def whole_steps(log: dict[str, Any], num_tokens: int) -> list[Step]:
    """The steps whose tokens all lie within the first `num_tokens`."""
    steps, written = recount(log, 2**30), 0
    for index, logged in enumerate(log["steps"]):
        written += len(logged["new"])
        if written > num_tokens:
            return steps[:index]
    return steps


def scrape(url: str) -> Counter[str]:
    """The samples that are compared; those of steps lost for any reason as "lost"."""
    found: Counter[str] = Counter()
    theirs = "vllm:spec_decode_num", "vllm:num_preemptions_total", "vllm:num_requests_"
    for name, value in usage_harness.scrape(url, *theirs).items():
        if name.startswith(f"{OURS}steps_lost_total"):
            found["lost"] += int(value)
        elif re.match(rf"{OURS}\w+_(total|count|tokens_sum)", name):
            found[name] = int(value)
        elif name.startswith(theirs):
            found[name.partition("{")[0]] += int(value)
    return found


class Logs:
    """The files of the step logs, each read once; they are written with the engine's next step."""

    _loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._read: set[str] = set()

    def of(self, answer_id: str, choices: int, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(self._found.get(answer_id, ())) < choices and time.monotonic() < deadline:
            self._look()
            time.sleep(0.05)
        return self._found.pop(answer_id, [])

    def _look(self) -> None:
        for path in self._directory.glob("*.yaml"):
            if path.name not in self._read and not is_live(path):
                self._read.add(path.name)
                (name,) = re.findall(r"(?:chatcmpl|cmpl|resp)[-_][0-9a-f]{16,32}", path.name)
                self._found.setdefault(name, []).append(yaml.load(path.read_text(), self._loader))
