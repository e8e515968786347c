"""What the demo measures, and what it makes of it: counts, thresholds, table and page, without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httpx")
from gpu_align.step_log import Step, StepLog, dump
from gpu_align.tools.bench.client import Answer, BenchError
from gpu_align.tools.bench.measure import Counts, Result, Sample, Turn
from gpu_align.tools.html import Origin
from gpu_align.tools.html import page as html_page
from tests.vllm_integration import demo_recording
from vllm_integration.demo import page
from vllm_integration.demo import rows as demo_rows

# --- measuring ------------------------------------------------------------------------------------------


def _row(name: str = "none", steps: int = 40, seconds: float = 2.0, identical: bool = True) -> demo_rows.Row:
    return demo_rows.Row(name, "ab", [5, 6, 7, 0], [9.0, seconds, 0.1], steps, identical=identical)


@pytest.mark.parametrize(
    ("steps", "seconds", "identical", "expected"),
    [
        (10, 1.9, True, []),
        (11, 1.9, True, ["fewer verification steps"]),
        (10, 2.0, True, ["expected less than 2.00 s"]),
        (10, 1.9, False, ["output differs"]),
        (40, 3.0, False, ["output differs", "fewer verification steps", "expected less than 2.00 s"]),
    ],
)
def test_what_the_demo_promises(steps: int, seconds: float, identical: bool, expected: list[str]) -> None:
    found = demo_rows.failures([_row(), _row("verbatim", steps, seconds, identical)])
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


def _log(num_steps: int = 3) -> StepLog:
    steps = [
        Step(0, 9, "none", [], [], 0, 0, 0, [5]),
        Step(1, 10, "prediction", [6] * 7, [0.5] * 7, 1, verified=7, accepted=1, new=[6, 7]),
        # The end token came before the second draft.
        Step(2, 12, "context", [0, 1], [0.5, 0.5], 1, verified=2, accepted=1, new=[0]),
    ]
    return StepLog("chatcmpl-1-abcd", 8, 9, 4, steps[:num_steps])


ANSWER = Answer("ab", 4, id="chatcmpl-1", token_ids=[5, 6, 7, 0], prompt_token_ids=[1, 2])


def test_origins_come_from_the_step_log(tmp_path: Path) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log()))
    row = _row()
    assert page.tokens_of(row) == ([Origin.GENERATED] * 4, [0, 1, 2, 3])
    row.log = demo_rows.read_steps(tmp_path, ANSWER)
    assert page.tokens_of(row) == (
        [Origin.GENERATED, Origin.PREDICTION, Origin.GENERATED, Origin.CONTEXT],
        [0, 1, 1, 2],
    )
    assert page.tokens_of(_row("n-gram")) == ([], [])


@pytest.mark.parametrize(
    ("num_steps", "answer", "words"),
    [
        (2, ANSWER, "the step log's 3 tokens are not the answer's 4"),
        (3, replace(ANSWER, id="chatcmpl-2"), "no step log of chatcmpl-2"),
    ],
)
def test_a_step_log_that_does_not_fit_is_refused(
    tmp_path: Path, num_steps: int, answer: Answer, words: str
) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log(num_steps)))
    with pytest.raises(BenchError, match=words):
        demo_rows.read_steps(tmp_path, answer, timeout_s=0.1)


def test_rows_are_what_bench_has_measured(tmp_path: Path) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log()))
    drafts = Counter({("prediction", "accepted"): 1, ("prediction", "rejected"): 6})
    counts = {
        "none": Counts(generated=4, has_plugin=True),
        "edited": Counts(generated=4, plugin_steps=3, drafts=drafts, has_plugin=True),
        "n-gram": Counts(generated=4, requests=1, vllm_drafts=1, vllm_drafted=5, vllm_accepted=2),
    }
    gaps = {"none": [(0.1, 1)] * 3, "edited": [(0.1, 1)] * 2, "n-gram": [(0.1, 3)]}
    result = Result()
    for number in range(demo_rows.REPEATS):
        for mode in counts:
            sample = Sample(Turn(number, 1, mode), [(0, replace(ANSWER, gaps=gaps[mode]))], 0.5 + number)
            sample.counts = counts[mode]
            if (number, mode) == (2, "edited"):  # any round
                sample.different = [(0, "aB")]
            result.samples.append(sample)
    rows = demo_rows.rows_of(result, tmp_path)
    assert [(row.name, row.steps, row.identical) for row in rows] == [
        ("none", 4, True),
        ("n-gram", 2, True),
        ("edited", 3, False),
    ]
    assert [row.by_source for row in rows] == [
        {},
        {"n-gram": {"accepted": 2, "rejected": 3}},
        {"prediction": {"accepted": 1, "rejected": 6}},
    ]
    for row in rows:
        assert (row.text, row.token_ids, row.prompt_token_ids) == ("ab", [5, 6, 7, 0], [1, 2])
        assert (row.wall_s, row.seconds) == ([0.5, 1.5, 2.5], 1.5)
        assert (row.log is not None) == (row.name == "edited")


# --- the page and the table --------------------------------------------------------------------------


class _Bytes:
    """One token a byte."""

    name, vocab_size = "bytes", 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def _page_rows() -> list[demo_rows.Row]:
    text = 'if a<b: "&"</script>'
    ids = _Bytes().encode(text)
    num = len(ids)
    steps = [
        Step(0, 9, "none", [], [], 0, 0, 0, ids[:1]),
        Step(1, 10, "prediction", ids[1:3], [0.5] * 2, 1, 2, 2, ids[1:3]),
        Step(2, 12, "context", ids[3:], [0.5] * (num - 3), 1, num - 3, num - 3, ids[3:]),
    ]
    none = demo_rows.Row("none", text, ids, [2.0], num)
    return [none, demo_rows.Row("edited", text, ids, [1.0], 3, log=StepLog("chatcmpl-1", 8, 9, 0, steps))]


def test_page_escapes_and_colours() -> None:
    html = page.render(_page_rows(), _Bytes(), ["<fact>"], 8)
    assert "<fact>" not in html
    assert "&lt;fact&gt;" in html
    outputs = html.split('<pre class="tokens">')[1:]
    edited = next(part for part in outputs if 'class="o o1"' in part)
    for origin in (Origin.GENERATED, Origin.PREDICTION, Origin.CONTEXT):
        assert f'class="o o{origin:d}"' in edited
    assert "&lt;b" in edited
    assert 'title="step 2"' in edited


def test_the_page_is_one_file_and_runs_its_own_scripts_only() -> None:
    html = page.render(_page_rows(), _Bytes(), [], 8)
    assert not re.findall(
        r"""(?:src|href)\s*=|url\(|@import|style=|\son\w+=""", html.split("<body>")[1].split("<script>")[0]
    )
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy[1]) == hashes
    assert len(hashes) == 2
    # The texts of the answer cannot end the element that holds them.
    (data,) = re.findall(r'<script type="application/json" id="demo-data">(.*?)</script>', html, re.DOTALL)
    rows = json.loads(data)["rows"]
    assert "".join(rows[1]["output"]) == 'if a<b: "&"</script>'


def test_a_script_that_would_end_early_is_refused() -> None:
    with pytest.raises(ValueError, match="scripts: expected no '</', found it at 3"):
        html_page("t", [], scripts=["'a </script>'"])
    assert "script-src" not in html_page("t", [])


def test_every_row_is_explained_with_its_figures(tmp_path: Path) -> None:
    rows = {row.name: row for row in demo_recording.rows(tmp_path)}
    said = {name: page.explain(row, rows["none"]) for name, row in rows.items()}
    assert list(said) == ["none", "n-gram", "verbatim", "edited", "unrelated"]
    edited, unrelated = rows["edited"], rows["unrelated"]
    assert (
        f"{edited.by_source['prediction']['accepted']} of {edited.drafts('accepted')} accepted"
        in said["edited"]
    )
    assert "does not change the answer" in said["unrelated"]
    assert unrelated.by_source["prediction"]["accepted"] == 0
    assert f"{unrelated.by_source['context']['accepted']} from the prompt" in said["unrelated"]
    for row in (rows["verbatim"], edited, unrelated):
        assert row.log is not None
        assert (row.drafts("accepted"), row.drafts("rejected")) == (row.log.accepted, row.log.rejected)


def test_the_result_as_json(tmp_path: Path) -> None:
    rows = demo_recording.rows(tmp_path)
    found = json.loads(json.dumps(demo_rows.as_json(rows, "m", 32)))
    assert [row["prediction"] for row in found["rows"]] == [row.name for row in rows]
    assert found["rows"][3]["by_source"] == rows[3].by_source
    assert found["rows"][0]["step_log"] is None


def test_the_terminal_table_fits_80_columns_and_shows_every_source(tmp_path: Path) -> None:
    from rich.console import Console

    rows = demo_recording.rows(tmp_path)
    console = Console(width=80, record=True)
    with console.capture() as captured:
        console.print(page.terminal_table(rows))
    shown = captured.get()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for row in rows:
        for source, counts in row.by_source.items():
            assert source in shown
            assert all(str(count) in shown for count in counts.values() if count)


def test_table_says_when_an_output_differs() -> None:
    none = _row()
    other = _row("edited", 8, 0.5, identical=False)
    other.by_source = {
        "prediction": {"accepted": 12, "rejected": 5},
        "context": {"accepted": 3, "rejected": 0},
    }
    cells = dict(zip(page.HEADER, page.cells(other, none), strict=True))
    assert cells == {
        "prediction": "edited",
        "verification steps": "8",
        "fewer": "5.0×",
        "wall time": "0.50 s (0.10–9.00)",
        "speed-up": "4.0×",
        "accepted": "15 (prediction 12, context 3)",
        "rejected": "5 (prediction)",
        "output identical": "NO",
    }
