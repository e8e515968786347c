"""What the demo measures, and what it makes of it: counts, thresholds, table and page, without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_align.step_log import Step, StepLog, dump
from gpu_align.tools.html import Origin
from gpu_align.tools.html import page as html_page
from tests.vllm_integration import demo_recording
from vllm_integration.demo import measure, page, task

# --- measuring ------------------------------------------------------------------------------------------


def _row(name: str = "none", steps: int = 40, seconds: float = 2.0, text: str = "ab") -> measure.Row:
    return measure.Row(name, text, [5, 6, 7, 0], [9.0, seconds, 0.1], steps, origins=[0] * 4)


@pytest.mark.parametrize(
    ("steps", "seconds", "text", "expected"),
    [
        (10, 1.9, "ab", []),
        (11, 1.9, "ab", ["fewer verification steps"]),
        (10, 2.0, "ab", ["expected less than 2.00 s"]),
        (10, 1.9, "aB", ["output differs"]),
        (40, 3.0, "", ["output differs", "fewer verification steps", "expected less than 2.00 s"]),
    ],
)
def test_what_the_demo_promises(steps: int, seconds: float, text: str, expected: list[str]) -> None:
    none, verbatim = _row(), _row("verbatim", steps, seconds, text)
    measure.compare([none, verbatim])
    found = measure.failures(none, verbatim, [none, verbatim])
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


def test_origins_come_from_the_step_log(tmp_path: Path) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log()))
    row = _row()
    measure.fill_from_log(row, measure.read_steps(tmp_path, "chatcmpl-1"))
    assert row.origins == [Origin.GENERATED, Origin.PREDICTION, Origin.GENERATED, Origin.CONTEXT]
    assert row.token_steps == [0, 1, 1, 2]
    assert (row.steps, row.accepted, row.rejected) == (3, 2, 7)


def test_a_step_log_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(measure.MeasurementError, match="3 tokens are not the answer's 4"):
        measure.fill_from_log(_row(), _log(2))
    with pytest.raises(measure.MeasurementError, match="no step log of chatcmpl-2"):
        measure.read_steps(tmp_path, "chatcmpl-2", timeout_s=0.1)


class _Client:
    """Answers like the openai client; `answers` holds one (text, token ids) a request."""

    def __init__(self, answers: list[tuple[str, list[int]]]) -> None:
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, **body: Any) -> Any:
        self.bodies.append(body)
        text, ids = self.answers.pop(0)
        choice = SimpleNamespace(message=SimpleNamespace(content=text), model_extra={"token_ids": ids})
        return SimpleNamespace(id="chatcmpl-1", choices=[choice], model_extra={"prompt_token_ids": [1, 2]})


REQUEST = measure.Request("m", task.messages(), 64)


ANSWER = ("ab", [5, 6, 7, 0])


def _rounds(
    client: _Client, folder: Path, done: list[str] | None = None, **predictions: str
) -> list[measure.Row]:
    made = {name: (lambda output, text=text: text or output) for name, text in predictions.items()}
    names = done if done is not None else []
    return measure.measure_rounds(client, REQUEST, made, folder, names.append)


def test_a_row_without_prediction_counts_its_tokens(tmp_path: Path) -> None:
    client = _Client([ANSWER] * measure.REPEATS)
    (row,) = _rounds(client, tmp_path)
    assert (row.name, row.steps, row.accepted, row.rejected) == ("none", 4, 0, 0)
    assert row.prompt_token_ids == [1, 2]
    assert len(row.wall_s) == measure.REPEATS
    assert all("prediction" not in body and body["temperature"] == 0 for body in client.bodies)


def test_each_round_sends_every_request_once(tmp_path: Path) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log()))
    client = _Client([ANSWER] * 3 * measure.REPEATS)
    done: list[str] = []
    rows = _rounds(client, tmp_path, done, verbatim="", edited="before")
    assert [row.name for row in rows] == ["none", "verbatim", "edited"]
    assert done == ["none", "verbatim", "edited"] * measure.REPEATS
    # As OpenAI defines it; an empty one here stands for the output without a prediction.
    assert [body.get("prediction") for body in client.bodies[:3]] == [
        None,
        {"type": "content", "content": "ab"},
        {"type": "content", "content": "before"},
    ]
    assert [row.prediction for row in rows] == [None, "ab", "before"]
    assert [row.steps for row in rows] == [4, 3, 3]
    assert all(len(row.wall_s) == measure.REPEATS for row in rows)
    assert rows[1].by_source == {"prediction": (1, 6), "context": (1, 1)}


@pytest.mark.parametrize(
    ("answers", "message"),
    [([("", [0])], "expected an answer"), ([("ab", [5, 0]), ("ac", [5, 0])], "two equal requests differ")],
)
def test_answers_that_cannot_be_measured(
    answers: list[tuple[str, list[int]]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(measure.MeasurementError, match=message):
        _rounds(_Client(answers + answers), tmp_path)


_METRICS = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="m"} 32.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1.2e+02
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 7.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 3.0
"""


def test_the_counters_of_a_server_without_a_step_log() -> None:
    before = measure.parse_draft_counters(_METRICS)
    assert list(before.values()) == [32, 120, 10]
    generated, drafted, accepted = before
    row = _row()
    measure.fill_from_counters(row, before, {generated: 36, drafted: 125, accepted: 13})
    # 4 tokens, of which 3 were drafts: one pass.
    assert (row.steps, row.drafted, row.accepted, row.rejected) == (1, 5, 3, 2)
    assert row.by_source == {"n-gram": (3, 2)}
    for counts in ({generated: 35}, {accepted: 16}, {drafted: 110}):
        with pytest.raises(measure.MeasurementError, match="expected 4 tokens generated"):
            measure.fill_from_counters(row, before, {generated: 36, drafted: 125, accepted: 13, **counts})
    with pytest.raises(measure.MeasurementError, match="counter vllm:generation_tokens_total, but it is"):
        measure.parse_draft_counters("# nothing")


def test_an_ngram_row_is_measured_from_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client([ANSWER] * measure.REPEATS)
    names = list(measure.parse_draft_counters(_METRICS))

    def counters(url: str) -> dict[str, int]:
        assert url == "http://x/metrics"
        answered = measure.REPEATS - len(client.answers)
        return dict(zip(names, (4 * answered, 8 * answered, 2 * answered), strict=True))

    monkeypatch.setattr(measure, "read_draft_counters", counters)
    row = measure.measure_ngram(client, REQUEST, "http://x/metrics", lambda name: None)
    assert (row.name, row.steps, row.drafted, row.accepted) == ("n-gram", 2, 8, 2)
    assert len(row.wall_s) == measure.REPEATS


# --- the page and the table --------------------------------------------------------------------------


class _Bytes:
    """One token a byte."""

    name, vocab_size = "bytes", 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def _page_rows() -> list[measure.Row]:
    text = 'if a<b: "&"</script>'
    ids = _Bytes().encode(text)
    num = len(ids)
    none = measure.Row("none", text, ids, [2.0], num, origins=[0] * num, token_steps=list(range(num)))
    origins = [Origin.GENERATED] + [Origin.PREDICTION] * (num - 2) + [Origin.CONTEXT]
    edited = measure.Row("edited", text, ids, [1.0], 2, origins=origins, token_steps=[0] + [1] * (num - 1))
    proposed = ids[1:]
    steps = [
        Step(0, 9, "none", [], [], 0, 0, 0, ids[:1]),
        Step(1, 10, "context", proposed, [0.5] * (num - 1), 1, num - 1, num - 1, proposed),
    ]
    edited.log = StepLog("chatcmpl-1", 8, 9, 0, steps)
    return [none, edited]


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
        f"{edited.by_source['prediction'][0]} of {edited.accepted} accepted drafts come from it"
        in said["edited"]
    )
    assert "does not change the answer" in said["unrelated"]
    assert unrelated.by_source["prediction"][0] == 0
    assert f"{unrelated.by_source['context'][0]} from the prompt" in said["unrelated"]
    for name, row in rows.items():
        by_source = row.by_source.values()
        assert sum(accepted for accepted, _ in by_source) == row.accepted, name
        assert sum(rejected for _, rejected in by_source) == row.rejected, name


def test_the_result_as_json(tmp_path: Path) -> None:
    rows = demo_recording.rows(tmp_path)
    found = json.loads(json.dumps(measure.result(rows, "m", 32)))
    assert [row["prediction"] for row in found["rows"]] == [row.name for row in rows]
    assert found["rows"][3]["by_source"]["prediction"]["accepted"] == rows[3].by_source["prediction"][0]
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
            assert all(str(count) in shown for count in counts if count)


def test_table_says_when_an_output_differs() -> None:
    none = _row()
    other = replace(_row("edited", 8, 0.5), identical=False, drafted=20, accepted=15)
    other.by_source = {"prediction": (12, 5), "context": (3, 0)}
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
