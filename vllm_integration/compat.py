"""Every private vLLM name this package touches, in one table, and the one function that wraps them.

A seam is a name vLLM does not promise to keep. Each is probed by its signature before anything is
changed, and a group is installed whole or not at all. A seam that is missing or has changed turns the
plugin off for the process: vLLM serves as if it were not installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Literal

logger = logging.getLogger("vllm.gpu_align")

TESTED = ("0.32.0",)
MARK = "__gpu_align_seam__"

Group = Literal["v1", "inputs", "chat"]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Seam:
    """One private name.

    name: what this project calls it. group: what is installed together with it.
    module, attribute: where it is; `attribute` is dotted below the module.
    kind: "wrap" (replaced by a wrapper that calls the original), "call" (called as it is), "field" (an
        instance attribute or dataclass field that is read).
    parameters: for "wrap" and "call": the leading parameters, in order, that must be there. Further
        parameters of a called function must have defaults.
    """

    name: str
    group: Group
    kind: Literal["wrap", "call", "field"]
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()
    tested: tuple[str, ...] = TESTED


@dataclass(frozen=True)
class SeamStatus:
    """What a probe found: "found", "missing", or "changed" with the difference in `detail`."""

    seam: Seam
    state: Literal["found", "missing", "changed"]
    detail: str = ""


class SeamError(RuntimeError):
    """A group could not be installed; the message names each seam and what was found."""


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_OUTPUT = "vllm.v1.core.sched.output"
_RENDERER = "vllm.renderers.base"
INPUTS_MODULE = "vllm.v1.engine.input_processor"
CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"

SEAMS: tuple[Seam, ...] = (
    Seam(
        "v1.update_states",
        "v1",
        "wrap",
        _RUNNER,
        "GPUModelRunner._update_states",
        "learn which requests arrived, finished or left the batch; runs even when nothing is scheduled",
        ("self", "scheduler_output"),
    ),
    Seam(
        "v1.input_fits_in_drafter",
        "v1",
        "wrap",
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        "near max_model_len vLLM replaces the whole batch's drafts by zeros; ours end in time by themselves",
        ("self", "common_attn_metadata"),
    ),
    Seam("v1.drafter", "v1", "field", _RUNNER, "GPUModelRunner.drafter", "find our proposer on a runner"),
    Seam("v1.input_batch", "v1", "field", _RUNNER, "GPUModelRunner.input_batch", "the rows of the batch"),
    Seam("batch.req_ids", "v1", "field", _BATCH, "InputBatch.req_ids", "row → request"),
    Seam("batch.req_id_to_index", "v1", "field", _BATCH, "InputBatch.req_id_to_index", "request → row"),
    Seam("batch.num_prompt_tokens", "v1", "field", _BATCH, "InputBatch.num_prompt_tokens", "prompt length"),
    Seam("output.new", "v1", "field", _OUTPUT, "SchedulerOutput.scheduled_new_reqs", "new requests"),
    Seam("output.finished", "v1", "field", _OUTPUT, "SchedulerOutput.finished_req_ids", "finished requests"),
    Seam(
        "output.drafts",
        "v1",
        "field",
        _OUTPUT,
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "the drafts that this step verifies",
    ),
    Seam("new.req_id", "v1", "field", _OUTPUT, "NewRequestData.req_id", "id of a new request"),
    Seam(
        "new.sampling_params", "v1", "field", _OUTPUT, "NewRequestData.sampling_params", "extra_args, limits"
    ),
    Seam(
        "inputs.process_inputs",
        "inputs",
        "wrap",
        INPUTS_MODULE,
        "InputProcessor.process_inputs",
        "tokenise a text prediction where the tokenizer is",
        ("self", "request_id", "prompt", "params"),
    ),
    Seam("inputs.config", "inputs", "field", INPUTS_MODULE, "InputProcessor.vllm_config", "are we in use"),
    Seam("inputs.renderer", "inputs", "field", INPUTS_MODULE, "InputProcessor.renderer", "the tokenizer"),
    Seam(
        "renderer.tokenize",
        "inputs",
        "call",
        _RENDERER,
        "BaseRenderer.tokenize_prompt",
        "tokenise as vLLM does",
        ("self", "prompt", "params"),
    ),
    Seam(
        "renderer.params",
        "inputs",
        "call",
        "vllm.renderers",
        "TokenizeParams",
        "no special tokens, cut at the capacity",
        ("max_total_tokens",),
    ),
    Seam(
        "chat.create",
        "chat",
        "wrap",
        CHAT_MODULE,
        "OpenAIServingChat.create_chat_completion",
        "read and validate the `prediction` field",
        ("self", "request", "raw_request"),
    ),
    Seam(
        "chat.error",
        "chat",
        "call",
        CHAT_MODULE,
        "OpenAIServingChat.create_error_response",
        "HTTP 400 that names the field",
        ("message", "err_type", "status_code", "param"),
    ),
    Seam("chat.renderer", "chat", "field", CHAT_MODULE, "OpenAIServingChat.renderer", "the tokenizer"),
    Seam("chat.engine", "chat", "field", CHAT_MODULE, "OpenAIServingChat.engine_client", "are we in use"),
    Seam(
        "chat.xargs",
        "chat",
        "field",
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest.vllm_xargs",
        "becomes SamplingParams.extra_args",
    ),
    Seam(
        "renderer.tokenize_async",
        "chat",
        "call",
        _RENDERER,
        "BaseRenderer.tokenize_prompt_async",
        "tokenise off the event loop",
        ("self", "prompt", "params"),
    ),
)

_lock = threading.RLock()
_off_reason: str | None = None


def turn_off(reason: str) -> None:
    """Make every wrapper of this process a plain call of its original. One ERROR line, the first time."""
    global _off_reason
    with _lock:
        if _off_reason is None:
            _off_reason = reason
            logger.error("gpu_align is off, vLLM serves without predicted outputs: %s", reason)


def off_reason() -> str | None:
    """Why the plugin is off in this process, or None while it is on."""
    return _off_reason


def probe(seams: Sequence[Seam] = SEAMS) -> list[SeamStatus]:
    """Look every seam up, importing its module; nothing is changed."""
    return [_probe_one(seam) for seam in seams]


def install(group: Group, wrappers: Mapping[str, Wrapper], seams: Sequence[Seam] = SEAMS) -> None:
    """Wrap the "wrap" seams of a group, all or none; again is harmless.

    wrappers: seam name → a function that takes the original and returns its replacement.
    Raises `SeamError` when any seam of the group is not as it was tested; then nothing was changed.
    """
    members = [seam for seam in seams if seam.group == group]
    with _lock:
        bad = [status for status in probe(members) if status.state != "found"]
        if bad:
            raise SeamError(
                "; ".join(f"{s.seam.module}.{s.seam.attribute} is {s.state}: {s.detail}" for s in bad)
                + f" (tested with vLLM {', '.join(TESTED)})"
            )
        undo: list[tuple[Any, str, Any]] = []
        try:
            for seam in members:
                if seam.kind != "wrap":
                    continue
                owner, leaf = _owner(seam)
                original = inspect.getattr_static(owner, leaf)
                if hasattr(original, MARK):
                    continue
                replacement = wrappers[seam.name](original)
                setattr(replacement, MARK, seam.name)
                undo.append((owner, leaf, original))
                setattr(owner, leaf, replacement)
                logger.debug("gpu_align wraps %s.%s", seam.module, seam.attribute)
        except Exception:
            for owner, leaf, original in reversed(undo):
                setattr(owner, leaf, original)
            raise


def _owner(seam: Seam) -> tuple[Any, str]:
    owner: Any = importlib.import_module(seam.module)
    *path, leaf = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, leaf


def _probe_one(seam: Seam) -> SeamStatus:
    try:
        owner, leaf = _owner(seam)
    except (ImportError, AttributeError) as error:
        return SeamStatus(seam, "missing", str(error))
    if seam.kind == "field":
        if _has_field(owner, leaf):
            return SeamStatus(seam, "found")
        return SeamStatus(seam, "missing", f"{owner.__name__} sets no {leaf}")
    target = getattr(owner, leaf, None)
    if not callable(target):
        return SeamStatus(seam, "missing", f"no callable {leaf}")
    difference = _signature_difference(target, seam)
    return SeamStatus(seam, "changed", difference) if difference else SeamStatus(seam, "found")


def _signature_difference(target: Callable[..., Any], seam: Seam) -> str:
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        return f"no signature: {error}"
    names = tuple(parameter.name for parameter in parameters)
    if names[: len(seam.parameters)] != seam.parameters:
        return f"expected parameters {', '.join(seam.parameters)}, got {', '.join(names)}"
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        parameter.name
        for parameter in parameters[len(seam.parameters) :]
        if parameter.default is inspect.Parameter.empty and parameter.kind not in fixed
    ]
    if seam.kind == "call" and needed:
        return f"needs further parameters {', '.join(needed)}"
    return ""


def _has_field(cls: type, name: str) -> bool:
    """Whether a class declares the attribute, or any of its methods sets it on something."""
    for base in cls.__mro__:
        if name in vars(base) or name in vars(base).get("__annotations__", {}):
            return True
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if isinstance(code, CodeType) and name in code.co_names:
                return True
    return False


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` as soon as `module` is imported; now, if it is already.

    vLLM runs plugins in every process, also in those that never need these modules, so that importing
    them here would cost everybody start-up time. `callback` must not raise unless the import shall fail.
    """
    with _lock:
        loaded = sys.modules.get(module)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            callback()
            return
        _pending.setdefault(module, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the other finders look and adds the callbacks to their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_callbacks_after(spec.loader, fullname)
                return spec
        return None


def _run_callbacks_after(loader: Any, fullname: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        with _lock:
            callbacks = _pending.pop(fullname, [])
        for callback in callbacks:
            callback()

    loader.exec_module = exec_module  # this loader serves this one import


_pending: dict[str, list[Callable[[], None]]] = {}
_finder = _AfterImport()
