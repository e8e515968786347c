"""The V2 speculator on its own: rows come and go, drafts stay on the device. (The real runner: tests/vllm.)"""

from __future__ import annotations

import gc
import random
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align.ops import backend
from gpu_align.ops.step import StepLaunch
from tests.vllm_integration.fakes import config
from vllm_integration.config import engine_config
from vllm_integration.seams import guard
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire import request as wire
from vllm_integration.wire.reports import DRAFT_MODEL, take
from vllm_integration.worker import request_drafter
from vllm_integration.worker import speculator as module

ROWS, WIDTH, K, VOCABULARY = 4, 64, 4, 1000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dense(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Any:
    """vLLM's `StagedWriteTensor` in its dense form."""
    return SimpleNamespace(gpu=torch.zeros(size, dtype=dtype, device=device), write_contents=None)


@pytest.fixture
def make_speculator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`make(rank, ranks)`: a speculator over a table of 4 rows, as that rank's runner would make it."""
    if DEVICE.type == "cpu":  # vLLM's wants pinned memory, which only the engine's own start-up does without
        monkeypatch.setattr(module, "StagedWriteTensor", dense)
    monkeypatch.setattr(request_drafter, "load_recipes", lambda *_: None)

    def make(rank: int = 0, ranks: int = 1) -> Any:
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros((ROWS, WIDTH), dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)),
            prompt_len=SimpleNamespace(np=np.zeros(ROWS, dtype=np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(ROWS, dtype=np.int32)),
            req_id_to_index={},
        )
        given = config(K, vocab_size=VOCABULARY, rank=rank, tp=ranks, enable_adaptive_verification=False)
        return module.PredictedOutputsSpeculator(given, DEVICE, states)

    return make


@pytest.fixture
def speculator(make_speculator: Callable[..., Any]) -> Any:
    return make_speculator()


def write(speculator: Any, row: int, tokens: list[int]) -> None:
    speculator.req_states.all_token_ids.gpu[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    speculator.req_states.total_len.gpu[row] = len(tokens)


def params_of(prediction: Any) -> Any:
    return SimpleNamespace(extra_args=None if prediction is None else {wire.KEY: prediction})


def batch_of(rows: list[int]) -> Any:
    return SimpleNamespace(
        req_ids=[f"r{row}" for row in rows],
        idx_mapping=torch.tensor(rows, dtype=torch.int64, device=DEVICE),
        idx_mapping_np=np.array(rows, dtype=np.int32),
        num_draft_tokens_per_req=None,
        cu_num_logits=torch.arange(len(rows) + 1, dtype=torch.int32, device=DEVICE),
    )


def propose(
    speculator: Any, rows: list[int], sampled: list[int] | None = None, **kwargs: Any
) -> torch.Tensor:
    """Called as the runner does: positional arguments, those we do not read in between."""
    num_sampled = torch.tensor(sampled or [1] * len(rows), dtype=torch.int32, device=DEVICE)
    rest = (num_sampled, None, None, None, None)
    drafts: torch.Tensor = speculator.propose(
        batch_of(rows), None, None, None, None, num_sampled, *rest, num_speculative_tokens=K, **kwargs
    )
    return drafts


def test_a_batch_without_predictions_launches_nothing(speculator: Any) -> None:
    speculator.drafter = None  # would fail if it were used
    speculator.add_request("r1", 1, 2, params_of(None))
    drafts = propose(speculator, [1, 3])
    drafts[:, 2:] = -1  # as the runner does when fewer drafts are scheduled
    assert propose(speculator, [1, 3]).tolist() == [[0] * K] * 2


def test_a_prefill_chunk_and_a_dummy_run_change_nothing(speculator: Any) -> None:
    prediction = list(range(100, 120))
    write(speculator, 0, [7, 8, 100])
    speculator.add_request("r0", 0, 2, params_of(prediction))
    speculator.drafter.flush()
    before = speculator.drafter._state.align_state.clone()
    propose(speculator, [0], [0])
    propose(speculator, [0, 1, 2], dummy_run=True, skip_attn_for_dummy_run=True, is_profile=True)
    assert torch.equal(speculator.drafter._state.align_state, before)
    assert propose(speculator, [0])[0].tolist() == [101, 102, 103, 104]


WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "to")


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of tensor methods that make the host wait for the device, with their callers, as they are called.
    Not counted: the interpreter, which has to read what a kernel would, and moves to the tensor's own device."""
    seen: list[str] = []

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frames = traceback.extract_stack()[:-1]
            if name == "to" and not any("cpu" in str(a) for a in (*args, *kwargs.values())):
                return original(self, *args, **kwargs)
            if not any("interpreter" in frame.filename for frame in frames):
                seen.append(f"{name} in {frames[-1].name}")
            return original(self, *args, **kwargs)

        return method

    with monkeypatch.context() as patch:
        for name in WAITS:
            patch.setattr(torch.Tensor, name, recording(name, getattr(torch.Tensor, name)))
        patch.setattr(torch.cuda, "synchronize", lambda *_: seen.append("synchronize"))
        patch.setattr(torch, "nonzero", recording("nonzero", torch.nonzero))
        yield seen


def test_propose_never_makes_the_host_wait(speculator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in range(3):
        write(speculator, row, [7, 8, 100, 101])
        speculator.add_request(f"r{row}", row, 2, params_of(list(range(100, 120)) if row else None))
    batch, num_sampled = batch_of([0, 1, 2]), torch.ones(3, dtype=torch.int32, device=DEVICE)
    speculator.propose(batch, num_sampled=num_sampled)  # compiles the kernels where they are compiled
    with waits(monkeypatch) as seen:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            speculator.propose(batch, num_sampled=num_sampled)
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    # On the CPU alone the drafter looks at its arguments' values.
    looks = {"tolist in check_batch", "__int__ in check_batch"} if DEVICE.type == "cpu" else set()
    assert [wait for wait in seen if wait not in looks] == []


def test_no_draft_holds_tokens_of_two_drafters(speculator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 batches: each row is ours whole, or begins with all that the model's own drafter says, where the request
    is not ours or, if that is wanted, ours is empty; the report tells which."""
    draw, told = random.Random(0), []
    for row in range(ROWS):
        write(speculator, row, [7, 8, 100, 101])
    speculator._is_ours = torch.zeros(ROWS, dtype=torch.bool, device=DEVICE)
    monkeypatch.setattr(speculator.reporter, "copy", lambda ids, rows, draft, *_: told.append(draft))
    for number in range(300):
        fills = number % 2 == 0
        speculator.settings = speculator.settings.model_copy(update={"drafter_fills": fills})
        for row in range(ROWS):
            speculator.add_request(f"r{row}", row, 2, params_of(draw.choice([None, list(range(100, 120))])))
        speculator.remove_slot(draw.randrange(ROWS))
        rows, k = draw.sample(range(ROWS), draw.randrange(1, ROWS + 1)), draw.randrange(1, K + 1)
        num_sampled = torch.tensor([draw.randrange(2) for _ in rows], dtype=torch.int32, device=DEVICE)
        told.clear()
        ours = speculator.propose(batch_of(rows), num_sampled=num_sampled).tolist()
        lengths = told[0].length.tolist() if told else [0] * len(rows)
        models = torch.tensor([[900 + draw.randrange(99)] * k for _ in rows], device=DEVICE)
        drafts = speculator.propose(batch_of(rows), num_sampled=num_sampled, models=models).tolist()
        is_theirs = [
            not speculator._occupied[row] or (fills and not length)
            for row, length in zip(rows, lengths, strict=True)
        ]
        for theirs, own, model, draft in zip(is_theirs, ours, models.tolist(), drafts, strict=True):
            assert draft[:k] == model if theirs else draft == own
        if told:
            expected = [k if theirs else own for theirs, own in zip(is_theirs, lengths, strict=True)]
            assert told[1].length.tolist() == expected
            assert [source == DRAFT_MODEL for source in told[1].source.tolist()] == is_theirs


def test_drafts_again_from_what_it_held(
    make_speculator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    """On ranks that draft alike the minute is counted in steps."""
    monkeypatch.setattr(module, "PAUSE_STEPS", 5)
    speculator = make_speculator(0, 2)
    text = list(range(100, 130))
    speculator.add_request("r0", 0, 2, params_of(text))
    found = []
    for length in range(1, 12):
        write(speculator, 0, [7, 8, *text[:length]])
        with monkeypatch.context() as patch:
            if length <= 3:
                patch.setattr(speculator.drafter, "propose", lambda *_: [].index(1))  # the same on all ranks
            found.append(propose(speculator, [0]).tolist()[0][0] == text[length])
        if length == 5:  # in the pause one comes and one goes
            write(speculator, 1, [7, 8, 300])
            speculator.add_request("r1", 1, 2, params_of([300, 301, 302]))
            speculator.add_request("r2", 2, 2, params_of([300, 301, 302]))
            speculator.remove_slot(2)
    assert found == [False] * 7 + [True] * 4
    assert propose(speculator, [1]).tolist()[0][0] == 301
    assert guard.faults() == {}


def test_a_limit_that_vllm_lowers_after_the_start(speculator: Any) -> None:
    """`--max-model-len auto`: rows and drafter shrink before the first request, once."""
    states, first = speculator.req_states, weakref.ref(speculator.drafter)
    runner, added = SimpleNamespace(speculator=speculator), list[tuple[int, int]]()
    add = wrapped_by(module.add_requests)(
        lambda self, step: added.append(tuple(states.all_token_ids.gpu.shape))
    )
    new = SimpleNamespace(req_id="r0", sampling_params=params_of(list(range(100, 150))))
    step = SimpleNamespace(scheduled_new_reqs=[new], finished_req_ids=())
    states.req_id_to_index["r0"] = 0
    for limit, width in ((64, 64), (40, 40), (40, 40)):
        speculator._model_config.max_model_len = limit
        add(runner, step)
        assert (added[-1], speculator.drafter.max_context_len) == ((ROWS, width), width)
        assert (len(speculator._held[0][1].token_ids), speculator.capacity) == (min(50, width), width)
    gc.collect()
    assert first() is None
    write(speculator, 0, list(range(90, 120)))
    speculator.add_request("r0", 0, 10, params_of(list(range(100, 150))))
    assert propose(speculator, [0])[0].tolist() == [120, 121, 122, 123]


def test_a_context_beyond_the_longest_is_drafted_for_in_no_table(
    make_speculator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_config, "MAX_CONTEXT_LEN", WIDTH - 1)
    speculator = make_speculator()
    assert guard.faults() == {"drafting": f"max_model_len: expected at most {WIDTH - 1} tokens, got {WIDTH}"}
    assert not hasattr(speculator.req_states.all_token_ids, "write_contents")  # as vLLM made it
    speculator.add_request("r0", 0, 2, params_of([5, 6]))
    assert propose(speculator, [0]).tolist() == [[0] * K]


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("name", ["add", "propose"])
def test_no_rank_goes_on_alone(
    name: str, make_speculator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    """Where ranks verify their own drafts, one without drafts beside others with them would write another text."""
    speculator = make_speculator(0, 2)
    write(speculator, 0, [7, 8, 100])
    if name == "propose":
        speculator.add_request("r0", 0, 2, params_of([100, 101]))
    monkeypatch.setattr(speculator.drafter, name, out_of_memory)
    step = {
        "add": lambda: speculator.add_request("r0", 0, 2, params_of([100, 101])),
        "propose": lambda: propose(speculator, [0]),
    }[name]
    with pytest.raises(RuntimeError, match="out of memory"):
        step()
    # What comes from the arguments is the same on all ranks.
    monkeypatch.setattr(speculator.drafter, name, lambda *_, **__: [].index(1))
    speculator.add_request("r0", 0, 2, params_of([100, 101]))
    assert propose(speculator, [0]).shape == (1, K)


def test_a_drafter_that_cannot_be_made_reports_why(
    make_speculator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(module, "DraftReporter", out_of_memory)
    speculator = make_speculator()
    speculator.leaves(output := SimpleNamespace())
    found = take(output)
    assert found is not None
    assert list(found.faults) == ["drafting"]


def test_the_first_request_compiles_no_kernel(
    make_speculator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[StepLaunch] = []
    launch = StepLaunch.__call__

    def counted(self: StepLaunch, *args: Any) -> None:
        launches.append(self)
        launch(self, *args)

    monkeypatch.setattr(StepLaunch, "__call__", counted)
    speculator = make_speculator()
    assert len(launches) == 1  # a step, which compiles the kernel
    kernels = dict(backend._compiled)
    assert speculator.drafter.prediction_stats.num_predictions == 0
    write(speculator, 0, [1, 2, 5])
    speculator.add_request("r0", 0, 2, params_of([5, 6, 7, 8, 9]))
    assert propose(speculator, [0])[0].tolist() == [6, 7, 8, 9]
    assert backend._compiled == kernels
