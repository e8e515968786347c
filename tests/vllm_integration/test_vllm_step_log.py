"""The step log: what it holds and who may read it, and where a request ends.

With `GPU_ALIGN_DEBUG_LIVE` the file of a request has each step when the next one begins, on both runners.
"""

from __future__ import annotations

import os
import signal
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_align.tools.explain import Explainer
from gpu_align.tools.step_log import Step, StepLog, read_step_log
from tests.vllm_integration.fakes import config, sampling
from vllm_integration.config.settings import Settings
from vllm_integration.wire.request import RequestContent
from vllm_integration.worker.requests import StopRule
from vllm_integration.worker.step_log import DebugLog, LoggedRequest, open_log, safe_name

pytestmark = pytest.mark.usefixtures("plugin_on")


@pytest.mark.parametrize(
    ("sampled", "before", "kept", "ends", "room"),
    [
        ([1, 2, 3], 0, 3, False, 4),
        ([1, 2, 3], 3, 3, False, 3),
        ([1, 2, 3], 6, 3, False, 0),
        ([1, 9, 3], 0, 2, True, 0),
        ([9], 0, 1, True, 0),
        ([1, 2, 3], 8, 2, True, 0),
        ([1, 2], 8, 2, True, 0),
        ([1, 2, 9], 8, 2, True, 0),
        ([1], 10, 0, True, 0),
    ],
)
def test_tokens_after_the_end_do_not_count(
    sampled: list[int], before: int, kept: int, ends: bool, room: int
) -> None:
    rule = StopRule(frozenset({9}), max_tokens=10)
    assert rule.kept(sampled, before) == kept
    request = LoggedRequest("r", RequestContent(), rule, prompt_len=5)
    request.record(sampled, 0, 5 + before)
    assert (request.ended, len(request.steps[0].new)) == (ends, kept)
    request.record([1], 0, 5 + before + len(sampled))
    assert len(request.steps) == 2 - ends
    assert rule.room(sampled, before + len(sampled), 4) == room
    assert rule._replace(min_tokens=7).room(sampled, before + len(sampled), 4) == min(
        room, max(0, 6 - before - len(sampled)) if before + len(sampled) < 7 else room
    )
    assert StopRule().kept(sampled, before) == len(sampled)
    assert StopRule().room(sampled, before, 4) == 4


@pytest.mark.parametrize(
    "req_id", ["../../etc/passwd", "a/b", ".hidden", "", "x" * 500, "ü", "a b", "a\0b", "\ud800"]
)
def test_a_request_id_never_leaves_the_directory(req_id: str, tmp_path: Path) -> None:
    """A plain one is the name of its file."""
    assert safe_name("chatcmpl-8f-1a2b3c4d") == "chatcmpl-8f-1a2b3c4d.yaml"
    name = safe_name(req_id)
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert not name.startswith(".")
    assert len(name) < 200
    assert safe_name(req_id + "?") != name


def write(log: DebugLog) -> None:
    state = LoggedRequest("r", RequestContent(np.array([2, 0, 2], np.int32)), StopRule(), prompt_len=5)
    state.steps = [Step(0, 5, "prediction", [1, 2], [0.5, 0.25], 40, 2, 1, [1, 7], 0, 0)]
    state.tokens = [9, 9, 9, 9, 3, 1, 7]
    log.write(state)


PIECES = {0: b"\n", 9: b"-", 3: b"\xc3", 1: b"\xa9", 2: b"x", 7: b"!"}


def text_of(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


def test_texts_are_what_tokens_add_to_those_before(tmp_path: Path) -> None:
    write(DebugLog(str(tmp_path), 4, text_of))
    document = yaml.safe_load((tmp_path / "r.yaml").read_text())
    (step,) = document["steps"]
    assert (step["accepted_text"], step["own_text"], step["proposed_text"]) == ("é", "!", "éx")
    assert (step["new_lines"], step["prefix"]) == ([], {"tokens": [1, 7], "text": "é!"})
    assert document["prediction_lines"] == [{"tokens": [2, 0], "text": "x\n"}, {"tokens": [2], "text": "x"}]


@pytest.mark.parametrize(
    ("mode", "warned"), [(None, False), (0o700, False), (0o755, True), (0o710, True), (0o704, True)]
)
def test_only_the_servers_user_reads_the_log(
    tmp_path: Path, plugin_log: list[str], mode: int | None, warned: bool
) -> None:
    """A directory that is there stays as it is."""
    directory = tmp_path / "new" / "logs"
    if mode is not None:
        directory.mkdir(parents=True)
        directory.chmod(mode)
    umask = os.umask(0)
    try:
        write(DebugLog(str(directory), 4))
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "r.yaml")]
    assert modes == [0o700 if mode is None else mode, 0o600]
    assert "writes the texts of requests and answers to disk" in plugin_log[-1]
    assert str(directory) in plugin_log[-1]
    assert [f"mode {mode:04o}: other users can see into it" in line for line in plugin_log[:-1]] == [
        True
    ] * warned


@pytest.mark.parametrize("broken", ["the directory", "the disk, at the end", "the disk, live"])
def test_a_failed_write_turns_the_log_off_and_leaves_no_half_file(
    tmp_path: Path, plugin_log: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left")

    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "below" if broken == "the directory" else tmp_path / "logs"
    log = DebugLog(str(directory), 4, live="live" in broken)
    if broken != "the directory":
        plugin_log.clear()
        monkeypatch.setattr(*((os, "open") if "live" in broken else (Path, "replace")), full)
    for _ in range(2):
        write(log)
    assert not log.on
    assert broken == "the directory" or list(directory.iterdir()) == []
    (line,) = plugin_log
    assert "writes no step logs any more: " in line


def test_the_log_follows_no_link(tmp_path: Path) -> None:
    """In a directory that others can write to, a link in the place of the file must not be written through."""
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    logs.mkdir()
    victim.write_text("mine")
    for name in ("r.yaml", f"r.yaml.{os.getpid()}.tmp"):
        (logs / name).symlink_to(victim)
    write(DebugLog(str(logs), 4))
    assert victim.read_text() == "mine"
    assert [path.name for path in logs.iterdir()] == ["r.yaml"]
    assert not (logs / "r.yaml").is_symlink()


# Live.


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


def test_written_steps_outlive_a_killed_process(tmp_path: Path) -> None:
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
