"""What the tests of the command measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_align.bench.fake_openai import PAIRS


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A file of pairs."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return path
