"""Replay the answers by each drafter, and run the published work on the same model.

Replays count tokens a step, rejections, and how far the confidence is right. The published work is node-llama-cpp,
packs of a teacher, Cascade's verbatim case and llama-cpp-python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.quality.replays import OurPair, bound
from benchmarks.quality.runs import Counts
from benchmarks.real_model.answers import MAX_TOKENS, TASK_KINDS, Answer, Ask, K, Task, chat, record
from benchmarks.real_model.model import CACHE, ModelError, gguf_file
from benchmarks.tables import ROOT
from gpu_align import predictors, simulate
from gpu_align.policies import POLICIES
from gpu_align.recipes import observe, report
from gpu_align.simulate import PairResult, Record, load_tokenizer, read_records, replay
from gpu_align.tools.simulate.replay import follow

HALVES = ("seen", "unseen")
COUNTS = ("output_tokens", "steps", "accepted", "rejected")
#: Drafters by what they know.
DRAFTERS = {
    "": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "static_text", "openai"),
    ", prompt alone": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "prompt_lookup_vllm"),
}
BOUNDS = {"best copy after the last token": True, "best copy from anywhere": False}
#: Of a summary, a copy and an edit; the texts of Cascade's case.
LOOKED_UP = ("summary 1", "copy prose 1", "json value 2")
VERBATIM = ("copy code 1", "copy prose 3", "list to table 3")
#: Samples of a prompt, at this temperature; prompts that are learned from, and as many that are not.
SAMPLES, TEMPERATURE, PROMPTS = 8, 0.7, 5
NODE = CACHE / "node"


@dataclass
class Replayed(OurPair):
    """past_end: draft tokens after an end token of their own draft."""

    past_end: int = 0


def write_records(
    answered: Sequence[tuple[Task, Answer]], model: Path, halves: Sequence[str]
) -> dict[str, Path]:
    """The answers that count, as records for `gpu-align simulate`: a file a half, under `CACHE`."""
    encode = load_tokenizer(str(model)).encode
    paths = {half: CACHE / f"records-{half}.jsonl" for half in halves}
    for half, path in paths.items():
        with path.open("w") as lines:
            for task, answer in answered:
                if task.half == half and answer.counts:
                    told = {"id": task.id, "prompt": answer.prompt, "prediction": encode(task.prediction)}
                    lines.write(json.dumps({**told, "output": answer.output, "tokenizer": str(model)}) + "\n")
    return paths


def replays(path: Path, end_token: int) -> dict[str, dict[str, Any]]:
    """Counts by drafter over the records of a file, and each record's tokens and steps."""
    records, known, found = read_records(path), simulate.runnable_policy_names(), {}
    alone = [replace(record, prediction=[]) for record in records]
    runs: dict[str, list[PairResult]] = {}
    for (suffix, names), those in zip(DRAFTERS.items(), (records, alone), strict=True):
        for policy in simulate.make_policies([name for name in names if name in known], those, K):
            runs[policy.name + suffix] = [_replay(policy, each, end_token) for each in those]
    runs |= {name: [bound(each, K, matched) for each in records] for name, matched in BOUNDS.items()}
    for name, pairs in runs.items():
        found[name] = _sums(pairs) | {"past_end": sum(getattr(pair, "past_end", 0) for pair in pairs)}
        found[name]["records"] = {pair.id: [pair.output_tokens, pair.steps] for pair in pairs}
    return found


def _replay(
    policy: predictors.TokenPredictor, record: Record, end_token: int, temperature: float = 0.0
) -> Replayed:
    loop = predictors.PredictorLoop(policy, num_draft_tokens=K, strict=True)
    sampling = SimpleNamespace(eos_token_id=end_token, do_sample=temperature > 0, temperature=temperature)
    loop.start(record.prompt, record.prediction, sampling=sampling)
    result = Replayed.begin(record)
    for step in follow(loop, record.output):
        result.count(step)
        if end_token in step.draft:
            result.past_end += len(step.draft) - 1 - list(step.draft).index(end_token)
    return result


def _sums(pairs: Iterable[PairResult]) -> dict[str, Any]:
    return {name: sum(getattr(pair, name) for pair in pairs) for name in COUNTS}


def confidence(paths: Iterable[Path], end_token: int, temperature: float) -> dict[str, Any]:
    """Tokens a step of ours, and of each tenth of confidences the drafts, the promise and what was accepted."""
    pairs = []
    for records in map(read_records, paths):
        [ours] = simulate.make_policies(["gpu_align"], records, K)
        pairs += [_replay(ours, each, end_token, temperature) for each in records]
    tenths = [tenth for tenth in Counts.of(pairs).reliability.deciles() if tenth.drafts]
    deciles = [[tenth.drafts, round(tenth.confidence, 3), round(tenth.accepted, 3)] for tenth in tenths]
    return _sums(pairs) | {"deciles": deciles}


def at_commit(commit: str, path: Path) -> dict[str, int]:
    """The same records by the drafter of another commit, by `simulate` in a copy of it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = f"git -C '{ROOT}' archive '{commit}' gpu_align | tar -x -C '{folder}'"
        if subprocess.run(["bash", "-o", "pipefail", "-c", copy], capture_output=True).returncode:
            raise ModelError(f"--baseline: expected a commit, found {commit}")
        options = f"--policy gpu_align -k {K} --json found.json".split()
        command = [sys.executable, "-m", "gpu_align", "simulate", str(path), *options]
        env = {**os.environ, "PYTHONPATH": folder}
        subprocess.run(command, check=True, cwd=folder, env=env, stdout=subprocess.DEVNULL)
        counts = json.loads(Path(folder, "found.json").read_text())["policies"]["gpu_align"]
    return {name: counts[name] for name in COUNTS}


def node_llama_cpp(prompts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The package on the GGUF, one thread, beside our predictor on the same answers: validated and refuted."""
    if not (NODE / "node_modules" / "node-llama-cpp").is_dir():
        raise ModelError(f"{NODE}: no node-llama-cpp; make real-model installs it")
    script = Path(__file__).with_name("input_lookup.mjs")
    (NODE / script.name).write_bytes(script.read_bytes())  # a module finds packages beside itself
    asked = json.dumps({"gguf": str(gguf_file()), "prompts": list(prompts.values()), "maxTokens": MAX_TOKENS})
    done = subprocess.run(["node", NODE / script.name], input=asked, capture_output=True, text=True, cwd=NODE)
    if done.returncode:
        raise ModelError(f"node-llama-cpp: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    rules = {
        "example": predictors.InputLookupTokenPredictor((2, 0), (1, 2)),
        "defaults": predictors.InputLookupTokenPredictor(),
    }
    found: dict[str, Any] = {}
    for (name, prompt), runs in zip(prompts.items(), json.loads(done.stdout), strict=True):
        output = runs["none"]["tokens"]
        found[name] = {"tokens": len(output), "cpu_s": {run: round(runs[run]["cpuS"], 2) for run in runs}}
        for run, rule in rules.items():
            guide = replay(rule, Record(name, list(prompt), [], output), K, draft_in_prefill=True)
            found[name][run] = {
                "identical": runs[run]["tokens"] == output,
                "release": [runs[run]["validated"], runs[run]["refuted"]],
                "guide": [guide.accepted, guide.rejected],
            }
    return found


def recipes(model: Path) -> dict[str, Any]:
    """Packs of the model's own samples, on its greedy answers to other prompts."""
    tokenizer, found = load_tokenizer(str(model)), {}
    texts_of = partial(simulate.token_texts, tokenizer)

    def encode(texts: Sequence[str | list[int]]) -> list[list[int]]:
        return [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]

    asks: dict[str, list[Ask]] = {}
    for kind, of in TASK_KINDS.items():
        if chats := [chat(kind, text) for text in of.get("teacher", ())]:
            asks[kind] = [Ask(each, TEMPERATURE, seed) for each in chats[:PROMPTS] for seed in range(SAMPLES)]
            asks[kind] += map(Ask, chats[PROMPTS:])
    record(model, [each for asked in asks.values() for each in asked])  # by one server
    for kind, asked in asks.items():
        answers, learned = record(model, asked), SAMPLES * PROMPTS
        several = (answers[i : i + SAMPLES] for i in range(0, learned, SAMPLES))
        groups = [[answer.text for answer in group if answer.counts] for group in several]
        records = [Record(kind, a.prompt, [], a.output) for a in answers[learned:] if a.counts]
        pack = observe([(kind, "", group) for group in groups if len(group) > 1], encode, texts_of)
        outputs = [(kind, each.prompt, each.output) for each in records]
        told = report(pack, outputs, encode, texts_of, K)
        alone = [replay(predictors.PredictedOutputTokenPredictor(), each, K) for each in records]
        found[kind] = {
            "samples": sum(map(len, groups)), "outputs": len(outputs), "entries": len(pack.observed),
            **told.tasks[kind].as_json(), "steps_context": sum(pair.steps for pair in alone),
            "steps_both": told.with_context[kind].steps,
        }  # fmt: skip
    return found


def verbatim(model: Path, answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The model's own answer as the prediction, through `gpu_align.hf.generate`: passes and CPU seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    from gpu_align import hf

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    runs: dict[str, predictors.TokenPredictor] = {
        "none": POLICIES["cursor"](), "openai": POLICIES["openai"](), "n-gram": POLICIES["prompt_lookup_vllm"](),
        "gpu_align": predictors.PredictedOutputTokenPredictor(),
    }  # fmt: skip
    found = {}
    for name in VERBATIM:
        prompt, output = answers[name].prompt, answers[name].output
        found[name] = {"tokens": len(output)}
        for run, predictor in runs.items():
            prediction = output if run in ("openai", "gpu_align") else []
            began = time.process_time()
            made = hf.generate(
                loaded, prompt, prediction=prediction, predictor=predictor, num_draft_tokens=K, do_sample=False,
                max_new_tokens=MAX_TOKENS, return_dict_in_generate=True,
            )  # fmt: skip
            same = made.sequences[0, len(prompt) :].tolist() == output
            seconds = round(time.process_time() - began, 2)
            found[name][run] = {"passes": made.predicted_outputs.steps, "cpu_s": seconds, "identical": same}
    return found


def llama_cpp(prompts: Mapping[str, list[int]], predictions: Mapping[str, list[int]]) -> dict[str, Any]:
    """llama-cpp-python on the GGUF: no drafts, its own lookup and ours; passes after the prefill, CPU seconds."""
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "with_llama_cpp.py"))
    found: dict[str, Any] = {name: {} for name in prompts}
    for run, drafter in example["drafters"](K).items():
        llama = example["load"](str(gguf_file()), drafter)
        for name, prompt in prompts.items():
            made = example["complete"](llama, prompt, predictions[name], MAX_TOKENS)
            tokens = made.pop("tokens")
            first = found[name].setdefault("output", tokens)
            found[name][run] = {**made, "cpu_s": round(made["cpu_s"], 2), "identical": tokens == first}
    return {name: {"tokens": len(runs.pop("output")), **runs} for name, runs in found.items()}


def published(model: Path, answered: Sequence[tuple[Task, Answer]]) -> dict[str, Any]:
    """All of it; without llama-cpp-python, which is built from source, without that."""
    answers = {task.id: answer for task, answer in answered}
    prompts = {name: answers[name].prompt for name in LOOKED_UP}
    found = {"node_llama_cpp": node_llama_cpp(prompts), "recipes": recipes(model)}
    found["verbatim"] = verbatim(model, answers)
    sys.path.append(str(CACHE / "llama-cpp"))
    if importlib.util.find_spec("llama_cpp"):
        encode = load_tokenizer(str(model)).encode
        predictions = {task.id: encode(task.prediction) for task, _ in answered if task.id in prompts}
        found["llama_cpp"] = llama_cpp(prompts, predictions)
    return found
