"""Real edits through vLLM: a model of random weights writes the records of the corpus.

`hook` gives each row of a step's logits one that no other reaches, that of the token which the row's record has
next. Prefill, scheduler, graphs, verification and sampling are vLLM's own. A row after a wrong draft gets one as
well, and is discarded with it.

A closed batch begins together, with its prompts in the prefix cache. Requests that arrive at random have new ones.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

import numpy as np

from benchmarks.gpu.serve import LLAMA, NGRAM, PLUGIN, TINY, Engines, Row, Rows, Tokens, counts, write_model
from benchmarks.tables import ROOT

#: ``python -m benchmarks.corpus CORPUS``, on a machine with a network.
CORPUS = Path(".cache/corpus.jsonl.gz")
#: Stage → seconds, of which the last are for the row that runs; those that engines need to start.
SECONDS, LAST, START_SECONDS = {"dense": 280, "experts": 320}, 20, 60
K = 32
#: Tokens of a request: its output; its old text, and of that before the first change; its prompt before that text.
OUTPUT, TEXT, LEAD, HEAD = 256, 384, 32, 12
#: Tokens of the KV cache that it takes at most, with drafts and a block.
ROOM = HEAD + TEXT + 1 + OUTPUT + K + 16
#: A prompt's own tokens are below this id, and of a dry run's no others.
OWN = 6
#: Zeros before and after all outputs: more than a request has positions.
GAP = LLAMA["max_position_embeddings"]
#: The most valuable first. 0: requests arrive at random.
BATCHES = (64, 256, 0, 1, 16)
#: Requests one after another, of other records each, where a batch is one.
TURNS = 4
#: Requests a second, and how many: about 64 at a time without drafts on an H200.
ARRIVALS = {"dense": (32.0, 256), "experts": (16.0, 160)}
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
#: Config.json's fields: Llama 3.1 8B with Tekken's vocabulary, and Qwen3-30B-A3B; and tiny ones.
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
    },
    "experts": {
        **LLAMA, **_MOE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "tiny dense": {**LLAMA, **TINY},
    "tiny experts": {
        **LLAMA, **_MOE, **TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
}  # fmt: skip
#: Of a request's `extra_args`: see `hook`.
START = "edits_start"
#: Engine → its `speculative_config`: all that it gets besides vLLM's defaults.
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None, "plugin": PLUGIN, "ngram": NGRAM, "adaptive": {**PLUGIN, "enable_adaptive_verification": True},
}  # fmt: skip
#: Engine → cases. half: every second request has a prediction. useless: prompt and prediction are another file.
#: arrivals: at random, half of them with a prediction.
CASES: dict[str, tuple[str, ...]] = {
    "none": ("none", "arrivals"),
    "plugin": ("edits", "half", "useless", "none", "arrivals"),
    "ngram": ("edits", "useless", "arrivals"),
    "adaptive": ("edits", "half", "useless", "arrivals"),
}


# In an engine's process.


def answer(spec: Mapping[str, Any]) -> None:
    """Each line of stdin, the requests of a batch, gives one of stdout: tokens and times of each, and counts."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if spec["device"] == "cpu":
        from tests import fast_interpreter
        from tests.vllm import engine_process

        if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
            engine_process.pretend_triton_has_a_cpu_backend()
            fast_interpreter.speed_up()
        engine_process.fork_workers()
        engine_process.draft_by_the_reference()
        engine_process.tokens_are_free()  # so that every draft is verified, as by the simulator
    import vllm  # noqa: F401  # while other engines are busy

    sys.stdin.readline()
    asyncio.run(_serve(spec, replies))


async def _serve(spec: Mapping[str, Any], replies: Any) -> None:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {
        "model": write_model(Path(spec["folder"]), spec["config"]), "load_format": "dummy",
        "skip_tokenizer_init": True, "worker_extension_cls": "benchmarks.gpu.hook.Hook",
        **spec["options"],
    }  # fmt: skip
    context = UsageContext.OPENAI_API_SERVER  # for its defaults
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options), usage_context=context)
    print("{}", file=replies, flush=True)
    numbers = itertools.count()
    while line := await asyncio.to_thread(sys.stdin.readline):
        requests, before = json.loads(line)["requests"], counts()
        begin = time.perf_counter()
        found = await asyncio.gather(*(_ask(engine, begin, next(numbers), each) for each in requests))
        await asyncio.sleep(0.05)  # the last step's counts
        print(json.dumps([found, counts(before)]), file=replies, flush=True)


async def _ask(
    engine: Any, begin: float, number: int, request: Mapping[str, Any]
) -> tuple[Tokens, list[float]]:
    """The answer, and seconds since `begin`: of its arrival, of its first token, of its last."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_integration.wire.request import PredictedOutputParams

    if request["at"]:
        await asyncio.sleep(begin + request["at"] - time.perf_counter())
    extra = {START: request["start"]}
    if request["prediction"]:
        extra |= PredictedOutputParams(token_ids=request["prediction"]).to_extra_args()
    params = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=request["tokens"], extra_args=extra,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    tokens, times = [], [time.perf_counter() - begin]
    async for output in engine.generate({"prompt_token_ids": request["prompt"]}, params, str(number)):
        tokens += output.outputs[0].token_ids
        times.append(time.perf_counter() - begin)
    return tokens, [times[0], times[1], times[-1]]


# In the stage's process.


class Window(NamedTuple):
    """A part of a record around its first or last change. at: of `output` in `_outputs`."""

    package: str
    text: Tokens
    output: Tokens
    at: int = 0


def windows_of(package: str, old: Tokens, new: Tokens, num_text: int, num_output: int) -> Iterator[Window]:
    """At most two. The output begins `LEAD` tokens before the first change, or ends so many after the last."""
    for turn in (1, -1):
        before, after = old[::turn], new[::turn]
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        begin = max(0, min(same - LEAD, len(after) - num_output))
        text, output = before[begin : begin + num_text], after[begin : begin + num_output]
        if len(output) == num_output and len(text) >= num_output // 4:
            yield Window(package, text[::turn], output[::turn])


class Records:
    """Windows of records, and requests for them. outputs: all outputs one after another, between zeros."""

    def __init__(self, windows: Sequence[Window]) -> None:
        offsets = itertools.accumulate((len(window.output) for window in windows), initial=GAP)
        self.windows = [window._replace(at=at) for window, at in zip(windows, offsets, strict=False)]
        texts = [t for window in windows for t in window.output]
        self.outputs = np.pad(np.array(texts, np.int64), GAP)

    @classmethod
    def of_corpus(cls) -> Records:
        with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
            entries = [json.loads(line) for line in lines]
        texts = [[entry[field] for field in ("package", "prediction", "output")] for entry in entries]
        windows = [window for text in texts for window in windows_of(*text, TEXT, OUTPUT)]
        random.Random(0).shuffle(windows)
        return cls(windows)

    @classmethod
    def of_bench(cls) -> Records:
        """A dry run's: the edits of ``gpu-align bench``, in a tiny model's vocabulary."""
        from gpu_align.tools.simulate.replay import read_records

        edits = read_records(ROOT / "gpu_align" / "tools" / "bench" / "pairs.jsonl", "tekken")
        names: dict[int, int] = {}
        windows = []
        for edit in edits[:4]:
            old, new = (
                [names.setdefault(token, len(names) + OWN) for token in text]
                for text in (edit.prediction, edit.output)
            )
            windows += windows_of(edit.id, old, new, 120, 80)
        assert len(names) + OWN <= TINY["vocab_size"]
        return cls(windows)

    def requests(self, case: str, first: int, size: int, salt: int = 0) -> list[dict[str, Any]]:
        """So many requests, from a window on. Their prompts have no beginning in common, and with another salt
        none with earlier ones."""
        return [self._request(case, number, salt) for number in range(first, first + size)]

    def _request(self, case: str, number: int, salt: int) -> dict[str, Any]:
        windows = self.windows
        window, draw = windows[number % len(windows)], random.Random(f"{salt} {number}")
        text = window.text
        if case == "useless":
            others = (windows[(number + i) % len(windows)] for i in range(1, len(windows)))
            text = next(other.text for other in others if other.package != window.package)
        prompt = [*(draw.randrange(OWN) for _ in range(HEAD)), *text, 0]
        has_prediction = case in ("edits", "useless") or (case == "half" and number % 2 == 0)
        return {
            "prompt": prompt, "prediction": text if has_prediction else None, "at": 0.0,
            "start": window.at - len(prompt) + 1, "tokens": len(window.output), "expected": window.output,
        }  # fmt: skip


def ask(engines: Engines, name: str, requests: Sequence[dict[str, Any]]) -> tuple[list[list[float]], Row]:
    """Times of the requests, and counts. Raises AssertionError if an answer is not the record's."""
    found, row = engines.ask(name, {"requests": [{**each, "expected": None} for each in requests]})
    equal = sum(tokens == each["expected"] for (tokens, _), each in zip(found, requests, strict=True))
    assert equal == len(requests), f"expected {len(requests)} answers as the records, found {equal}: {row}"
    return [times for _, times in found], row


def summary(requests: Sequence[dict[str, Any]], times: Sequence[Sequence[float]]) -> Row:
    """Milliseconds: medians of the time to the first token, means of a later one, of either group."""
    row: Row = {}
    for group in ("edits", "others"):
        pairs = zip(requests, times, strict=True)
        of_group = [t for r, t in pairs if bool(r["prediction"]) == (group == "edits")]
        if of_group:
            row[f"first_ms, {group}"] = round(statistics.median(t[1] - t[0] for t in of_group) * 1e3, 1)
            each = (t[2] - t[1] for t in of_group)
            row[f"token_ms, {group}"] = round(statistics.fmean(each) / (requests[0]["tokens"] - 1) * 1e3, 3)
    return row


def closed(engines: Engines, records: Records, name: str, batch: int, case: str) -> Row:
    """Batches that begin together, one after the other."""
    turns = [records.requests(case, turn * batch, batch) for turn in range(TURNS if batch == 1 else 1)]
    for requests in turns:  # prompts into the prefix cache; kernels of this size compiled
        short = min(24, requests[0]["tokens"])
        ask(engines, name, [{**r, "tokens": short, "expected": r["expected"][:short]} for r in requests])
    found = [ask(engines, name, requests) for requests in turns]
    requests, times = [r for turn in turns for r in turn], [t for turn, _ in found for t in turn]
    seconds = sum(max(t[2] for t in turn) for turn, _ in found)
    total = {key: sum(row[key] for _, row in found) for key in found[0][1]}
    tokens = sum(r["tokens"] for r in requests)
    return {
        "batch": batch, "turns": len(turns), "equal": len(requests), **total, "ms": round(seconds * 1e3, 1),
        "tokens_per_s": round(tokens / seconds), **summary(requests, times),
    }  # fmt: skip


def arrivals(engines: Engines, records: Records, name: str, rate: float, number: int) -> Row:
    """Requests at random times, the same for each engine: every second one is an edit with its prediction."""
    draw, at = random.Random(1), 0.0
    requests = records.requests("half", 0, number, salt=1)
    for request in requests:
        request["at"] = at = at + draw.expovariate(rate)
    times, row = ask(engines, name, requests)
    together = sum(t[2] - t[0] for t in times) / max(t[2] for t in times)
    row |= {"rate": rate, "requests": number, "at_a_time": round(together, 1)}
    return row | summary(requests, times)


def simulated(engines: Engines, records: Records, number: int) -> Row:
    """The accepted drafts of one record, beside those of `gpu_align.tools.simulate.replay`.

    A step gives a token more than it accepts. The simulator also counts a draft of the very last token as
    accepted; vLLM verifies none there.
    """
    from gpu_align.predictors import PredictedOutputTokenPredictor
    from gpu_align.tools.simulate.replay import Record, replay

    [request] = records.requests("edits", number, 1)
    _, row = ask(engines, "plugin", [request])
    record = Record(str(number), request["prompt"], request["prediction"], request["expected"])
    sizes = {"max_context_len": DRY_LEN, "max_prediction_len": DRY_LEN, "vocab_size": TINY["vocab_size"]}
    steps = replay(PredictedOutputTokenPredictor(**sizes), record, DRY_K).steps
    row |= {"simulated": request["tokens"] - steps}
    assert row["accepted"] == row["simulated"] > 0, f"expected as many accepted as simulated, found {row}"
    return row


def bytes_of(config: Mapping[str, Any], requests: int) -> tuple[float, float]:
    """In bf16: of all but the layers, and of a layer with the KV cache of so many requests."""
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, pairs = config["num_attention_heads"] * head, 2 * config["num_key_value_heads"] * head
    mlp = 3 * hidden * config["intermediate_size"]
    if experts := config.get("num_experts"):
        mlp = experts * hidden * (3 * config["moe_intermediate_size"] + 1)
    return 2.0 * 2 * vocab * hidden, 2.0 * (hidden * (2 * queries + pairs) + mlp + pairs * requests * ROOM)


def fitting(config: Mapping[str, Any], memory: float) -> tuple[int, int]:
    """How many of the model's layers fit on a GPU, and how many such engines at a time.

    An engine's activations, graphs and context take some 9 GB: of 256 requests with 16 drafts each the logits of
    bf16 and float32 are 3.9.
    """
    rest, layer = bytes_of(config, max(BATCHES))
    room, rest = 0.92 * memory, rest + 9e9
    layers = min(config["num_hidden_layers"], int((room - rest) / layer))
    return layers, int(room / (rest + layers * layer))


def rows(stage: str, device: str, is_dry: bool, out: Path) -> Rows:
    """The rows of a model. Engines that fit together start together, the next ones when they have ended."""
    if is_dry:
        for runner, cases in DRY[stage].items():
            yield from _dry_rows(stage, runner, cases, out)
        return
    if not CORPUS.exists():
        missing = f"missing: {CORPUS}; python -m benchmarks.corpus {CORPUS} makes it"
        yield "the records", partial(_skip, missing)
        return
    import torch

    seconds, records = float(os.environ["GPU_STAGE_SECONDS"]), Records.of_corpus()
    end, too_late = time.monotonic() + seconds - LAST, f"no time left of the stage's {seconds:.0f} seconds"
    layers, together = fitting(SHAPES[stage], torch.cuda.get_device_properties(0).total_memory)
    config = {**SHAPES[stage], "num_hidden_layers": layers}
    per_token = 2 * 2 * layers * config["num_key_value_heads"] * config["head_dim"]
    # vLLM's share of the memory would leave none for another engine.
    options = {"kv_cache_memory_bytes": max(BATCHES) * ROOM * per_token, "gpu_memory_utilization": 0.05}
    engines = _engines(stage, "", config, options, [*DRAFTERS], records, out)
    about = {"layers": layers, "of": SHAPES[stage]["num_hidden_layers"]}

    def timed(run: Callable[[], Row]) -> Row:
        return {**about, **run()} if time.monotonic() < end else _skip(too_late)

    names = [*DRAFTERS]
    for group in (names[i : i + together] for i in range(0, len(names), together)):
        if time.monotonic() > end - START_SECONDS:
            yield f"engines: {', '.join(group)}", partial(_skip, too_late)
            continue
        cases = {name: CASES[name] for name in group}
        for name, run in _rows_of(engines, records, cases, BATCHES, *ARRIVALS[stage]):
            yield name, partial(timed, run)
        engines.close(group)


#: A dry run's stage → runner → engines and their cases.
DRY: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "dense": {"V1": {name: CASES[name] for name in ("none", "plugin")}, "V2": {"plugin": ("half",)}},
    "experts": {"V1": {"plugin": ("half",)}, "V2": {"plugin": ("half",)}},
}
DRY_K, DRY_LEN, DRY_BATCHES, DRY_ARRIVALS = 8, 512, (2, 0), (2.0, 3)
#: Records whose accepted drafts are compared.
DRY_RECORDS = {"V1": 5, "V2": 2}


def _dry_rows(stage: str, runner: str, cases: Mapping[str, Sequence[str]], out: Path) -> Rows:
    """The same without a GPU, tiny, and the accepted drafts beside simulated ones. vLLM's V2 is interpreted."""
    records = Records.of_bench()
    is_v2 = runner == "V2"
    environment = {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(is_v2)), "TRITON_INTERPRET": str(int(is_v2)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    options = {
        "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_model_len": DRY_LEN,
        "kv_cache_memory_bytes": 2**28,
    }  # fmt: skip
    config, names = SHAPES[f"tiny {stage}"], [*cases]
    engines = _engines(stage, runner, config, options, names, records, out, environment)
    for number in range(DRY_RECORDS[runner]):
        yield f"{runner}: record {number}, simulated", partial(simulated, engines, records, number)
    for name, run in _rows_of(engines, records, cases, DRY_BATCHES, *DRY_ARRIVALS):
        yield f"{runner}: {name}", run
    engines.close()


def _skip(reason: str) -> Row:
    raise SkipTest(reason)


def _engines(
    stage: str, runner: str, config: Row, options: Row, names: Sequence[str], records: Records, out: Path,
    environment: Mapping[str, str] | None = None,
) -> Engines:  # fmt: skip
    outputs = out / f"{stage}{runner}.npy"
    np.save(outputs, records.outputs)
    device, k = ("cpu", DRY_K) if runner else ("cuda", K)
    modes: dict[str, Row] = {}
    for name in names:
        drafter = DRAFTERS[name]
        if drafter is not None and drafter is not NGRAM:
            drafter = {**drafter, "num_speculative_tokens": k}
        modes[name] = {"speculative_config": drafter}
    spec = {
        "stage": f"{stage}{runner}", "device": device, "config": config, "options": options,
        "environment": {"EDITS_OUTPUTS": str(outputs), **(environment or {})},
    }  # fmt: skip
    return Engines(modes, spec, out, "edits")


def _rows_of(
    engines: Engines, records: Records, cases: Mapping[str, Sequence[str]], batches: Sequence[int],
    rate: float, number: int,
) -> Rows:  # fmt: skip
    def start() -> Row:
        begin = time.monotonic()
        engines.start(cases)
        return {"start_s": round(time.monotonic() - begin, 1)}

    def started(name: str, measure: Callable[..., Row], *args: Any) -> Row:
        with suppress(AssertionError):  # a stage that is started again skips the row of the start
            engines.start(cases)
        drafter = engines.modes[name]["speculative_config"] or {}
        return {"K": drafter.get("num_speculative_tokens", 0), **measure(engines, records, name, *args)}

    yield f"start: {', '.join(cases)}", start
    for batch, name in itertools.product(batches, cases):
        for case in cases[name]:
            if batch == 0 and case == "arrivals":
                yield f"arrivals: {name}, half", partial(started, name, arrivals, rate, number)
            elif batch and case != "arrivals" and (batch > 1 or case != "half"):
                yield f"batch {batch}: {name}, {case}", partial(started, name, closed, batch, case)


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
