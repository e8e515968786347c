"""`GPU_ALIGN_DEBUG_LIVE`: the file of a request has each step when the next one begins, on both runners."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_fakes import config, sampling

from gpu_align.step_log import Step, StepLog, read_step_log
from gpu_align.tools.explain import Explainer
from vllm_integration.config.settings import Settings
from vllm_integration.wire.request import RequestContent
from vllm_integration.worker.requests import StopRule
from vllm_integration.worker.step_log import DebugLog, LoggedRequest, open_log

pytestmark = pytest.mark.usefixtures("plugin_on")


def decode(ids: list[int]) -> str:
    return "".join("\n" if i == 7 else f"<{i}>" for i in ids)


class Followed:
    """A request of a log, with so many steps."""

    def __init__(self, log: DebugLog) -> None:
        content = RequestContent(np.array([5, 7, 6], np.int32))
        self.log, self.request = log, LoggedRequest("r", content, StopRule(), prompt_len=2)

    def __call__(self, num_steps: int) -> None:
        self.request.tokens = [1, 2, 5, 7, 6, 5, 7, 6][: 2 + 2 * num_steps]
        self.request.steps = [
            Step(i, 2 + 2 * i, "prediction", [5, 6], [0.5, 0.25], 4, 2, 1, [5 + i, 7])
            for i in range(num_steps)
        ]
        self.log.follow(self.request)


def read(directory: Path, name: str = "r") -> StepLog:
    return read_step_log(directory / f"{name}.yaml")


@pytest.mark.parametrize("decoder", [decode, None], ids=["texts", "ids"])
def test_a_file_grows_and_ends_as_one_that_was_written_at_the_end(tmp_path: Path, decoder: Any) -> None:
    live, whole = (
        Followed(DebugLog(str(tmp_path / name), 4, decoder, live=name == "live"))
        for name in ("live", "whole")
    )
    for num_steps in (1, 1, 2, 4):  # a step may be followed again, and one may have been missed
        live(num_steps)
        whole(num_steps)
        found = read(tmp_path / "live")
        assert not found.finished
        assert [step.new for step in found.steps] == [[5 + i, 7] for i in range(num_steps)]
        assert (tmp_path / "live" / "r.yaml").stat().st_mode & 0o777 == 0o600
        assert list((tmp_path / "whole").iterdir()) == []
    for each in (live, whole):
        each.log.write(each.request)
    assert (tmp_path / "live" / "r.yaml").read_bytes() == (tmp_path / "whole" / "r.yaml").read_bytes()
    assert read(tmp_path / "live") == replace(found, finished=True)


def test_what_was_written_outlives_a_killed_process(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        follow = Followed(DebugLog(str(tmp_path), 4, decode, live=True))
        for num_steps in range(1, 4):
            follow(num_steps)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    found = read(tmp_path)
    assert (len(found.steps), found.finished) == (3, False)
    assert [line.text for step in found.steps for line in step.new_lines or []] == [
        "<5>\n",
        "<6>\n",
        "\n",
        "\n",
    ]
    with (tmp_path / "r.yaml").open("ab") as file:  # as if it had been killed while it wrote
        file.write(b"- {step: 3, position: 8, sou")
    assert read(tmp_path) == found


def test_an_earlier_file_a_link_and_a_cleared_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    logs = tmp_path / "logs"
    follow = Followed(DebugLog(str(logs), 4, live=True))
    (logs / "r.yaml").symlink_to(victim)
    follow(1)
    assert victim.read_text() == "mine"
    assert len(read(logs).steps) == 1
    (logs / "r.yaml").unlink()
    follow(2)
    assert len(read(logs).steps) == 2
    (logs / "r.yaml").unlink()
    (logs / "r.yaml").symlink_to(victim)
    follow(3)
    assert victim.read_text() == "mine"
    assert not follow.log.on


def explainer_of(content: RequestContent, prompt_len: int) -> Explainer:
    return Explainer(content.token_ids.tolist(), prompt_len, 4, max_context_len=64)


class Calls(TorchDispatchMode):
    """What PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_v2_writes_each_step_as_it_happens_and_asks_the_device_for_no_more(tmp_path: Path) -> None:
    explainer_of(RequestContent(), 0).at([0])  # what asks PyTorch for more when it is compiled
    calls: dict[str, list[str]] = {}
    for live in (True, False):
        logs = tmp_path / str(live)
        log = open_log(Settings(debug_dir=str(logs), debug_live=live), 4, config(), explainer_of)
        assert log is not None
        log.add("r", RequestContent(np.arange(10, 40, dtype=np.int32)), 2, sampling())
        tokens, total_len = torch.zeros((4, 64), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        draft = SimpleNamespace(
            token_ids=torch.tensor([[12, 13, 0, 0]]),
            confidence=torch.tensor([[0.5, 0.25, 0.0, 0.0]]),
            length=torch.tensor([2], dtype=torch.int32),
            source=torch.tensor([1], dtype=torch.int8),
        )
        calls[str(live)] = []
        for step, sampled in enumerate((2, 1, 3), 1):
            tokens[3, :12] = torch.tensor([7, 8, 10, 11, 12, 12, 13, 14, 0, 0, 0, 0])
            total_len[3] += sampled if step > 1 else 2 + sampled
            with Calls() as made:
                log.settle(["r"], np.array([3]), [2], torch.tensor([sampled]).tolist(), total_len, tokens)
                log.proposed(["r"], draft, 5)
            calls[str(live)] += made.names
            if live:
                found = read(logs)
                assert (len(found.steps), found.finished) == (step, False)
            else:
                assert list(logs.iterdir()) == []
        log.finish(["r"])
        assert log.on
    assert calls["True"] == calls["False"]
    assert any("_local_scalar_dense" in name for name in calls["True"]), "values that the log waits for"
    assert read(tmp_path / "True") == read(tmp_path / "False") == replace(found, finished=True)
    assert [step.new for step in found.steps] == [[10, 11], [12], [12, 13, 14]]
    assert [step.accepted for step in found.steps] == [0, 0, 2]


def test_a_request_that_returns_goes_on_in_its_log_without_the_drafts_that_it_lost(tmp_path: Path) -> None:
    """Preempted on V2 in its second step, and back in another row with its tokens for a longer prefill."""
    log = open_log(Settings(debug_dir=str(tmp_path)), 4, config(), explainer_of)
    assert log is not None
    content = RequestContent(np.arange(10, 40, dtype=np.int32))
    tokens = torch.tensor([[7, 8, 10, 11, 12, 13]] * 2, dtype=torch.int32)
    total_len = torch.zeros(2, dtype=torch.int32)
    draft = SimpleNamespace(
        token_ids=torch.tensor([[11, 12, 13, 14]]),
        confidence=torch.full((1, 4), 0.5),
        length=torch.tensor([4]),
        source=torch.tensor([1]),
    )
    for row, total, sampled in ((0, 3, 1), (1, 3, 0), (1, 6, 3)):
        if sampled < 3:
            log.add("r", content, 2, sampling())
        total_len[row] = total
        log.settle(["r"], [row], [4 if row else 0], [sampled], total_len, tokens)
        if not row:
            log.proposed(["r"], draft, 5)
    log.finish(["r"])
    found = read(tmp_path)
    assert found.finished
    assert [step.new for step in found.steps] == [[10], [11, 12, 13]]
    assert [(step.verified, step.proposed) for step in found.steps] == [(0, []), (0, [])]
    assert [(step.cursor_before, step.cursor_after) for step in found.steps] == [(0, 1), (1, 4)]
