"""vLLM with the plugin and without, on a model of random weights that needs no checkpoint and no tokenizer.

An engine is a process of its own, ``python -m benchmarks.gpu.serve SPEC``: it answers batches of token ids.
Engines answer one at a time; one that takes too long is ended, with its rows. `rows` compares greedy answers in
float32 with those of vLLM by itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables import ROOT

Tokens = list[int]
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
K = 16
#: A Llama's config.json; `TINY` is one that a CPU runs, too.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
}  # fmt: skip
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
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
NO_PLUGIN = ("plain", "V1 plain", "ngram", "none")
DRY_MODES = ("plain", "preempted", "choices", "ngram")
CHOICES = ['{"answer": "yes"}', '{"answer": "no"}']
BATCH, OUTPUT = 8, 64


def write_model(folder: Path, config: dict[str, Any], has_tokenizer: bool = False) -> str:
    """The folder of a model without weights, with the demo's tokenizer of bytes if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_tokenizer:
        from vllm_integration.demo import model

        tokenizer = model.train_tokenizer([Path(model.__file__).read_text(encoding="utf-8")] * 2, 700)
        tokenizer.save_pretrained(folder)
        config = {**config, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def fill_weights(self: Any, model: Any, model_config: Any) -> None:
    """`DummyModelLoader.load_weights`: the same weights in each engine. An answer depends on all tokens before it,
    and so do the experts of a token."""
    import torch

    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    embedding, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    generator = torch.Generator(device=head.device).manual_seed(0)
    for name, weight in parameters.items():
        if "norm" in name:
            weight.fill_(1.0)
            continue
        weight.normal_(0, 1, generator=generator)
        if weight is not embedding:
            weight.mul_((3.0 if weight is head else 1.0) / weight.shape[-1] ** 0.5)


def make_engine(spec: Mapping[str, Any]) -> Any:
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = fill_weights
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": BATCH,
        "max_num_batched_tokens": 8192, "enable_prefix_caching": True, "disable_log_stats": False,
        "gpu_memory_utilization": 0.05, "compilation_config": {"mode": 0}, **spec["options"],
    }  # fmt: skip
    if not options.get("enforce_eager"):
        sizes = {n * width for n in (1, 2, 4, 8) for width in (1, K + 1)}
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)}
        options["compilation_config"] |= graphs
    has_tokenizer = not options["skip_tokenizer_init"]
    model = write_model(Path(spec["folder"]), {**LLAMA, **TINY}, has_tokenizer)
    return LLM(model, **options)


def answer_batches(spec: Mapping[str, Any]) -> None:
    """In an engine's process: each line of stdin, a batch, gives one of stdout. All else goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_integration.wire.request import PredictedOutputParams

    sys.stdin.readline()
    llm = make_engine(spec)
    is_choice = not spec["options"].get("skip_tokenizer_init", True)
    common: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    if is_choice:
        common = {"temperature": 0, "structured_outputs": StructuredOutputsParams(choice=CHOICES)}
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
        before = counts()
        outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
        answers, texts = [[*output.token_ids] for output in outputs], {output.text for output in outputs}
        assert not is_choice or texts <= {*CHOICES}, f"expected choices, found {texts}"
        print(json.dumps([answers, counts(before)]), file=replies, flush=True)


def counts(before: Row | None = None) -> Row:
    """vLLM's counters in this process; with `before` those since then."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found: Row = {"steps": 0, "drafts": 0, "accepted": 0, "draft_tokens": 0, "preemptions": 0}
    for metric in get_metrics_snapshot():
        name = metric.name.removeprefix("vllm:spec_decode_num_").removeprefix("vllm:num_")
        name = {"accepted_tokens": "accepted", "vllm:iteration_tokens_total": "steps"}.get(name, name)
        if name in found:
            found[name] += int(getattr(metric, "count", getattr(metric, "value", 0)))
    if before is None:
        return found
    new = {name: value - before[name] for name, value in found.items()}
    new["rejected"] = new.pop("draft_tokens") - new["accepted"]
    return new


class Engines:
    """Engines by name, in the stage's process. The first batch starts them all, if `start` has started none."""

    def __init__(
        self, modes: Mapping[str, dict[str, Any]], spec: dict[str, Any], out: Path, program: str = "serve"
    ) -> None:
        """modes: engine → its options. spec: the fields that all share, for `make_engine`. program: their
        module in this folder."""
        self.modes, self._spec, self._out, self._program = modes, spec, out, program
        self._is_cpu = spec["device"] == "cpu"
        self._patience = 5 if self._is_cpu else 1
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._started: set[str] = set()

    def log(self, name: str) -> Path:
        return self._out / f"{self._spec['stage']}_{name.replace(' ', '_')}.log"

    def start(self, names: Iterable[str]) -> None:
        """Start those of these engines that have not been. Raises AssertionError if one does not start."""
        for name in self.modes:
            if name not in self._processes:  # the others import vLLM meanwhile, and wait
                self._processes[name] = self._spawn(name)
        new = [name for name in names if name not in self._started]
        self._started.update(new)
        for name in new:
            self._say(name, {})
        end = time.monotonic() + 220 * self._patience  # vLLM compiles
        failed = []
        for name in new:
            try:
                self._read(name, end - time.monotonic())
            except AssertionError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def ask(self, name: str, batch: Mapping[str, Any]) -> tuple[list[Any], Row]:
        """Answers to a batch, and its row. Raises AssertionError if the engine has ended."""
        if not self._started:
            with suppress(AssertionError):  # the rows of an engine that has ended raise it again
                self.start(self.modes)
        self._say(name, batch)
        answers, row = json.loads(self._read(name, 60 * self._patience))
        return answers, row

    def close(self, names: Iterable[str] | None = None) -> None:
        """End engines, so that their memory is free."""
        for name in self._processes if names is None else names:
            if name in self._processes:
                _end(self._processes[name])

    def _spawn(self, name: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "GPU_ALIGN_STRICT": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1" if self._is_cpu else "4", "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_PLUGINS": "" if name in NO_PLUGIN else "gpu_align",
            **(IN_PROCESS if self._program == "serve" else {}),
            **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if self._is_cpu or name.startswith("V1") else {}),
            **({"VLLM_GPU_SYNC_CHECK": "error"} if name == "sync check" else {}),
            **({"TRITON_INTERPRET": "0", "TORCH_COMPILE_DISABLE": "1"} if self._is_cpu else {}),
            **self._spec.get("environment", {}),
        }  # fmt: skip
        drafter = NGRAM if name == "ngram" else None if name in NO_PLUGIN else PLUGIN
        options = {"speculative_config": drafter, **self._spec["options"], **self.modes[name]}
        spec = {**self._spec, "options": options, "folder": str(self._out / f"model {name}")}
        command = [sys.executable, "-m", f"benchmarks.gpu.{self._program}", json.dumps(spec)]
        with self.log(name).open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def _say(self, name: str, batch: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(batch), file=self._processes[name].stdin, flush=True)

    def _read(self, name: str, seconds: float) -> str:
        process = self._processes[name]
        assert process.stdout is not None
        timer = threading.Timer(max(seconds, 1), _end, [process])
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            tail = self.log(name).read_text(encoding="utf-8", errors="replace")[-1500:]
            raise AssertionError(f"{name}: the engine ended with exit code {process.wait()}: {tail}")
        return line


def _end(process: subprocess.Popen[str]) -> None:
    """Kill an engine and the processes that it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


def rows(device: str, is_dry: bool, out: Path) -> Rows:
    """Each engine with no prediction, and with exact ones, edited ones, and half of the requests with one."""
    options = {"dtype": "float32", "kv_cache_memory_bytes": 2**28}
    options |= {"enforce_eager": True} if device == "cpu" else {"attention_backend": "TRITON_ATTN"}
    spec = {"stage": "serve", "device": device}
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
    vocab, none = TINY["vocab_size"], [None] * BATCH
    # All begin alike, with what the prefix cache may hold.
    prompts = [[5 + (i * i + 7 * n * (i >= 20)) % (vocab - 10) for i in range(60 + n)] for n in range(BATCH)]
    batch = {"prompts": prompts, "predictions": none, "tokens": OUTPUT}
    source = "choices" if mode == "choices" else "plain"
    if source not in answers:
        answers[source], _ = engines.ask(source, batch)
    expected = answers[source]
    edited = [[t if i % 20 else (t + 1) % vocab for i, t in enumerate(answer, 1)] for answer in expected]
    half = [answer if n % 2 else None for n, answer in enumerate(expected)]
    cases: dict[str, Sequence[Tokens | None]]
    cases = {"no prediction": none, "exact": expected, "edited": edited, "half": half}
    for _ in range(2):
        found, row = engines.ask(mode, {**batch, "predictions": cases[case]})
        row = {"equal": sum(a == b for a, b in zip(found, expected, strict=True)), "of": BATCH, **row}
        assert row["equal"] == BATCH, f"expected equal answers, found {row}"
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


if __name__ == "__main__":
    answer_batches(json.loads(sys.argv[1]))
