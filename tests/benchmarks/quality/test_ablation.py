"""The ablation: overrides take effect and nothing else does, lines are counted, changes are read off curves."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.corpus.build import EditPair, write_pairs
from benchmarks.quality import ablation
from benchmarks.quality.mechanisms import BASELINE, MECHANISMS, count_lines
from benchmarks.quality.runs import Counts, read_entries

ROOT = Path(__file__).parents[3]


def counted(steps: int, accepted: int, rejected: int) -> dict[str, int]:
    return Counts(1, 1000, steps, accepted, rejected).as_json()


def row_of(*settings: tuple[int, int, int]) -> dict[str, Any]:
    return {"settings": [{"test": counted(*s), "five": counted(*s)} for s in settings]}


def test_what_derives_from_an_override_changes_with_it() -> None:
    """All together are found in the library: a renamed constant or function would fail here, at the import."""
    [[name]] = MECHANISMS["exact prefix"].overrides.values()
    code = f"""
from benchmarks.quality import mechanisms
one = mechanisms.without("four best matches+exact prefix+" + "+".join(mechanisms.MECHANISMS))
mechanisms.install(one.overrides)
import benchmarks.learn.survival
from gpu_align.ops import match, rules
print(match.NUM_CANDIDATES, rules.{name}.__name__)
"""
    from gpu_align.ops import match

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    lanes, replaced = done.stdout.split()
    assert int(lanes) < match.NUM_CANDIDATES
    assert replaced == "<lambda>"


def test_every_mechanism_takes_something_away() -> None:
    for name, missing in MECHANISMS.items():
        if name != BASELINE:
            assert missing.overrides or missing.config or not missing.recipes, name
            counts = count_lines(missing)
            assert (counts["drafter"] > 0) == bool(missing.names), name
            assert counts["drafter"] <= counts["installed"] <= counts["all"], name
    recipes = count_lines(MECHANISMS["recipes"])
    assert recipes["all"] > 2 * recipes["drafter"]  # with learning, commands, plugin and tests


def test_a_change_is_read_at_the_rejections_of_the_default() -> None:
    whole = row_of((100, 1000, 500), (125, 1000, 100))
    assert ablation.change(whole, whole, "test") == 0
    # 8 tokens a step at 0.3 rejected and 10 at 0.7: 9 in between, where the whole drafter has 10.
    assert ablation.change(row_of((100, 1000, 700), (125, 1000, 300)), whole, "five") == pytest.approx(-0.1)
    assert ablation.change(row_of((100, 1000, 700)), whole, "test") is None


def edit_pair(seed: int) -> EditPair:
    """Edits of the same kind at four places, so that each may be replayed."""
    rng = random.Random(seed)
    blocks = [[rng.randrange(50) for _ in range(25)] for _ in range(5)]
    before = [token for block in blocks for token in (*block, 60, 61, 62)][:-3]
    after = [token for block in blocks for token in (*block, 60, 70, 71, 62)][:-4]
    return EditPair(str(seed), "python", "python", f"p{seed}", "test", "tekken", before, after)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is measured, on a corpus of two records."""
    monkeypatch.chdir(ROOT)
    pairs, known = tmp_path / "pairs.jsonl.gz", tmp_path / "known.pickle"
    write_pairs(map(edit_pair, range(2)), pairs)
    known.write_bytes(pickle.dumps({}))
    files = {"corpus": str(pairs), "tune": str(pairs), "known": str(known)}
    return {**files, "one_in": 1, "settings": [{}, {"length_factor": 1}]}


def measure(name: str, job: dict[str, Any], tables: Path) -> dict[str, Any]:
    """In plain Python there: a compiler takes longer. Numba in this process must not see the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        return ablation.measure(name, job, tables)


def test_the_baseline_is_the_plain_replay_and_a_mechanism_less_takes_more_steps(
    job: dict[str, Any], tmp_path: Path
) -> None:
    whole = measure(BASELINE, job, tmp_path)
    entries = read_entries(Path(job["corpus"]))
    for setting, measured in zip(job["settings"], whole["settings"], strict=True):
        pairs = ablation.replayed(
            {**setting, "survival_table": str(tmp_path / "everything.json")}, entries, {}
        )
        sums = {"test": Counts.of(pairs).as_json(), "five": Counts().as_json()}
        assert measured == {"setting": setting, **sums}
    assert whole["perfect"] == {"records": 2, "least_steps": 2}
    less = measure("edit replay+exact prefix", job, tmp_path)
    assert less["settings"][0]["test"]["steps"] > whole["settings"][0]["test"]["steps"]
    assert (tmp_path / "edit-replay-exact-prefix.json").is_file()
