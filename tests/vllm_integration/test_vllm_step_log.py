"""The step log: what it holds and who may read it, and where a request ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from vllm.sampling_params import SamplingParams

from gpu_align.drafter.explain import Explainer
from gpu_align.drafter.step_log import Step, read_step_log
from tests.vllm_integration.fakes import config
from vllm_integration.config.settings import Settings
from vllm_integration.wire.request import RequestContent
from vllm_integration.worker.requests import StopRule
from vllm_integration.worker.step_log import DebugLog, LoggedRequest, open_log, safe_name


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


def explainer_of(content: RequestContent, prompt_len: int) -> Explainer:
    return Explainer(content.token_ids.tolist(), prompt_len, 4, max_context_len=64)


@pytest.mark.parametrize(("rank", "tp", "writes"), [(0, 1, True), (0, 2, True), (1, 2, False), (2, 2, True)])
def test_the_log_is_written_by_one_rank(tmp_path: Path, rank: int, tp: int, writes: bool) -> None:
    log = open_log(Settings(debug_dir=str(tmp_path)), 4, config(rank=rank, tp=tp), explainer_of)
    assert bool(log) is writes


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
            log.add("r", content, 2, SamplingParams(max_tokens=None))
        total_len[row] = total
        log.settle(["r"], [row], [4 if row else 0], [sampled], total_len, tokens)
        if not row:
            log.proposed(["r"], draft, 5)
    log.finish(["r"])
    found = read_step_log(tmp_path / "r.yaml")
    assert [step.new for step in found.steps] == [[10], [11, 12, 13]]
    assert [(step.verified, step.proposed) for step in found.steps] == [(0, []), (0, [])]
    assert [(step.cursor_before, step.cursor_after) for step in found.steps] == [(0, 1), (1, 4)]
