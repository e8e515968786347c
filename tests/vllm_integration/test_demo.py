"""The demo without a server: task, tokenizer, training, cache, command; its rows, thresholds, table and page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
from typer.testing import CliRunner

from gpu_align.tools.bench import command as bench
from gpu_align.tools.bench.client import Answer, BenchError, Counts
from gpu_align.tools.bench.measure import Result, Sample, Turn
from gpu_align.tools.cli import app
from gpu_align.tools.console import print_table
from gpu_align.tools.simulate.tokenizers import TextTokenizer, load_tokenizer, token_texts
from gpu_align.tools.step_log import Step, StepLog, dump
from tests.vllm_integration import demo_recording
from vllm_integration import demo
from vllm_integration.demo import model, page, task
from vllm_integration.demo import run as demo_run

TEXTS = [task.ORIGINAL, task.CALL, task.EDITED]
ANSWER = Answer("ab", 4, id="chatcmpl-1", token_ids=[5, 6, 7, 0], prompt_token_ids=[1, 2])


@pytest.fixture(scope="module")
def tok() -> Any:
    return model.train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="module")
def spelling(tok: Any, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The tokenizer as the page loads it, from the model's folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tok.save_pretrained(folder)
    return load_tokenizer(str(folder))


# --- the tokenizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [*TEXTS, "", "\r\n\ttab  \n", "naïve 日本 🌱 é", "<|end|x", "<|end|>", "\x00\x7f", "12345 = 0x1F"]
)
def test_the_tokenizer_and_the_page_spell_every_text(spelling: TextTokenizer, tok: Any, text: str) -> None:
    ids = model.encode(tok, text)
    assert tok.decode(ids) == text
    if "\0" not in text:
        assert "".join(token_texts(spelling, ids)) == text


def test_chat_template_and_files_on_disk(tok: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi\n"}]
    ids = model.encode_chat(tok, messages)
    assert tok.decode(ids) == "<|system|>be brief<|end|><|user|>hi\n<|end|><|assistant|>"
    assert ids.count(tok.eos_token_id) == 2
    tok.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert model.encode_chat(loaded, messages) == ids
    assert loaded.eos_token_id == tok.eos_token_id == 0
    assert model.train_tokenizer(TEXTS, 400).get_vocab() == tok.get_vocab()


# --- the model and its cache ----------------------------------------------------------------------------

SMALL = model.ModelSpec(
    vocab_size=300,
    hidden_size=32,
    layers=1,
    heads=1,
    intermediate_size=64,
    max_positions=128,
    learning_rate=1e-2,
    max_steps=300,
    prompts=tuple(f'[{{"role": "user", "content": "{verb} it"}}]' for verb in ("say", "call")),
    answers=("abc abd abc abe", "{abd abe}"),
)


def test_training_makes_a_folder_that_generates_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    monkeypatch.setattr(model, "stdlib_sources", lambda: TEXTS)
    seen: list[str] = []
    folder = model.make_model(SMALL, tmp_path, seen.append)
    assert folder == tmp_path / SMALL.key()
    assert [path.name for path in tmp_path.iterdir()] == [SMALL.key()]
    assert seen[1].startswith("answer alone: ")
    learnt = re.match(r"answer after the prompt: (\d+)/(\d+) tokens learnt", seen[-1])
    assert learnt is not None
    assert learnt[1] == learnt[2]

    tok = AutoTokenizer.from_pretrained(folder)
    llama = LlamaForCausalLM.from_pretrained(folder)
    for messages, answer in zip(SMALL.prompts, SMALL.answers, strict=True):
        ids = tok.apply_chat_template(json.loads(messages), tokenize=False, add_generation_prompt=True)
        prompt = tok(ids, return_tensors="pt", add_special_tokens=False)
        written = llama.generate(**prompt, do_sample=False, max_new_tokens=40)
        assert tok.decode(written[0, prompt["input_ids"].shape[1] :]) == answer + model.END


def test_training_that_fails_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "stdlib_sources", lambda: TEXTS)
    with pytest.raises(model.TrainingError, match="not learnt the answers in 3 steps"):
        model.make_model(replace(SMALL, max_steps=3), tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------------------------


def test_the_model_comes_from_the_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ``gpu-align demo`` and as a module."""
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[str | None, Path, bool]] = []
    monkeypatch.setattr(demo_run, "run_demo", lambda *options: calls.append(options) or 3)
    default = Path("demo_out")
    for given, words, expected in (
        ("", "", (None, default, True)),
        ("org/name", "--out x", ("org/name", Path("x"), True)),
        ("org/name", "--out=x --no-ngram", ("org/name", Path("x"), False)),
        ("org/name", "--model other/one --out y", ("other/one", Path("y"), True)),
    ):
        monkeypatch.setenv("MODEL", given)
        ended = CliRunner().invoke(app, ["demo", *words.split()])
        assert (ended.exit_code, calls.pop()) == (3, expected)
    monkeypatch.setenv("MODEL", "/no/such/folder")
    done = CliRunner().invoke(app, ["demo"])
    expected = "error: expected a model as its folder or its Hugging Face name, found '/no/such/folder'\n"
    assert (done.exit_code, done.stderr) == (2, expected)


@pytest.mark.parametrize(
    ("name", "ngram", "failure", "code"),
    [
        (None, True, BenchError("it ended", log="its log"), 2),
        ("org/name", False, KeyboardInterrupt(), 130),
    ],
)
def test_the_demo_measures_servers_with_the_same_model(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str | None,
    ngram: bool,
    failure: BaseException,
    code: int,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench, "measure_servers", lambda *given: seen.extend(given) or failure)
    monkeypatch.setattr(demo_run, "problems", list)
    monkeypatch.setattr(demo_run, "_tiny_model", lambda console: tmp_path / "tiny")
    assert demo.run_demo(name, tmp_path, ngram) == code
    served, session = seen
    assert served.model == (name or str(tmp_path / "tiny"))
    methods = [kind.speculation["method"] for kind in served.kinds.values()]
    assert methods == ["custom_class", "ngram"][: 1 + ngram]
    assert ("HF_HUB_OFFLINE" in served.env) == (name is None)
    assert [pair.messages() for pair in session.pairs] == [task.MESSAGES, task.CALL_MESSAGES]
    sent = session.predict(session.pairs, ["an output", "a call"])
    assert sent.texts == {
        "verbatim": ["an output"],
        "edited": [task.ORIGINAL],
        "call, edited": ["", {"type": "content", "content": task.ORIGINAL, "views": ["json"]}],
    }


# --- what is measured, the table and the page -----------------------------------------------------------


def _row(name: str = "none", steps: int = 40, seconds: float = 2.0, identical: bool = True) -> page.Row:
    return page.Row(name, ANSWER, [9.0, seconds, 0.1], steps, identical=identical)


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
def test_a_slower_or_different_answer_fails_the_demo(
    steps: int, seconds: float, identical: bool, expected: list[str]
) -> None:
    found = demo_run.failures([_row(), _row("verbatim", steps, seconds, identical)], "verbatim")
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
        page.read_steps(tmp_path, answer, timeout_s=0.1)


def test_rows_are_what_bench_has_measured(tmp_path: Path) -> None:
    (tmp_path / "chatcmpl-1-abcd.yaml").write_text(dump(_log()))
    drafts = Counter({("prediction", "accepted"): 1, ("prediction", "rejected"): 6})
    ngram = {"requests": 1, "vllm_drafts": 1, "vllm_drafted": 5, "vllm_accepted": 2}
    counts = {
        "none": Counts(Counter(generated=4), has_plugin=True),
        "edited": Counts(Counter(generated=4, plugin_steps=3), drafts, has_plugin=True),
        "n-gram": Counts(Counter(generated=4, **ngram)),
    }
    pieces = {"none": [(0.1, 1)] * 4, "edited": [(0.1, 1)] * 3, "n-gram": [(0.1, 1), (0.1, 3)]}
    result = Result()
    for number in range(demo_run.REPEATS):
        for mode in counts:
            sample = Sample(Turn(number, 1, mode), [(0, replace(ANSWER, pieces=pieces[mode]))], 0.5 + number)
            sample.counts = counts[mode]
            if (number, mode) == (2, "edited"):  # any round
                sample.different = [(0, "aB")]
            result.samples.append(sample)
    rows = page.rows_of(result, tmp_path, {"edited": "a prediction"}, {name: name for name in page.ROWS})
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
        assert row.answer == replace(ANSWER, pieces=pieces[row.name])
        assert (row.wall_s, row.seconds) == ([0.5, 1.5, 2.5], 1.5)
        assert (row.log is not None) == (row.name == "edited")
    assert rows[2].prediction == "a prediction"


# --- the page and the table --------------------------------------------------------------------------


class ByteTokenizer:
    """One token a byte of UTF-8."""

    name, vocab_size = "bytes", 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def _page_rows() -> list[page.Row]:
    text = 'if a<b: "&"</script>'
    ids = ByteTokenizer().encode(text)
    num = len(ids)
    steps = [
        Step(0, 9, "none", [], [], 0, 0, 0, ids[:1]),
        Step(1, 10, "prediction", ids[1:3], [0.5] * 2, 1, 2, 2, ids[1:3]),
        Step(2, 12, "context", ids[3:], [0.5] * (num - 3), 1, num - 3, num - 3, ids[3:]),
    ]
    answer = Answer(text, token_ids=ids)
    none = page.Row("none", answer, [2.0], num)
    drafted = {source: {"accepted": 2, "rejected": 0} for source in ("prediction", "context")}
    return [none, page.Row("edited", answer, [1.0], 3, drafted, log=StepLog("chatcmpl-1", 8, 9, 0, steps))]


def test_the_page_is_one_file_escapes_and_runs_its_own_scripts_only() -> None:
    html = page.render(_page_rows(), _page_rows(), ByteTokenizer(), "<fact>", 8)
    assert "<fact>" not in html
    assert "&lt;fact&gt;" in html
    assert re.findall(r'class="o (o\d)">token', html) == ["o0", "o1", "o2", "o0"]
    body = html.split("<body>")[1].split("<script>")[0]
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|style=|\son\w+=""", body)
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy[1]) == hashes
    assert len(hashes) == 2
    # The texts of the answer cannot end the element that holds them.
    (data,) = re.findall(r'<script type="application/json" id="demo-data">(.*?)</script>', html, re.DOTALL)
    assert "".join(json.loads(data)["rows"][1]["output"]) == 'if a<b: "&"</script>'


def test_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is written with its figures, and the terminal's table fits 80 columns."""
    found = demo_recording.rows(tmp_path)
    rows = {row.name: row for row in found}
    assert tuple(rows) == page.ROWS
    edited, context = rows["edited"], rows["context"]
    assert "prediction" not in context.by_source
    for row in (rows["verbatim"], edited, context):
        assert row.log is not None
        assert (row.drafts("accepted"), row.drafts("rejected")) == (row.log.accepted, row.log.rejected)

    written = json.loads(json.dumps(demo_run.as_json(found, "m")))["rows"]
    assert [row["prediction"] for row in written] == [*rows]
    assert written[4]["by_source"] == edited.by_source
    assert written[0]["step_log"] is None

    cells = [*page.narrow_cells(found)]
    print_table("", page.NARROW_HEADER, cells, words=["prediction"], folded=())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for row in found:
        for source, counts in row.by_source.items():
            assert {source, *(str(count) for count in counts.values() if count)} <= set(shown.split())
