"""A real language model as an instrument: ``python -m benchmarks.real_model [--serve N] [--published] [--write]``.

SmolLM2-135M-Instruct answers 51 tasks, once; drafters are replayed on its answers. Answers that end in a loop, and
those that the model does not end, are in no figure. What others published is run with the same model.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import tables
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.replays import OurPair, bound
from benchmarks.quality.runs import Counts
from benchmarks.real_model import model
from benchmarks.real_model.model import CACHE, FOLDER, HALVES, MAX_TOKENS, TASK_KINDS, K
from benchmarks.tables import table
from gpu_align import hf, predictors
from gpu_align.tools.bench.client import BenchError
from gpu_align.tools.recipes.learn import observe
from gpu_align.tools.recipes.report import report
from gpu_align.tools.simulate import replay as simulate
from gpu_align.tools.simulate.replay import PairResult, Record, follow, load_tokenizer, replay

#: Drafters by what they know.
DRAFTERS = {
    "": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "static_text", "openai"),
    ", prompt alone": ("gpu_align", "suffix_decoding_4", "prompt_lookup", "prompt_lookup_vllm"),
}
#: Of a summary, a copy and an edit; the texts of Cascade's case.
LOOKED_UP = ("summary 1", "copy prose 1", "json value 2")
VERBATIM = ("copy code 1", "copy prose 3", "list to table 3")
#: Prompts of a kind that a pack is learned from, by samples at these temperatures and seeds, and as many others.
PROMPTS, SAMPLES = 5, [(0.7, seed) for seed in range(8)]
NODE = CACHE / "node"
#: node-llama-cpp's settings: those of its guide's example, and the defaults.
RULES = {
    "example": predictors.InputLookupTokenPredictor((2, 0), (1, 2)),
    "defaults": predictors.InputLookupTokenPredictor(),
}
Results = dict[str, Any]


def run(options: Any) -> Results:
    """Run the measurements that the options ask for; returns the content of the JSON file."""
    add_to_path()  # suffix decoding, where it is built
    asked, encode = model.tasks(), load_tokenizer(str(model.model_folder())).encode
    end = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    answers = model.record([(task.messages, 0.0, 1) for task in asked])
    records = {
        task.id: Record(task.id, answer.prompt, encode(task.prediction), answer.output, str(FOLDER))
        for task, answer in zip(asked, answers, strict=True)
        if answer.counts
    }
    found: Results = {
        "num_draft_tokens": K,
        "answers": [
            [task.id, task.half, len(each.output), each.counts]
            for task, each in zip(asked, answers, strict=True)
        ],
        "replays": {
            half: replays([records[t.id] for t in asked if t.half == half and t.id in records], end)
            for half in HALVES
        },
    }
    if options.serve:
        found["served"] = model.turns(asked[:: options.serve])
    if options.published:
        looked_up, copied = ([records[i] for i in ids if i in records] for ids in (LOOKED_UP, VERBATIM))
        found["published"] = {
            "node_llama_cpp": node_llama_cpp(looked_up),
            "recipes": recipes(),
            "verbatim": verbatim(copied),
            "llama_cpp": llama_cpp(looked_up),
        }
    return found


def replayed(
    policy: predictors.TokenPredictor, records: Sequence[Record], end_token: int, temperature: float = 0.0
) -> list[PairResult]:
    """`replay` of each, told end token and temperature."""
    loop = predictors.PredictorLoop(policy, num_draft_tokens=K, strict=True)
    sampling = SimpleNamespace(eos_token_id=end_token, do_sample=temperature > 0, temperature=temperature)
    results: list[PairResult] = [OurPair.begin(each) for each in records]
    for each, result in zip(records, results, strict=True):
        loop.start(each.prompt, each.prediction, sampling=sampling)
        for step in follow(loop, each.output):
            result.count(step)
    return results


def replays(records: Sequence[Record], end_token: int) -> Results:
    """Counts by drafter."""
    known, alone = simulate.runnable_policy_names(), [replace(each, prediction=[]) for each in records]
    runs: dict[str, list[PairResult]] = {}
    for (suffix, names), those in zip(DRAFTERS.items(), (records, alone), strict=True):
        for policy in simulate.make_policies([name for name in names if name in known], those, K):
            runs[policy.name + suffix] = replayed(policy, those, end_token)
    runs["best copy"] = [bound(each, K) for each in records]
    return {name: Counts.of(pairs).as_json() for name, pairs in runs.items()}


def node_llama_cpp(records: Sequence[Record]) -> Results:
    """The package on the GGUF, one thread, beside our predictor on the same answers: validated and refuted."""
    script = Path(__file__).with_name("input_lookup.mjs")
    (NODE / script.name).write_bytes(script.read_bytes())  # a module finds packages beside itself
    told = {"gguf": str(model.gguf_file()), "prompts": [r.prompt for r in records], "maxTokens": MAX_TOKENS}
    ran = subprocess.run(
        ["node", script.name], cwd=NODE, input=json.dumps(told), stdout=subprocess.PIPE, text=True, check=True
    )
    answers = json.loads(ran.stdout)
    found: Results = {}
    for each, runs in zip(records, answers, strict=True):
        output = runs["none"]["tokens"]
        found[each.id] = {"tokens": len(output), "cpu_s": {run: round(runs[run]["cpuS"], 2) for run in runs}}
        for run, rule in RULES.items():
            guide = replay(rule, replace(each, prediction=[], output=output), K, draft_in_prefill=True)
            counts = {"release": runs[run]["predictions"], "guide": [guide.accepted, guide.rejected]}
            found[each.id][run] = {"identical": runs[run]["tokens"] == output, **counts}
    return found


def recipes() -> Results:
    """Packs of the model's own samples, on its greedy answers to other prompts, by kind."""
    tokenizer, found = load_tokenizer(str(FOLDER)), {}
    texts_of = partial(simulate.token_texts, tokenizer)

    def encode(texts: Sequence[str | list[int]]) -> list[list[int]]:
        return [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]

    taught = {kind: of["teacher"] for kind, of in TASK_KINDS.items() if "teacher" in of}
    answers = iter(model.record([
        (model.chat(kind, text), *how)
        for kind, texts in taught.items()
        for i, text in enumerate(texts)
        for how in (SAMPLES if i < PROMPTS else [(0.0, 1)])
    ]))  # fmt: skip
    for kind in taught:
        groups = [[a.text for a in islice(answers, len(SAMPLES)) if a.counts] for _ in range(PROMPTS)]
        outputs = [(kind, a.prompt, a.output) for a in islice(answers, PROMPTS) if a.counts]
        pack = observe([(kind, "", group) for group in groups if len(group) > 1], encode, texts_of)
        told = report(pack, outputs, encode, texts_of, K)
        records = [Record(kind, prompt, [], output) for _, prompt, output in outputs]
        [alone] = simulate.simulate(records, [predictors.PredictedOutputTokenPredictor()], K)
        found[kind] = {
            "samples": sum(map(len, groups)), "outputs": len(outputs), "entries": len(pack.observed),
            **told.tasks[kind].as_json(), "steps_context": alone.steps,
            "steps_both": told.with_context[kind].steps,
        }  # fmt: skip
    return found


def verbatim(records: Sequence[Record]) -> Results:
    """The model's own answer as the prediction, through `gpu_align.hf.generate`: passes and CPU seconds."""
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    others = simulate.make_policies(["cursor", "openai", "prompt_lookup_vllm"], records, K)
    drafters = [*others, predictors.PredictedOutputTokenPredictor()]
    runs = dict(zip(("none", "openai", "n-gram", "gpu_align"), drafters, strict=True))
    found: Results = {}
    for each in records:
        found[each.id] = {"tokens": len(each.output)}
        for run, predictor in runs.items():
            prediction = each.output if run in ("openai", "gpu_align") else []
            began = time.process_time()
            made = hf.generate(
                loaded, each.prompt, prediction=prediction, predictor=predictor, num_draft_tokens=K,
                do_sample=False, max_new_tokens=MAX_TOKENS, return_dict_in_generate=True,
            )  # fmt: skip
            same = made.sequences[0, len(each.prompt) :].tolist() == each.output
            cpu_s = round(time.process_time() - began, 2)
            found[each.id][run] = {"passes": made.predicted_outputs.steps, "cpu_s": cpu_s, "identical": same}
    return found


def llama_cpp(records: Sequence[Record]) -> Results:
    """llama-cpp-python on the GGUF: no drafts, its own lookup and ours; passes after the prefill, CPU seconds.

    Nothing where it was not built from source.
    """
    sys.path.append(str(CACHE / "llama-cpp"))
    if not importlib.util.find_spec("llama_cpp"):
        return {}
    example = runpy.run_path(str(tables.DOCS / "examples" / "with_llama_cpp.py"))
    found: Results = {each.id: {} for each in records}
    for run, drafter in example["drafters"](K).items():
        llama = example["load"](str(model.gguf_file()), drafter)
        for each in records:
            made = example["complete"](llama, each.prompt, each.prediction, MAX_TOKENS)
            tokens = made.pop("tokens")
            first = found[each.id].setdefault("output", tokens)
            found[each.id][run] = {**made, "cpu_s": round(made["cpu_s"], 2), "identical": tokens == first}
    return {name: {"tokens": len(runs.pop("output")), **runs} for name, runs in found.items()}


def drafts(found: Results) -> str:
    """Tokens a step, and rejected per accepted, of every drafter on each half."""
    columns, heads = [], ["tokens a step; rejected per accepted"]
    for half, counts in found["replays"].items():
        columns.append({name: tables.at(each).replace(" @", ";") for name, each in counts.items()})
        heads.append(f"{half}: {sum(row[1] == half and row[3] for row in found['answers'])} answers")
    return table(heads, [[name, *(column[name] for column in columns)] for name in columns[0]])


def cpu(found: Results) -> str:
    """CPU seconds of the servers' processes over the answers that count."""
    each, rows = [row["cpu_s"] for row in found["served"] if row["counts"]], []
    for mode in each[0]:
        used, none = (sum(seconds[name] for seconds in each) for name in (mode, "none"))
        by_task = sorted(seconds["none"] / seconds[mode] for seconds in each)
        rows.append([mode, f"{used:.0f} s", f"{none / used:.2f}", f"{by_task[0]:.2f}–{by_task[-1]:.2f}"])
    same = sum(row["identical"] for row in found["served"] if row["counts"])
    return table([f"{same} of {len(each)} texts equal", "CPU", "none over it", "by task"], rows)


def node(found: Results) -> str:
    """node-llama-cpp: validated and refuted by the release and by its guide's rule, its text, CPU seconds."""
    rows = []
    for task, run in found["published"]["node_llama_cpp"].items():
        for rule in RULES:
            pairs = [" / ".join(map(str, run[rule][which])) for which in ("release", "guide")]
            seconds = [f"{run['cpu_s'][which]:.1f} s" for which in (rule, "none")]
            text = "equal" if run[rule]["identical"] else "another"
            rows.append([f"{task}, {run['tokens']} tokens, {rule}", *pairs, text, *seconds])
    return table(["validated / refuted", "release", "guide's rule", "text", "CPU", "without"], rows)


def teacher(found: Results) -> str:
    """Packs of the model's samples: share drafted, share of it right, tokens a step without and with the pack."""
    rows = []
    for task, run in found["published"]["recipes"].items():
        alone, both = (f"{run['tokens'] / run[steps]:.2f}" for steps in ("steps_context", "steps_both"))
        right = f"{run['accuracy']:.1%}" if run["drafted"] else "–"
        rows.append([task, f"{run['coverage']:.0%}", right, alone, both])
    return table(["task", "coverage", "accuracy", "tokens a step: context alone", "with the pack"], rows)


def passes(found: Results) -> str:
    """Forward passes and CPU seconds with the answer as prediction, and of llama-cpp-python."""
    rows = []
    for name, of in (("verbatim", "verbatim"), ("llama_cpp", "llama-cpp-python")):
        for task, runs in found["published"].get(name, {}).items():
            made = [(run, each) for run, each in runs.items() if run != "tokens"]
            cells = [f"{run}: {each['passes']} ({each['cpu_s']:.1f} s)" for run, each in made]
            rows.append([f"{of}: {task}, {runs['tokens']} tokens", ", ".join(cells)])
    return table(["", "passes (CPU)"], rows, "ll")


#: The blocks of the page by name.
BLOCKS = {"model": drafts, "served": cpu, "node": node, "teacher": teacher, "passes": passes}


def main() -> int:
    """Command line; returns the exit code (0, or 1: something could not be had or written)."""
    parser = tables.command("benchmarks.real_model", __doc__)
    parser.add_argument("--serve", type=int, metavar="N", help="servers in turns, on every Nth task")
    parser.add_argument("--published", action="store_true", help="others' work; needs node-llama-cpp")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/published.md")
    options = parser.parse_args()
    try:
        with model.locked():
            found = {**tables.read("real_model"), **run(options)}
            for block in BLOCKS.values():
                print(f"{block(found)}\n")
            if options.write:
                tables.write_json(tables.RESULTS / "real_model.json", found)
                tables.fill_file(tables.DOCS / "published.md", BLOCKS, found)
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
