"""vLLM with the plugin and without, on a model of random weights that needs no checkpoint and no tokenizer.

An engine is a process of its own, ``python -m benchmarks.gpu.serve SPEC``: it answers batches of token ids. The
engines of a stage start together, and answer one at a time; one that takes too long is ended, with its rows.
`rows` compares greedy answers in float32 with those of vLLM by itself. `throughput_rows` times bfloat16.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables import ROOT

Tokens = list[int]
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
K = 16
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size")  # fmt: skip
SHAPES = {
    "tiny": (256, 512, 4, 4, 2, 64, 1024),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
}
PLUGIN = {"method": "custom_class", "model": "vllm_integration.PredictedOutputs", "num_speculative_tokens": K}
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
#: Engine → what it gets besides. On a CPU all are V1 and eager.
MODES: dict[str, dict[str, Any]] = {
    "plain": {}, "eager": {"enforce_eager": True}, "graphs": {},
    "adaptive": {"speculative_config": {**PLUGIN, "enable_adaptive_verification": True}},
    # The KV cache holds fewer tokens than the requests need.
    "preempted": {"max_model_len": 512, "block_size": 32, "num_gpu_blocks_override": 24},
    "sync check": {}, "sleep": {"enable_sleep_mode": True}, "choices": {"skip_tokenizer_init": False},
    "V1": {}, "V1 plain": {}, "ngram": {},
}  # fmt: skip
NO_PLUGIN = ("plain", "V1 plain", "ngram", "none")
DRY_MODES = ("plain", "preempted", "choices", "ngram")
CHOICES = ['{"answer": "yes"}', '{"answer": "no"}']
BATCH, OUTPUT = 8, 64


def write_model(folder: Path, shape: str, has_tokenizer: bool) -> str:
    """The folder of a Llama without weights, with the demo's tokenizer of bytes if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        **dict(zip(SIZES, SHAPES[shape], strict=True)),
    }  # fmt: skip
    if has_tokenizer:
        from vllm_integration.demo import model

        tokenizer = model.train_tokenizer([Path(model.__file__).read_text(encoding="utf-8")] * 2, 700)
        tokenizer.save_pretrained(folder)
        config["eos_token_id"] = tokenizer.eos_token_id
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def next_token(token: Any, vocab: int) -> Any:
    """The rule of a chain: a cycle through all tokens, of 1,024 as of 128,256."""
    return (2005 * token + 77777) % vocab


def fill_weights(model: Any, is_chain: bool) -> None:
    """Draw the weights, the same in each engine.

    By default an answer depends on all tokens before it. In a chain the next token is `next_token` of the last:
    attention and MLP compute as much but add next to nothing, and the answers are known and far from ties.
    """
    import torch

    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    embedding, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    generator = torch.Generator(device=head.device).manual_seed(0)
    for name, weight in parameters.items():
        if "norm" in name:
            weight.fill_(1.0)
            continue
        is_quiet = is_chain and ("o_proj" in name or "down_proj" in name)
        scale = 0.02 if is_quiet else 3.0 if weight is head else 1.0
        weight.normal_(0, 1, generator=generator)
        if weight is not embedding:
            weight.mul_(scale / weight.shape[-1] ** 0.5)
    if is_chain:
        ids = torch.arange(model.config.vocab_size, device=head.device)
        head[next_token(ids, len(ids))] = embedding[: len(ids)] / head.shape[-1] ** 0.5


def make_engine(spec: Mapping[str, Any]) -> Any:
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        with torch.no_grad():
            fill_weights(model, spec["is_chain"])

    DummyModelLoader.load_weights = load_weights
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": spec["batch"],
        "max_num_batched_tokens": 8192, "enable_prefix_caching": True, "disable_log_stats": False,
        "gpu_memory_utilization": 0.05, "compilation_config": {"mode": 0}, **spec["options"],
    }  # fmt: skip
    if not options.get("enforce_eager"):
        sizes = {n * width for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256) for width in (1, K + 1)}
        sizes = {size for size in sizes if size <= min(1088, spec["batch"] * (K + 1))}
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)}
        options["compilation_config"] |= graphs
    model = write_model(Path(spec["folder"]), spec["shape"], not options["skip_tokenizer_init"])
    return LLM(model, **options)


def answer_batches(spec: Mapping[str, Any]) -> None:
    """In an engine's process: each line of stdin, a batch, gives one of stdout. All else goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_integration.wire.request import PredictedOutputParams

    llm = make_engine(spec)
    step, times = llm.llm_engine.step, []

    def timed_step() -> Any:
        found = step()
        times.append(time.perf_counter())
        return found

    llm.llm_engine.step = timed_step
    is_choice = not spec["options"].get("skip_tokenizer_init", True)
    common: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    if is_choice:
        common = {"temperature": 0, "structured_outputs": StructuredOutputsParams(choice=CHOICES)}

    def counts() -> dict[str, int]:
        return {m.name.removeprefix("vllm:"): int(m.value) for m in llm.get_metrics() if hasattr(m, "value")}

    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        params = [SamplingParams(max_tokens=batch["tokens"], **common) for _ in batch["prompts"]]
        for each, prediction in zip(params, batch["predictions"], strict=True):
            if prediction:
                each.extra_args = PredictedOutputParams(token_ids=prediction).to_extra_args()
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        if spec["options"].get("enable_sleep_mode"):
            llm.sleep(level=1)
            llm.wake_up()
        times.clear()
        before, start = counts(), time.perf_counter()
        outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
        seconds = time.perf_counter() - start
        new = {name: value - before.get(name, 0) for name, value in counts().items()}
        answers, texts = [[*output.token_ids] for output in outputs], {output.text for output in outputs}
        assert not is_choice or texts <= {*CHOICES}, f"expected choices, found {texts}"
        accepted = new.get("spec_decode_num_accepted_tokens", 0)
        row = {
            "steps": len(times), "drafts": new.get("spec_decode_num_drafts", 0), "accepted": accepted,
            "rejected": new.get("spec_decode_num_draft_tokens", 0) - accepted,
            "preemptions": new["num_preemptions"], "ms": round(seconds * 1e3, 1),
            "step_ms": round(statistics.median([b - a for a, b in itertools.pairwise(times)] or [0]) * 1e3, 3),
            "tokens_per_s": round(sum(map(len, answers)) / seconds),
        }  # fmt: skip
        print(json.dumps([answers, row]), file=replies, flush=True)


class Engines:
    """Engines by name, in the stage's process. The first batch starts all."""

    def __init__(self, modes: Mapping[str, dict[str, Any]], spec: dict[str, Any], out: Path) -> None:
        """modes: engine → its options. spec: the fields that all share, for `make_engine`."""
        self._modes, self._spec, self._out = modes, spec, out
        self._is_cpu = spec["device"] == "cpu"
        self._patience = 5 if self._is_cpu else 1
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def log(self, name: str) -> Path:
        return self._out / f"{self._spec['stage']}_{name.replace(' ', '_')}.log"

    def ask(
        self, name: str, prompts: list[Tokens], predictions: Sequence[Tokens | None], tokens: int
    ) -> tuple[list[Tokens], Row]:
        """Answers and measurements of a batch. Raises AssertionError if the engine has ended."""
        if not self._processes:
            self._processes = {each: self._start(each) for each in self._modes}
            end = time.monotonic() + 160 * self._patience
            for each in self._modes:
                with suppress(AssertionError):  # the rows of that engine raise it again
                    self._read(each, end - time.monotonic())
        with suppress(BrokenPipeError):
            batch = {"prompts": prompts, "predictions": predictions, "tokens": tokens}
            print(json.dumps(batch), file=self._processes[name].stdin, flush=True)
        answers, row = json.loads(self._read(name, 60 * self._patience))
        return answers, row

    def close(self) -> None:
        """End the engines, so that their memory is free."""
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def _start(self, name: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "GPU_ALIGN_STRICT": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1" if self._is_cpu else "4",
            "VLLM_PLUGINS": "" if name in NO_PLUGIN else "gpu_align", "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_USE_V2_MODEL_RUNNER": "0" if self._is_cpu or name.startswith("V1") else "1",
            **({"VLLM_GPU_SYNC_CHECK": "error"} if name == "sync check" else {}),
            **({"TRITON_INTERPRET": "0", "TORCH_COMPILE_DISABLE": "1"} if self._is_cpu else {}),
        }  # fmt: skip
        drafter = NGRAM if name == "ngram" else None if name in NO_PLUGIN else PLUGIN
        options = {"speculative_config": drafter, **self._spec["options"], **self._modes[name]}
        spec = {**self._spec, "options": options, "folder": str(self._out / f"model {name}")}
        command = [sys.executable, "-m", "benchmarks.gpu.serve", json.dumps(spec)]
        with self.log(name).open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def _read(self, name: str, seconds: float) -> str:
        process = self._processes[name]
        assert process.stdout is not None
        timer = threading.Timer(max(seconds, 1), process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            tail = self.log(name).read_text(encoding="utf-8", errors="replace")[-1500:]
            raise AssertionError(f"{name}: the engine ended with exit code {process.wait()}: {tail}")
        return line


def best_of(ask: Callable[[], tuple[list[Tokens], Row]], expected: list[Tokens]) -> Row:
    """The row of the faster of two runs. The answers of both are compared."""
    runs = [ask(), ask()]
    equal = min(sum(a == b for a, b in zip(answers, expected, strict=True)) for answers, _ in runs)
    best = min((row for _, row in runs), key=lambda row: float(row["ms"]))
    row = {"equal": equal, "of": len(expected), "runs": len(runs), **best}
    assert equal == len(expected), f"expected equal answers, found {row}"
    return row


def rows(device: str, is_dry: bool, out: Path) -> Rows:
    """Each engine with no prediction, and with exact ones, edited ones, and half of the requests with one."""
    options = {"dtype": "float32", "kv_cache_memory_bytes": 2**28}
    options |= {"enforce_eager": True} if device == "cpu" else {"attention_backend": "TRITON_ATTN"}
    spec = {"stage": "serve", "device": device, "shape": "tiny", "is_chain": False, "batch": BATCH}
    modes = {mode: more for mode, more in MODES.items() if mode in DRY_MODES or not is_dry}
    engines = Engines(modes, {**spec, "options": options}, out)
    answers: dict[str, list[Tokens]] = {}
    for mode in modes:
        for case in ["no prediction", *([] if mode in NO_PLUGIN else ["exact", "edited", "half"])]:
            yield f"{mode}: {case}", partial(compare, engines, mode, case, answers)
    if device == "cuda":
        yield "graphs: compiled while serving", partial(compiled_late, engines.log("graphs"))


def compare(engines: Engines, mode: str, case: str, answers: dict[str, list[Tokens]]) -> Row:
    """One row. answers: kept from row to row; of `plain`, and of `choices` with no prediction."""
    vocab, none = SHAPES["tiny"][-1], [None] * BATCH
    # All begin alike, with what the prefix cache may hold.
    prompts = [[5 + (i * i + 7 * n * (i >= 20)) % (vocab - 10) for i in range(60 + n)] for n in range(BATCH)]
    source = "choices" if mode == "choices" else "plain"
    if source not in answers:
        answers[source], _ = engines.ask(source, prompts, none, OUTPUT)
    expected = answers[source]
    edited = [[t if i % 20 else (t + 1) % vocab for i, t in enumerate(answer, 1)] for answer in expected]
    half = [answer if n % 2 else None for n, answer in enumerate(expected)]
    cases: dict[str, Sequence[Tokens | None]]
    cases = {"no prediction": none, "exact": expected, "edited": edited, "half": half}
    row = best_of(lambda: engines.ask(mode, prompts, cases[case], OUTPUT), expected)
    assert case == "no prediction" or row["accepted"], f"expected accepted drafts, found {row}"
    assert mode != "preempted" or row["preemptions"], f"expected preempted requests, found {row}"
    return row


def compiled_late(log: Path) -> Row:
    """The kernels that vLLM saw compiled while it served; ours are compiled before."""
    text = log.read_text(encoding="utf-8", errors="replace")
    assert "JIT monitor activated" in text, "expected vLLM's JIT monitor in the log, found none"
    found = {*re.findall(r"compilation during inference: (\w+)", text)}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpu_align").rglob("*.py"))
    late = found & {*re.findall(r"def (\w+_kernel)\(", sources)}
    assert not late, f"expected none of our kernels, found {sorted(late)}"
    return {"kernels": sorted(found)}


#: Engine → case → text in the prompt, as in a request to edit it, and text of the prediction.
TIMED = {
    "none": {"no drafts": ("edited", "")},
    "plugin": {
        "no prediction": ("edited", ""), "exact": ("edited", "exact"), "edited": ("edited", "edited"),
        "half edited": ("edited", "half"), "unrelated": ("edited", "unrelated"),
    },
    "adaptive": {
        "no prediction": ("edited", ""), "edited": ("edited", "edited"), "half edited": ("edited", "half"),
    },
    "ngram": {"edited text in the prompt": ("edited", ""), "exact text in the prompt": ("exact", "")},
}  # fmt: skip
#: Engines that share the device's memory; the next group starts when they have ended.
GROUPS: tuple[tuple[str, ...], ...] = ("none", "plugin"), ("adaptive", "ngram")


def throughput_rows(device: str, is_dry: bool, out: Path) -> Rows:
    """Batches with the plugin, with vLLM's n-grams, and with neither: 320 tokens of prompt, 256 of answer."""
    import torch

    shape, prompt, tokens, groups = "tiny", 60, 48, GROUPS
    batches: tuple[int, ...] = (1, 2)
    if is_dry:  # adaptive verification needs CUDA graphs
        groups = (GROUPS[0], ("ngram",))
    else:
        shape = "8b" if torch.cuda.get_device_properties(0).total_memory > 100e9 else "1b"
        prompt, tokens, batches = 320, 256, (64, 1, 256, 16)
    *_, layers, _, heads, head_dim, vocab = SHAPES[shape]
    per_token = 2 * 2 * layers * heads * head_dim
    most = max(batches)
    options: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": device == "cpu"}
    options["kv_cache_memory_bytes"] = 2**28 + int(per_token * most * (prompt + tokens + 48) * 1.05)
    spec = {"stage": "throughput", "device": device, "shape": shape, "is_chain": True, "batch": most}
    rng = random.Random(1)
    ends = [rng.randrange(10, vocab) for _ in range(most)]
    fillers = [[rng.randrange(10, vocab) for _ in range(prompt - tokens - 1)] for _ in range(most)]
    texts: dict[str, list[Tokens | None]] = {"": [None] * most, "exact": [], "edited": [], "unrelated": []}
    for end in ends:
        _, *answer = itertools.accumulate(range(tokens), lambda t, _: next_token(t, vocab), initial=end)
        texts["exact"].append(answer)
        texts["edited"].append([t if i % 40 else rng.randrange(10, vocab) for i, t in enumerate(answer, 1)])
        texts["unrelated"].append([rng.randrange(10, vocab) for _ in answer])
    texts["half"] = [None if n % 2 else text for n, text in enumerate(texts["edited"])]

    def measure(engines: Engines, name: str, batch: int, inside: str, predicted: str) -> Row:
        known = zip(fillers, texts[inside], ends, strict=True)
        prompts = [[*filler, *(text or ()), end] for filler, text, end in known][:batch]
        predictions, expected = texts[predicted][:batch], [text or [] for text in texts["exact"][:batch]]
        # Prompts into the prefix cache; kernels of this size compiled.
        engines.ask(name, prompts, [p and p[:40] for p in predictions], min(24, tokens))
        row = best_of(lambda: engines.ask(name, prompts, predictions, tokens), expected)
        return {"shape": shape, "batch": batch, **row}

    for group in groups:
        modes = {name: MODES.get(name, {}) for name in group}
        engines = Engines(modes, {**spec, "options": options}, out)
        for batch in batches:
            for name in group:
                for case, (inside, predicted) in TIMED[name].items():
                    run = partial(measure, engines, name, batch, inside, predicted)
                    yield f"batch {batch}: {name}, {case}", run
        engines.close()


if __name__ == "__main__":
    answer_batches(json.loads(sys.argv[1]))
