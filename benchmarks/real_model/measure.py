"""Replay the recorded answers with each drafter: tokens a step, rejections, calibration of the confidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.quality.replays import OurPair, Reliability, bound
from benchmarks.real_model.model import CACHE, ModelError
from benchmarks.real_model.server import Answer, K
from benchmarks.real_model.tasks import Task
from benchmarks.tables import ROOT
from gpu_align.predictors import PredictorLoop, TokenPredictor
from gpu_align.simulate import Record, load_tokenizer, make_policies, read_records, runnable_policy_names
from gpu_align.tools.simulate.replay import PairResult, follow

HALVES = ("seen", "unseen")
COUNTS = ("output_tokens", "steps", "accepted", "rejected")
#: Drafters by what they know.
DRAFTERS = {
    "": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "static_text", "openai"),
    ", prompt alone": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "prompt_lookup_vllm"),
}
BOUNDS = {"best copy after the last token": True, "best copy from anywhere": False}


def write_records(
    tasks: Sequence[Task], answers: Mapping[str, Answer], model: Path, halves: Sequence[str]
) -> dict[str, Path]:
    """The answers that count, as records for `gpu-align simulate`: a file a half, under `CACHE`."""
    encode = load_tokenizer(str(model)).encode
    lines: dict[str, list[str]] = {half: [] for half in halves}
    for task in tasks:
        if (answer := answers[task.id]).counts and task.half in lines:
            ids = {"prompt": answer.prompt, "prediction": encode(task.prediction), "output": answer.output}
            lines[task.half].append(json.dumps({"id": task.id, **ids, "tokenizer": str(model)}) + "\n")
    paths = {half: CACHE / f"records-{half}.jsonl" for half in lines}
    for half, path in paths.items():
        path.write_text("".join(lines[half]))
    return paths


def replays(path: Path, end_token: int) -> dict[str, dict[str, Any]]:
    """Counts by drafter over the records of a file, and each record's tokens and steps."""
    records, found, known = read_records(path), {}, runnable_policy_names()
    alone = [Record(r.id, r.prompt, [], r.output, r.tokenizer) for r in records]
    for (suffix, names), those in zip(DRAFTERS.items(), (records, alone), strict=True):
        for policy in make_policies([name for name in names if name in known], those, K):
            found[policy.name + suffix] = _sums([_replay(policy, record, end_token) for record in those])
    for name, matched in BOUNDS.items():
        found[name] = _sums([(bound(r, K, matched), 0) for r in records])
    return found


def _replay(
    policy: TokenPredictor, record: Record, end_token: int, temperature: float = 0.0
) -> tuple[OurPair, int]:
    """One record, and how many draft tokens came after an end token of their own draft."""
    loop = PredictorLoop(policy, num_draft_tokens=K, strict=True)
    sampling = SimpleNamespace(eos_token_id=end_token, do_sample=temperature > 0, temperature=temperature)
    loop.start(record.prompt, record.prediction, sampling=sampling)
    result, past_end = OurPair.begin(record), 0
    for step in follow(loop, record.output):
        result.count(step)
        if end_token in step.draft:
            past_end += len(step.draft) - 1 - list(step.draft).index(end_token)
    return result, past_end


def _sums(pairs: Sequence[tuple[PairResult, int]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: sum(getattr(pair, name) for pair, _ in pairs) for name in COUNTS}
    found["past_end"] = sum(past_end for _, past_end in pairs)
    return found | {"records": {pair.id: [pair.output_tokens, pair.steps] for pair, _ in pairs}}


def confidence(paths: Mapping[str, Path], end_token: int, temperature: float) -> dict[str, Any]:
    """Tokens a step of ours, and of each tenth of confidences the drafts, the promise and what was accepted."""
    total, pairs = Reliability(), []
    for records in map(read_records, paths.values()):
        [ours] = make_policies(["gpu_align"], records, K)
        pairs += [_replay(ours, record, end_token, temperature) for record in records]
    for pair, _ in pairs:
        total.take(pair.reliability)
    deciles = [[d.drafts, round(d.confidence, 3), round(d.accepted, 3)] for d in total.deciles() if d.drafts]
    return {name: sum(getattr(pair, name) for pair, _ in pairs) for name in COUNTS} | {"deciles": deciles}


def at_commit(commit: str, paths: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Replay the same records with the drafter of another commit, by `simulate` in a copy of it."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = f"git -C '{ROOT}' archive '{commit}' gpu_align | tar -x -C '{folder}'"
        if subprocess.run(["bash", "-o", "pipefail", "-c", copy], capture_output=True).returncode:
            raise ModelError(f"--baseline: expected a commit, found {commit}")
        for half, path in paths.items():
            options = f"--policy gpu_align -k {K} --json {half}.json"
            command = [sys.executable, "-m", "gpu_align", "simulate", str(path), *options.split()]
            env = {**os.environ, "PYTHONPATH": folder}
            subprocess.run(command, check=True, cwd=folder, env=env, stdout=subprocess.DEVNULL)
            counts = json.loads(Path(folder, f"{half}.json").read_text())["policies"]["gpu_align"]
            found[half] = {name: counts[name] for name in COUNTS}
    return found
