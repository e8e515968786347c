"""Slots, counters, stop rules, settings and the step log: the parts without vLLM in them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gpu_align.step_log import Step
from vllm_integration.config.settings import Settings, drafts_without_prediction
from vllm_integration.wire.request import RequestContent
from vllm_integration.worker.requests import StopRule
from vllm_integration.worker.step_log import DebugLog, LoggedRequest, safe_name


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


def test_settings_from_the_environment() -> None:
    assert Settings.from_env({}) == Settings()
    settings = Settings.from_env(
        {
            "GPU_ALIGN_STRICT": "1",
            "GPU_ALIGN_DRAFT_WITHOUT_PREDICTION": "Yes",
            "GPU_ALIGN_MAX_PREDICTION_TOKENS": "100",
            "GPU_ALIGN_DEBUG_DIR": "/x",
            "GPU_ALIGN_MAX_DRAFT_TOKENS": "512",
            "GPU_ALIGN_FILL_TOKENS": "0",
            "GPU_ALIGN_SURE": " 0.75 ",
            "GPU_ALIGN_ARENA_TOKENS": "600",
        }
    )
    assert settings == Settings(
        strict=True,
        draft_without_prediction=True,
        max_prediction_tokens=100,
        debug_dir="/x",
        max_draft_tokens=512,
        fill_tokens=0,
        sure=0.75,
        arena_tokens=600,
    )
    assert settings.prediction_capacity(50) == 50
    assert settings.prediction_capacity(500) == 100
    assert Settings().prediction_capacity(500) == 500
    # Room for the longest prediction at least, and for no more than can be needed: 3 slots of 2 pages, 8 pages.
    assert settings.prediction_room(3, 400) == 600
    assert settings.prediction_room(3, 700) == 700
    assert Settings().prediction_room(3, 500) == 8 * 256
    assert Settings().prediction_room(1024, 32_768) == 4 * 2**20


@pytest.mark.parametrize(
    ("value", "pack"),
    [
        (None, "base"),
        (" ", "base"),
        ("Base", "base"),
        ("OFF", "off"),
        ("0", "off"),
        ("no", "off"),
        (" /packs/Mine.json.gz ", "/packs/Mine.json.gz"),
        ("./off", "./off"),
        ("Base, triage@2 ,/packs/House.json", "base,triage@2,/packs/House.json"),
    ],
)
def test_recipes_are_names_and_paths(value: str | None, pack: str) -> None:
    assert Settings.from_env({} if value is None else {"GPU_ALIGN_RECIPES": value}).recipes == pack


def test_more_packs_than_a_drafter_tells_apart_are_refused() -> None:
    assert len(Settings.from_env({"GPU_ALIGN_RECIPES": ",".join("x" * 31)}).packs) == 31
    with pytest.raises(ValueError, match="GPU_ALIGN_RECIPES: expected base, off, or 1 to 31 packs"):
        Settings.from_env({"GPU_ALIGN_RECIPES": ",".join("x" * 32)})


@pytest.mark.parametrize(
    ("given", "recipes", "memory", "drafted"),
    [
        ({}, None, None, False),
        ({}, ("base",), None, True),
        ({}, (), None, False),
        ({"RECIPES": "off"}, None, None, False),
        ({"RECIPES": "base,triage"}, None, None, True),
        ({"RECIPES": "triage"}, (), None, False),
        ({"MEMORY_TOKENS": "10"}, None, None, True),
        ({"MEMORY_TOKENS": "10"}, None, False, False),
        ({"MEMORY_TOKENS": "0"}, None, None, False),
        ({"DRAFT_WITHOUT_PREDICTION": "1"}, (), False, True),
    ],
)
def test_who_is_drafted_for_without_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    recipes: tuple[str, ...] | None,
    memory: bool | None,
    drafted: bool,
) -> None:
    for name in ("RECIPES", "MEMORY_TOKENS", "DRAFT_WITHOUT_PREDICTION"):
        monkeypatch.delenv(f"GPU_ALIGN_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"GPU_ALIGN_{name}", value)
    assert drafts_without_prediction(recipes, memory) is drafted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPU_ALIGN_STRICT", "maybe"),
        ("GPU_ALIGN_DRAFT_WITHOUT_PREDICTION", "2"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "0"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "-4"),
        ("GPU_ALIGN_MAX_PREDICTION_TOKENS", "many"),
        ("GPU_ALIGN_ARENA_TOKENS", "0"),
        ("GPU_ALIGN_FILL_TOKENS", "-1"),
        ("GPU_ALIGN_FILL_TOKENS", "1.5"),
        ("GPU_ALIGN_SURE", "1.01"),
        ("GPU_ALIGN_SURE", "-0.1"),
        ("GPU_ALIGN_SURE", "nan"),
        ("GPU_ALIGN_SURE", "80%"),
        ("GPU_ALIGN_RECIPES", "base,,x"),
        ("GPU_ALIGN_RECIPES", "base,off"),
        ("GPU_ALIGN_MEMORY_TOKENS", "-1"),
        ("GPU_ALIGN_MEMORY_TOKENS", "a lot"),
        ("GPU_ALIGN_RECIPE_MISSES_SHAPES", "3"),
    ],
)
def test_unreadable_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*got '{value}'"):
        Settings.from_env({name: value})


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


def decode(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


def test_texts_are_what_tokens_add_to_those_before(tmp_path: Path) -> None:
    write(DebugLog(str(tmp_path), 4, decode))
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
def test_what_cannot_be_written_turns_the_log_off_and_leaves_no_half_file(
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
    assert "writes no step logs any more" in line
    assert "GPU_ALIGN_DEBUG_DIR" in line


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


def test_a_file_that_is_no_pack_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It costs its recipes and no more; what this process does not find, the worker may."""
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    for packs, drafted in (
        (str(broken), False),
        (f"base,{broken}", False),
        (f"{broken},{tmp_path}/elsewhere.json", True),
    ):
        monkeypatch.setenv("GPU_ALIGN_RECIPES", packs)
        assert drafts_without_prediction() is drafted
