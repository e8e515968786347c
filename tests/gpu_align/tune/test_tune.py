"""`gpu-align tune`: what is learned, what is reported, what is read and refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_align import DrafterConfig
from gpu_align.drafter.step_log import Line, Step, StepLog, dump
from gpu_align.drafter.survival import SHIPPED, read_survival
from gpu_align.ops.choose import NUM_CLASSES
from gpu_align.ops.files import content_hash
from gpu_align.tools.simulate.policies import our_drafter, sizes_for
from gpu_align.tools.simulate.replay import Record, simulate
from gpu_align.tools.tune import fit, tuning
from gpu_align.tools.tune.fit import NUM_DRAFT_TOKENS, observe
from gpu_align.tools.tune.tuning import (
    Point,
    Tuned,
    at_rejections,
    files_of,
    read_traffic,
    record_of,
    split,
    tune,
    write_table,
)
from tests.modules import command


def requests(count: int = 12, length: int = 120, first: int = 0) -> list[Record]:
    """Predictions of few distinct tokens, and outputs that depart from them again and again."""
    made = []
    for number in range(count):
        rng = np.random.default_rng(number)
        prediction = (rng.integers(0, 40, length) + first).tolist()
        output = list(prediction)
        for at in range(10, length, 17):
            output[at] = first + 50 + at % 7
        made.append(Record(str(number), [], prediction, output))
    return made


def write_logs(folder: Path, records: list[Record]) -> None:
    """Step logs as the plugin writes them: the prediction is in the file, in lines."""
    folder.mkdir()
    for record in records:
        steps = [Step(i, i, "none", [], [], 0, 0, 0, [token]) for i, token in enumerate(record.output)]
        lines = [Line(record.prediction[:9]), Line(record.prediction[9:])]
        log = StepLog(record.id, 4, 0, len(record.prediction), steps, lines)
        (folder / f"{record.id}.yaml").write_text(dump(log))


#: Of tokens that no count can be taken for.
RECORDS = requests(10, 80, first=70_000)
TOLD: list[tuple[int, int | None]] = []


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    TOLD.clear()
    return tune(RECORDS, lambda what, done, total=None: TOLD.append((done, total)))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, tuned: Tuned) -> Path:
    path = tmp_path_factory.mktemp("table") / "table.json"
    write_table(tuned.table, path)
    return path


class TestFit:
    def known(self) -> fit.Array:
        return np.power(0.9, np.arange(1, NUM_DRAFT_TOKENS + 1))[None].repeat(NUM_CLASSES, axis=0)

    def test_without_observations_a_table_stays_what_it_is(self) -> None:
        runs = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1))
        assert np.allclose(fit.relearn(runs, self.known()), self.known())

    def test_a_calibration_starts_from_the_known_one(self) -> None:
        drafts = np.zeros((2, 20))
        drafts[:, 3] = 1000, -100
        found = fit.calibrate(drafts, [0.02] * 20)
        assert found[0] == 0.02
        assert found[3] == pytest.approx(-0.1, abs=0.01)

    def test_many_observations_win_and_few_move_it_a_little(self) -> None:
        for count, low, high in ((100_000, 0.49, 0.51), (4, 0.6, 0.89)):
            runs = np.zeros((NUM_CLASSES, NUM_DRAFT_TOKENS + 1))
            runs[100, [0, 5]] = count / 2
            curve = fit.relearn(runs, self.known())[100]
            assert low < curve[0] < high, (count, curve[0])
            assert (np.diff(curve) <= 0).all()


class TestTune:
    def test_held_back_requests_share_no_prediction_with_the_others(self) -> None:
        records = requests(9)
        twins = records + [Record(f"{r.id}b", [], r.prediction, [7, 8, 9]) for r in records]
        learned, held = split(twins)
        assert len(learned) + len(held) == 18
        assert not {tuple(r.prediction) for r in learned} & {tuple(r.prediction) for r in held}
        assert 2 <= len(held) <= 6

    def test_a_report_counts_what_the_held_back_requests_took(self, tuned: Tuned) -> None:
        report, held = tuned.report, split(RECORDS)[1]
        assert report.held_back == len(held)
        assert report.before.tokens == report.after.tokens == sum(len(r.output) for r in held)
        knots, calibration = read_survival(SHIPPED)
        survival = tuning.fit_curves(knots, NUM_DRAFT_TOKENS)
        again = observe(held, survival, 80, DrafterConfig(), calibration)
        assert tuple(again.total) == report.before[:4]
        # What is told never passes the length of the bar, and is most of it.
        (_, most), *told = TOLD
        assert most is not None
        assert 0.7 * most <= sum(done for done, _ in told) <= most

    def test_observing_counts_what_a_replay_counts(self) -> None:
        """With prompts, too: they move where an output stands in its row."""
        records = [replace(r, prompt=r.prediction[: 7 * i]) for i, r in enumerate(requests(4))]
        knots, calibration = read_survival(SHIPPED)
        ours = our_drafter(records)
        width = sizes_for(records).max_context_len
        found = observe(
            records, tuning.fit_curves(knots, NUM_DRAFT_TOKENS), width, DrafterConfig(), calibration
        )
        [expected] = simulate(records, [ours], NUM_DRAFT_TOKENS)
        assert found.total.tolist() == [
            expected.output_tokens, expected.steps, expected.accepted, expected.rejected,
        ]  # fmt: skip
        # Of each draft the accepted tokens were reached, and the first wrong one.
        assert expected.accepted < found.drafts[0].sum() <= expected.accepted + expected.steps


def signed(table: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    changed = {**table, "settings": settings}
    return {**changed, "sha256": content_hash(changed, "sha256")}


def test_tokens_a_step_at_equal_rejections() -> None:
    points = [Point(100, steps, 100, rejected, 0) for steps, rejected in ((50, 10), (40, 40), (45, 60))]
    assert at_rejections(points, 0.25) == pytest.approx(2.25)
    assert at_rejections(points, 0.05) is None
    assert at_rejections(points, 9) == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["seen"].__setitem__(0, 7), "the file was changed"),
        (lambda t: signed(t, {"speed": 9}), "found 'speed'"),
        (lambda t: signed(t, {"min_survival": 7}), "0 <= p <= 1"),
        (lambda t: "", "no JSON"),
    ],
)
def test_what_was_changed_or_is_foreign_is_refused(
    change: Any, message: str, table: Path, tmp_path: Path
) -> None:
    content = json.loads(table.read_text())
    content = found if (found := change(content)) is not None else content
    path = tmp_path / "broken.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as refused:
        DrafterConfig.tuned(path)
    assert "\n" not in str(refused.value)


def test_a_step_log_is_a_request() -> None:
    def step(new: list[int], source: str = "prediction") -> Step:
        return Step(0, 0, source, [], [], 0, 0, 0, new)

    lines = [Line([1, 2]), Line([3])]
    for steps, prediction, expected in (
        ([step([1]), step([2, 4])], lines, Record("r", [], [1, 2, 3], [1, 2, 4])),
        ([step([1])], None, "the log does not hold the prediction"),
        ([step([1])], lines[:1], "the log does not hold the whole prediction"),
        ([], lines, "no output"),
        ([step([1], "memory")], lines, "drafts from earlier answers"),
    ):
        assert record_of(StepLog("r", 4, 0, 3, steps, prediction)) == expected
    assert record_of(StepLog("r", 4, 0, 0, [step([1])])) == "no prediction"


def test_the_same_requests_give_the_same_table(tmp_path: Path, table: Path) -> None:
    """In another order, and half of them as step logs."""
    pytest.importorskip("yaml")
    write_logs(tmp_path / "logs", RECORDS[::2])
    assert read_traffic(files_of([tmp_path / "logs"]))[0] == RECORDS[::2]
    pairs, out = tmp_path / "p.jsonl", tmp_path / "t.json"
    pairs.write_text("".join(json.dumps(asdict(record)) + "\n" for record in RECORDS[::-2]))
    done = command("tune", pairs, tmp_path / "logs", "-o", out)
    assert done.exit_code == 0, done.output
    for words in ("read 10 requests, 800 output tokens", "shipped table", "new table", "at equal rejections"):
        assert words in done.output
    assert out.read_bytes() == table.read_bytes()
