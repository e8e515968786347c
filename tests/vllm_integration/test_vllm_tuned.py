"""`GPU_ALIGN_SURVIVAL_TABLE`: a table of one's own, or one WARNING and the shipped one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu_align import DrafterConfig
from gpu_align.ops.constants import NUM_CLASSES
from gpu_align.ops.draft import KNOTS
from gpu_align.tools.tune.tuning import make_table, write_table
from vllm_integration.config.settings import Settings
from vllm_integration.worker.startup import drafter_config


def test_the_server_drafts_with_the_table_and_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    survival = np.full((NUM_CLASSES, len(KNOTS)), 1000)
    settings = {"length_factor": 3.0, "min_survival": 0.2}
    write_table(make_table(survival, [0.0] * 20, np.ones(NUM_CLASSES), 9, "a test", settings), path)
    given = Settings.from_env({"GPU_ALIGN_SURVIVAL_TABLE": str(path)}).survival_table
    assert drafter_config(given) == DrafterConfig(
        length_factor=3.0, min_survival=0.2, survival_table=str(path)
    )
    assert drafter_config(Settings.from_env({}).survival_table) == DrafterConfig()
    least = Settings.from_env({"GPU_ALIGN_MIN_MATCH": "3"}).min_match
    for table, expected in ((None, DrafterConfig()), (given, drafter_config(given))):
        assert drafter_config(table, least) == replace(expected, min_match=3, min_context_match=3)


@pytest.mark.parametrize("content", [None, "", "{", '{"a": 1}'], ids=["missing", "empty", "torn", "foreign"])
def test_a_file_that_is_none_costs_one_warning(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    drafter_config.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert drafter_config(str(path)) == DrafterConfig()
    (record,) = caplog.records
    assert "GPU_ALIGN_SURVIVAL_TABLE" in record.getMessage()
    assert "\n" not in record.getMessage()
