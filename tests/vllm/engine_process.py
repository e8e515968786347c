"""A real vLLM engine with the V2 model runner, on a machine without a GPU, in a process of its own.

V2's input preparation, sampling and rejection are Triton kernels. Under Triton's interpreter they run on the
CPU, as do ours: real scheduler, real KV cache, real rejection sampler. That has to be arranged before vLLM is
imported and for the whole process, hence this script. Importing vLLM is two thirds of an engine's start, so with
`--fork-from SOCKET` the process imports only, and makes an engine process of each message it receives: settings
and environment, with stdin, stdout and stderr. That one reads one JSON command a line and answers with one;
everything else that is printed goes to stderr. `V1` behind it leaves the interpreter out: V1's own way on the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any


def pretend_triton_has_a_cpu_backend() -> None:
    """What vLLM's check looks for; kernels are interpreted and never reach a backend."""
    from triton.backends import backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})  # called by a model's own kernels
    backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def after_the_platforms_check(change: Callable[[Any], None]) -> None:
    """What the CPU platform does to a configuration is followed by this."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        change(vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def allow_asynchronous_scheduling() -> None:
    """The CPU platform turns it off for its V1 runner; V2 on the CPU handles it as on a GPU."""
    after_the_platforms_check(lambda config: setattr(config.scheduler_config, "async_scheduling", True))


def tokens_are_free() -> None:
    """To the scheduler all steps with drafts take the same, and those without more: which drafts are verified does
    not depend on a loaded machine, and any is worth it."""
    import numpy as np

    from vllm_integration.budget.step_times import StepTimes

    def curves(self: object, requests: int) -> object:
        line = [0.0, requests, requests + 0.5, 1e9], [1e3, 1e3, 1.0, 1.0]
        return np.array([line, line])

    StepTimes.curves = curves
    StepTimes.waits_for = lambda *_, **__: False


def draft_by_the_reference() -> None:
    """Drafts are the reference's, which is compiled: the same bits in a tenth of the time. It is the interpreted
    kernels that run where an engine is asked for `kernels`; tests/gpu_align/ops compares the two."""
    from gpu_align import Drafter

    begin = Drafter.__init__
    Drafter.__init__ = lambda self, *args, **how: begin(self, *args, **{**how, "backend": "reference"})


def fork_workers() -> None:
    """The CPU platform has worker processes spawned; as on a GPU they are forked, with what is patched here. Since
    vLLM 0.33 each data-parallel rank also wants a memory node of its own, and ends without: here they share."""
    from vllm.v1.worker import cpu_worker

    visible = cpu_worker.get_visible_memory_node
    cpu_worker.get_visible_memory_node = lambda *_: visible()
    after_the_platforms_check(lambda _: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork"))


def delay_counts() -> None:
    """The copies of a step's drafts arrive no sooner than the reporter waits for them, as from the slowest GPU:
    with the next step, or, where the device trims drafts, with their own. Here they would be there at once."""
    from vllm_integration.worker.draft_reporter import StepCopies

    StepCopies.arrived = lambda self, wait: wait


def take_integers_as_masks() -> None:
    """The interpreter refuses masks that it has made integers of; compiled kernels have no such difference."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    for place, original in ((1, Builder.create_masked_load), (2, Builder.create_masked_store)):

        def masked(self: Any, *args: Any, place: int = place, original: Any = original) -> Any:
            args[place].data = args[place].data.astype(bool)
            return original(self, *args)

        setattr(Builder, original.__name__, masked)


def run_mamba_as_on_a_gpu() -> None:
    """A step of Mamba layers runs vLLM's Triton kernels: the CPU's own lose the states beside drafts, so that the
    plugin refuses them. Prefills stay the CPU's."""
    from vllm.model_executor.layers.mamba import abstract  # noqa: F401  # what it imports asks for the platform, too
    from vllm.platforms import current_platform

    from vllm_integration.config import engine_config

    engine_config.has_cpu_kernels = lambda: False
    platform = type(current_platform)
    is_cpu, platform.is_cpu = platform.is_cpu, lambda self: False
    try:
        from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssd_combined, ssu_dispatch
    finally:
        platform.is_cpu = is_cpu
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as cpu_conv1d
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm as cpu_ssm

    causal_conv1d.causal_conv1d_fn = cpu_conv1d.causal_conv1d_fn_cpu
    ssd_combined._mamba_chunk_scan_combined_fwd = cpu_ssm._mamba_chunk_scan_combined_fwd_cpu
    backends = ssu_dispatch._BACKEND_REGISTRY
    backends[ssu_dispatch.MambaBackendEnum.CPU] = backends[ssu_dispatch.MambaBackendEnum.TRITON]
    assert "cpu" not in mamba_ssm.selective_state_update.__module__


def run_gdn_as_on_a_gpu() -> None:
    """The same for gated delta net layers; prefills are transformers' recurrence."""
    run_mamba_as_on_a_gpu()
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    def prefill(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, **_: Any
    ) -> tuple[Any, Any]:
        outputs, states, ends = [], [], cu_seqlens.tolist()
        per_head = v.shape[2] // q.shape[2]
        q, k = q.repeat_interleave(per_head, dim=2), k.repeat_interleave(per_head, dim=2)
        for index, (start, end) in enumerate(pairwise(ends)):
            rows = [each[:, start:end] for each in (q, k, v, g, beta)]
            state = initial_state[index : index + 1].transpose(-1, -2)
            output, state = torch_recurrent_gated_delta_rule(*rows, state, output_final_state=True)
            outputs.append(output)
            states.append(state.transpose(-1, -2))
        return torch.cat(outputs, dim=1), torch.cat(states)

    module.fla_chunk_gated_delta_rule = prefill
    module.QwenGatedDeltaNetAttention.forward_cpu = module.QwenGatedDeltaNetAttention.forward_cuda


def stand_in_for_the_top_k_kernel() -> None:
    """By vLLM's own function for where there is no Triton: the interpreter refuses the kernel for an integer."""
    from vllm.v1.sample.ops import topk_topp_sampler as module

    def apply(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return module.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p_triton = apply


def record_drafts(directory: str) -> None:
    """Each rank writes what it drafts: one JSON line a step in `directory/rank-N`."""
    from vllm_integration.seams.install import when_imported

    def record(module: str, name: str) -> None:
        proposer = getattr(sys.modules[module], name)
        propose = proposer.propose

        def recording(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm.distributed import get_world_group

            drafts = propose(self, first, *args, **kwargs)
            batch = getattr(self, "_batch", first)  # V1 is not given it
            if batch is not None and not kwargs.get("dummy_run"):
                rows = drafts if isinstance(drafts, list) else drafts.tolist()
                with open(f"{directory}/rank-{get_world_group().rank}", "a") as file:
                    file.write(json.dumps([list(batch.req_ids), rows]) + "\n")
            return drafts

        proposer.propose = recording

    for module, name in (("speculator", "PredictedOutputsSpeculator"), ("proposer_v1", "PredictedOutputs")):
        module = f"vllm_integration.worker.{module}"
        when_imported(module, partial(record, module, name))


class Engine:
    """settings: those of `vllm.LLM`, and a few more; `before` and `after` are code to run around its start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        exec(settings.pop("before", ""))
        after = settings.pop("after", "")
        if settings.pop("asynchronous", False):
            allow_asynchronous_scheduling()
            settings["async_scheduling"] = True
        if settings.pop("delay_counts", False):
            delay_counts()
        if not settings.pop("kernels", False):
            draft_by_the_reference()
        tokens_are_free()
        from vllm import LLM

        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        executor = self.core.model_executor
        # Several ranks are processes of their own.
        self.runner = (
            executor.driver_worker.worker.model_runner if hasattr(executor, "driver_worker") else None
        )
        self.steps: list[dict[str, list[int]]] = []
        self.usage: dict[str, dict[str, Any]] = {}
        #: Request → what the engine core calls it.
        self.internal: dict[str, str] = {}
        stand_in_for_the_top_k_kernel()
        self._record_steps()
        self._record_usage()
        exec(after)

    def _record_steps(self) -> None:
        update = self.scheduler.update_from_output

        def update_from_output(scheduler_output: Any, output: Any) -> Any:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            step: dict[str, list[int]] = {}
            for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                sampled = output.sampled_token_ids[output.req_id_to_index[req_id]]
                row = [num_tokens, len(drafts.get(req_id, ())), len(sampled)]
                name = req_id.rsplit("-", 1)[0].rpartition("_")[2]  # "2_7" is the third choice of request 7
                step[name] = [a + b for a, b in zip(step.get(name, [0, 0, 0]), row, strict=True)]
            self.steps.append(step)
            return update(scheduler_output, output)

        self.scheduler.update_from_output = update_from_output

    def _record_usage(self) -> None:
        """What the front end has counted of a request when it ends."""
        from vllm_integration.frontend.usage import Collector

        end = Collector.end

        def recording(collector: Any, req_id: str, aborted: bool = False) -> None:
            if req_id in collector.requests:
                self.usage[req_id.rsplit("-", 1)[0]] = collector.requests[req_id].as_dict()
            end(collector, req_id, aborted)

        Collector.end = recording

    def facts(self) -> dict[str, Any]:
        return {
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__name__}",
            "speculator": type(getattr(self.runner, "speculator", None)).__name__,
            "scheduler": type(self.scheduler).__name__,
        }

    def seams(self) -> dict[str, bool]:
        """Whether each group is installed."""
        from vllm_integration.seams.install import is_installed
        from vllm_integration.seams.table import GROUPS

        return {group: is_installed(group) for group in GROUPS}

    def execute(self, code: str) -> Any:
        """Run code that knows this engine as `engine`; what it calls `found`."""
        names: dict[str, Any] = {"engine": self}
        exec(code, names)
        return names.get("found")

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve requests to their ends; each arrives before step `arrives`, is aborted before step `aborted`, or,
        with [phase, n], before the n-th step that finds it in that phase."""
        self.steps, self.usage, self.internal = [], {}, {}
        preemptions = self.preemptions()
        answers: list[dict[str, Any]] = [{"token_ids": [], "end": "aborted"} for _ in requests]
        step = 0
        while step <= max(r["arrives"] for r in requests) or self.engine.has_unfinished_requests():
            for index, request in enumerate(requests):
                if request["arrives"] == step:
                    self._add(str(index), request)
                if request["aborted"] == step:
                    self.engine.abort_request([str(index)])
                if isinstance(request["aborted"], list):
                    self._abort_in_phase(str(index), request["aborted"], answers[index])
            for output in self.engine.step():
                self._take(answers[int(output.request_id)], output)
            step += 1
        while self.scheduler.has_requests():  # let the worker hear which requests have finished
            self.core.step_fn()
        for index, answer in enumerate(answers):
            answer["usage"] = self.usage.get(str(index))
        return {"answers": answers, "steps": self.steps, "preemptions": self.preemptions() - preemptions}

    def phase(self, request_id: str, answer: dict[str, Any]) -> str:
        """Where a request is between two steps: waiting, prefill (some of its chunks are done), first (its last
        chunk runs), drafts (verified in the next step), decode, preempted, finished, or unknown."""
        request = self.scheduler.requests.get(self.internal.get(request_id, ""))
        if request is None:
            return "unknown" if answer["end"] == "aborted" else "finished"
        status = request.status.name
        if status in ("WAITING", "PREEMPTED"):
            return str(status.lower())
        if request.num_computed_tokens < request.num_prompt_tokens:
            return "prefill"
        if not request.num_output_tokens:
            return "first"
        return "drafts" if request.spec_token_ids else "decode"

    def _abort_in_phase(self, request_id: str, wanted: list[Any], answer: dict[str, Any]) -> None:
        """Abort it there, and once more in the engine core, beside a request that nobody knows: an abort may cross
        another one, or the end of its request."""
        if "aborted_in" in answer or self.phase(request_id, answer) != wanted[0]:
            return
        wanted[1] -= 1
        if not wanted[1]:
            answer["aborted_in"] = wanted[0]
            self.engine.abort_request([request_id])
            self.engine.engine_core.abort_requests([self.internal[request_id], "nobody"])

    def _add(self, request_id: str, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        from vllm_integration.wire.request import PredictedOutputParams

        extra: dict[str, Any] = {}
        if request.get("prediction") is not None:
            extra = PredictedOutputParams(token_ids=request["prediction"]).to_extra_args()
        given = {"temperature": 0, "ignore_eos": True, "max_tokens": request["max_tokens"]}
        given |= request.get("params", {})
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        if "logit_bias" in given:  # JSON has names only
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        params = SamplingParams(**given)
        params.extra_args = {**extra, **request.get("extra", {})} or None
        params.output_kind = RequestOutputKind.FINAL_ONLY  # with all of its choices
        prompt = {"prompt_token_ids": request["prompt"]}
        if request.get("salt") is not None:
            prompt["cache_salt"] = request["salt"]
        adapter = request.get("adapter")
        lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
        added = self.engine.add_request(request_id, prompt, params, lora_request=lora)
        self.internal[request_id] = added

    @staticmethod
    def _take(answer: dict[str, Any], output: Any) -> None:
        if output.finished:
            first = output.outputs[0]
            answer["token_ids"] = list(first.token_ids)
            answer["text"] = first.text
            answer["all"] = [list(choice.token_ids) for choice in output.outputs]
            answer["end"] = first.finish_reason
            answer["stopped_by"] = first.stop_reason
            for name, positions in (("logprobs", first.logprobs), ("prompt", output.prompt_logprobs)):
                if positions is not None:
                    answer[name] = [
                        {token: value.logprob for token, value in (position or {}).items()}
                        for position in positions
                    ]

    def preemptions(self) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def prefix_cache(self) -> dict[str, int]:
        """Tokens that were looked up in the prefix cache since the start, and those found."""
        counts = {metric.name: metric for metric in self.llm.get_metrics()}
        return {part: int(counts[f"vllm:prefix_cache_{part}"].value) for part in ("queries", "hits")}

    def trim(self, price: float | None) -> list[dict[str, Any]]:
        """Switch vLLM's own adaptive verification on, at `price` a token of a step beside 1 for the step, or off
        again. Its conditions need a GPU; its manager, trimming and rejection do not. What is missing here are
        the costs, which it times in CUDA graphs, and a compiler. Returns each step's trimming since it went on:
        request → drafts scheduled, drafts verified, confidences."""
        import numpy as np
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

        runner, states = self.runner, self.runner.req_states
        runner.speculator._speculative.enable_adaptive_verification = price is not None
        if price is None:
            runner.adaptive_verification = None
            runner.rejection_sampler.enable_adaptive_verification = False
            return self.trimmed
        module._assign_draft_token_budget_compiled = module._assign_draft_token_budget
        manager = module.AdaptiveVerificationManager(
            states, runner.input_buffers.query_start_loc, 1, max_total_logits=10_000
        )
        tokens = np.arange(states.max_num_batched_tokens + 1)
        manager.cost_tables = np.zeros(states.max_num_reqs + 1), 1 + price * tokens
        self.trimmed: list[dict[str, Any]] = []
        reallocate = manager.reallocate_drafts

        def reallocate_drafts(req_ids: list[str], rows: Any) -> Any:
            scheduled = [manager._batch_budget[0][req_id] for req_id in req_ids]
            result = reallocate(req_ids, rows)
            verified = (result[0].diff() - 1).tolist()
            known = manager._confidence_probs[rows].tolist()
            names = [req_id.rsplit("-", 1)[0] for req_id in req_ids]
            self.trimmed.append(
                {name: step for name, *step in zip(names, scheduled, verified, known, strict=True)}
            )
            return result

        manager.reallocate_drafts = reallocate_drafts
        runner.rejection_sampler.enable_adaptive_verification = True
        runner.adaptive_verification = manager
        return []

    def held(self) -> dict[str, int]:
        """Resources that requests hold: slots and rows, tokens of predictions, counts, blocks of the KV cache."""
        from vllm_integration.frontend.usage import collectors

        if speculator := getattr(self.runner, "speculator", None):
            ours = getattr(speculator, "predicted", speculator)
            slots, rows = int(ours._occupied.sum()), self.runner.req_states.req_id_to_index
        else:
            ours, rows = self.runner.drafter, self.runner.requests
            slots = len(ours.slots) + len(ours.requests)
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "slots": slots,
            "rows": len(rows),
            "known": len(getattr(self.scheduler, "drafted_requests", ())),
            "counted": len(getattr(self.scheduler, "ledger", ()))
            + sum(len(each.requests) for each in collectors.values()),
            "predictions": ours.drafter.prediction_stats.used_tokens,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is never given
        }


def serve(settings: dict[str, Any]) -> None:
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        protocol.write(json.dumps(value) + "\n")
        protocol.flush()

    engine = Engine(settings)
    answer(engine.facts())
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer(getattr(engine, name)(**arguments))
    os._exit(0)  # the engine's own shutdown may wait for threads that nobody will wake


def serve_http(settings: dict[str, Any]) -> None:
    """The OpenAI server with `settings["argv"]`, or what the code `settings["program"]` makes of them."""
    os.dup2(2, 1)  # nobody reads a pipe that would fill with log lines
    exec(settings["before"], globals())
    sys.argv = ["api_server", *settings["argv"]]
    if program := settings["program"]:
        exec(program, globals())
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def fork_engines(messages: socket.socket) -> None:
    """One engine process a message, until the sender is gone; each answer is a process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        message, descriptors, _, _ = socket.recv_fds(messages, 2**20, 3)
        if not message:
            return
        pid = os.fork()
        if not pid:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        messages.send(str(pid).encode())
    messages.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    settings, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if "argv" in settings:
            serve_http(settings)
            os._exit(0)
        serve(settings)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def prepare_engines() -> None:
    """Do here what each engine process would do for itself: look the plugin's names up in vLLM's sources, and
    inspect models, for which vLLM starts a process that imports it anew: 20 s where nothing is cached."""
    from vllm.model_executor.models import registry

    from vllm_integration.seams import source_probe, table

    registry._run_in_subprocess = lambda inspect: inspect()
    source_probe.probe_installed(source_probe.installed_root(), table.SEAMS)


def main() -> None:
    gc.disable()
    if sys.argv[-1] != "V1":
        pretend_triton_has_a_cpu_backend()
        # By its file: with tests/ on the search path, tests/gpu_align would stand for gpu_align.
        runpy.run_path(str(Path(__file__).parents[1] / "fast_interpreter.py"))["speed_up"]()
        take_integers_as_masks()
    import compressed_tensors  # noqa: F401
    from vllm import LLM  # noqa: F401  # as an engine does before its plugins are loaded, and nothing more of it

    prepare_engines()
    gc.collect()
    gc.freeze()  # an engine collects several times while it starts: what is here is not looked through again
    gc.enable()
    fork_engines(socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # one of several API servers: vLLM spawns them
    pretend_triton_has_a_cpu_backend()
