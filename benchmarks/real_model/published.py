"""Published experiments with the model: node-llama-cpp, packs of a teacher, Cascade's case, llama-cpp-python."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_model.model import CACHE, ModelError, gguf_file
from benchmarks.real_model.server import MAX_TOKENS, Answer, Ask, K, record
from benchmarks.real_model.tasks import KINDS, Task, chat
from benchmarks.tables import ROOT
from gpu_align.policies import POLICIES
from gpu_align.predictors import InputLookupTokenPredictor, PredictedOutputTokenPredictor, TokenPredictor
from gpu_align.recipes import observe
from gpu_align.simulate import Record, load_tokenizer, replay, token_texts
from gpu_align.tools.recipes.report import report

#: Of a summary, a copy and an edit; the texts of Cascade's case.
LOOKED_UP = ("summary 1", "copy prose 1", "json value 2")
VERBATIM = ("copy code 1", "copy prose 3", "list to table 3")
#: Samples of a prompt, at this temperature; prompts that are learned from, and as many that are not.
SAMPLES, TEMPERATURE, PROMPTS = 8, 0.7, 5
NODE = CACHE / "node"


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
    rules = {"example": InputLookupTokenPredictor((2, 0), (1, 2)), "defaults": InputLookupTokenPredictor()}
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

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text) for text in texts]

    def texts_of(ids: Iterable[int]) -> list[str]:
        return token_texts(tokenizer, ids)

    asks: dict[str, list[Ask]] = {}
    for kind, of in KINDS.items():
        chats = [chat(kind, text) for text in of.get("teacher", ())]
        asks[kind] = [Ask(each, TEMPERATURE, seed) for each in chats[:PROMPTS] for seed in range(SAMPLES)]
        asks[kind] += map(Ask, chats[PROMPTS:])
    answers = iter(asyncio.run(record(model, [ask for each in asks.values() for ask in each])))
    for kind in (kind for kind, each in asks.items() if each):
        several = [[next(answers) for _ in range(SAMPLES)] for _ in range(PROMPTS)]
        groups = [[answer.text for answer in group if answer.counts] for group in several]
        outputs = [answer for _ in asks[kind][SAMPLES * PROMPTS :] if (answer := next(answers)).counts]
        pack = observe([(kind, "", group) for group in groups if len(group) > 1], encode, texts_of)
        told = report(pack.tokenize(encode, texts_of), [(kind, a.prompt, a.output) for a in outputs], list, K)
        records = [Record(kind, answer.prompt, [], answer.output) for answer in outputs]
        alone = [replay(PredictedOutputTokenPredictor(), record, K) for record in records]
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
    runs: dict[str, TokenPredictor] = {
        "none": POLICIES["cursor"](), "openai": POLICIES["openai"](), "n-gram": POLICIES["prompt_lookup_vllm"](),
        "gpu_align": PredictedOutputTokenPredictor(),
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


def measure(model: Path, asked: Sequence[Task], answers: Mapping[str, Answer]) -> dict[str, Any]:
    """All of it; without llama-cpp-python, which is built from source, without that."""
    prompts = {name: answers[name].prompt for name in LOOKED_UP}
    encode = load_tokenizer(str(model)).encode
    found = {"node_llama_cpp": node_llama_cpp(prompts), "recipes": recipes(model)}
    found["verbatim"] = verbatim(model, answers)
    sys.path.append(str(CACHE / "llama-cpp"))
    if importlib.util.find_spec("llama_cpp"):
        predictions = {task.id: encode(task.prediction) for task in asked if task.id in prompts}
        found["llama_cpp"] = llama_cpp(prompts, predictions)
    return found
