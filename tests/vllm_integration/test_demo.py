"""The demo's parts, without a server: task, tokenizer, training loop, cache, process, command."""

from __future__ import annotations

import ast
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_align.tools.bench import command as bench
from gpu_align.tools.bench.client import BenchError
from gpu_align.tools.simulate.tokenizers import TextTokenizer, load_tokenizer, token_texts
from vllm_integration import demo
from vllm_integration.demo import __main__ as command_line
from vllm_integration.demo import model, task
from vllm_integration.demo import run as demo_run

TEXTS = [task.ORIGINAL, task.UNRELATED, task.EDITED]


@pytest.fixture(scope="module")
def tok() -> Any:
    return model.train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="module")
def spelling(tok: Any, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The tokenizer as the page loads it, from the model's folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tok.save_pretrained(folder)
    return load_tokenizer(str(folder))


# --- the task -------------------------------------------------------------------------------------------


def test_edits_turn_the_original_into_the_answer() -> None:
    for text in (task.ORIGINAL, task.EDITED):
        ast.parse(text)
    gone = {"DRY = 0.30": 1, "export": 1, "pick": 3}
    come = {"DRY = 0.35\n": 1, "driest(": 3, "def days_left(self, daily):": 1, "days_left(daily=4)": 1}
    for words, count in gone.items():
        assert (task.ORIGINAL.count(words), task.EDITED.count(words)) == (count, 0)
    for words, count in come.items():
        assert (task.ORIGINAL.count(words), task.EDITED.count(words)) == (0, count)


def test_both_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (task.ORIGINAL, task.EDITED):
        exec(compile(text, task.FILE_NAME, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "enough for 5 days"
    # A higher limit waters more, so the edit shows in what is left.
    assert [printed[2], printed[5]] == ["21.2 litres left", "20.1 litres left"]


def test_the_prompt_holds_the_file_and_every_instruction() -> None:
    assert task.MESSAGES == [{"role": "user", "content": task.PROMPT}]
    assert task.ORIGINAL in task.PROMPT
    assert task.PROMPT.count("rename") == 1
    for instruction, _, _ in task.EDITS:
        assert instruction in task.PROMPT


# --- the tokenizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [*TEXTS, "", "\r\n\ttab  \n", "naïve 日本 🌱 é", "<|end|x", "\x00\x7f", "12345 = 0x1F"]
)
def test_tokenizer_round_trip(tok: Any, text: str) -> None:
    ids = model.encode(tok, text)
    assert tok.decode(ids) == text


@pytest.mark.parametrize("text", [*TEXTS, "", "\r\n\ttab  \n", "naïve 日本 🌱 é", "<|end|x", "<|end|>"])
def test_the_page_spells_every_token(spelling: TextTokenizer, tok: Any, text: str) -> None:
    assert "".join(token_texts(spelling, model.encode(tok, text))) == text


def test_a_character_of_several_tokens_shows_once(spelling: TextTokenizer, tok: Any) -> None:
    ids = model.encode(tok, "a🌱b")
    assert len(ids) == 6  # four bytes that training has never seen together
    assert token_texts(spelling, ids) == ["a", "", "", "", "🌱", "b"]


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


def test_tokenizer_is_deterministic(tok: Any) -> None:
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
    prompt='[{"role": "user", "content": "say it"}]',
    answer="abc abd abc abe",
)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"layers": 5}, {"answer": "x"}, {"prompt": "[]"}, {"chat_template": "x"}, {"pieces": "x"}],
)
def test_cache_key_follows_the_spec(change: dict[str, Any]) -> None:
    assert model.ModelSpec().key() == model.ModelSpec().key()
    assert replace(model.ModelSpec(), **change).key() != model.ModelSpec().key()


def test_training_makes_a_folder_that_generates_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    monkeypatch.setattr(model, "stdlib_sources", lambda: TEXTS)
    seen: list[model.Progress] = []
    assert model.cached(SMALL, tmp_path) is None
    folder = model.make_model(SMALL, tmp_path, seen.append)
    assert model.cached(SMALL, tmp_path) == folder == tmp_path / SMALL.key()
    assert [path.name for path in tmp_path.iterdir()] == [SMALL.key()]
    assert seen[0].learnt < seen[-1].learnt == seen[-1].total
    assert [now.with_prompt for now in (seen[0], seen[-1])] == [False, True]

    tok = AutoTokenizer.from_pretrained(folder)
    llama = LlamaForCausalLM.from_pretrained(folder)
    prompt = tok(
        tok.apply_chat_template(
            [{"role": "user", "content": "say it"}], tokenize=False, add_generation_prompt=True
        ),
        return_tensors="pt",
        add_special_tokens=False,
    )
    written = llama.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert tok.decode(written) == SMALL.answer + model.END


def test_training_that_fails_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "stdlib_sources", lambda: TEXTS)
    with pytest.raises(model.TrainingError, match="not learnt the answer in 3 steps"):
        model.make_model(replace(SMALL, max_steps=3), tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------------------------


def test_the_model_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str | None, Path, bool]] = []
    monkeypatch.setattr(command_line, "run_demo", lambda *args: calls.append(args) or 0)
    monkeypatch.setenv("MODEL", "")
    assert command_line.main([]) == 0
    monkeypatch.setenv("MODEL", "org/name")
    command_line.main(["--out-dir", "x"])
    command_line.main(["--model", "other/one", "--no-ngram"])
    default = Path("demo_out")
    assert calls == [(None, default, True), ("org/name", Path("x"), True), ("other/one", default, False)]


WRONG = """
--no-such-option
--no-such-option=3
-x
-Z
--hlep
--help=3
-?
tiny
org/name more
--model
--model ''
--model --no-ngram
--model /no/such/folder
--model ./missing
--model folder
--model file
--model a/b/c
--model 'two words'
--model https://huggingface.co/a/b
--model -name
--out-dir
--out-dir ''
--out-dir file
--out-dir file/deeper/still
--no-ngram=3
--no-ngram yes
--no-ngra --model
"""


@pytest.mark.parametrize(
    "line", [*WRONG.strip().split("\n"), f"--out-dir {'x' * 300}", f"--model {'x' * 300}"]
)
def test_a_wrong_use_is_one_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def started(*_: object) -> int:
        raise AssertionError("the demo has begun")

    monkeypatch.setattr(command_line, "run_demo", started)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    try:
        code = command_line.main(shlex.split(line))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else -1
    assert code == 2
    told = capsys.readouterr()
    (said,) = told.err.splitlines()
    assert said.startswith("demo: ")
    assert told.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_variable_can_be_wrong_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "/no/such/folder")
    assert command_line.main([]) == 2
    expected = "demo: expected a model as its folder or its Hugging Face name, found '/no/such/folder'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("model", "ngram", "timeout_s", "failure", "code"),
    [
        (None, True, 300.0, BenchError("it ended", log="its log"), 2),
        ("org/name", False, 3600.0, KeyboardInterrupt(), 130),
    ],
)
def test_what_bench_is_given(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str | None,
    ngram: bool,
    timeout_s: float,
    failure: BaseException,
    code: int,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench, "measure_servers", lambda *given: seen.extend(given) or failure)
    monkeypatch.setattr(demo_run, "problems", list)
    monkeypatch.setattr(demo_run, "_tiny_model", lambda console: tmp_path / "tiny")
    monkeypatch.setenv("DEMO_DTYPE", "bfloat16")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "old.yaml").write_text("")
    assert demo.run_demo(model, tmp_path, ngram) == code
    served, [pair], settings, _, predict = seen
    assert (served.model, served.timeout_s) == (model or str(tmp_path / "tiny"), timeout_s)
    methods = [kind.speculation["method"] for kind in served.kinds.values()]
    assert methods == ["custom_class", "ngram"][: 1 + ngram]
    options = dict(zip(served.arguments[-4::2], served.arguments[-3::2], strict=True))
    name, dtype = ("tiny-editor", "float32") if model is None else (model, "bfloat16")
    assert options == {"--served-model-name": name, "--dtype": dtype}
    assert served.env["GPU_ALIGN_DEBUG_DIR"] == str(tmp_path / "steps")
    assert ("HF_HUB_OFFLINE" in served.env) == (model is None)
    assert served.logs == tmp_path
    assert served.body == {"return_token_ids": True}
    assert list((tmp_path / "steps").iterdir()) == []
    assert settings.modes == ("none", "verbatim", "edited", "unrelated", "n-gram")[: 4 + ngram]
    assert (settings.concurrency, settings.rounds, settings.requests_at(1, 1)) == ((1,), 3, 1)
    assert pair.messages() == task.MESSAGES
    assert predict([pair], ["an output"]).texts == {
        "verbatim": ["an output"],
        "edited": [task.ORIGINAL],
        "unrelated": [task.UNRELATED],
    }
    shown = capsys.readouterr().out
    assert ("demo: it ended\nits log" if code == 2 else "demo: interrupted") in shown


def test_a_folder_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(demo_run, "problems", list)
    (tmp_path / "out").symlink_to(tmp_path / "nowhere" / "at" / "all")
    assert demo.run_demo(out_dir=tmp_path / "out") == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("demo: ")


def test_what_is_missing_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = demo_run.find_spec
    monkeypatch.setattr(demo_run, "find_spec", lambda name: None if name == "httpx" else real(name))
    assert demo.run_demo(out_dir=tmp_path / "out") == 2
    assert "not installed: httpx. Run: pip install -e '.[cpu,demo]'" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_companion_that_does_not_fit_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torchaudio.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.partition(".")[0] == "torchaudio":
            monkeypatch.delitem(sys.modules, name)
    (line,) = [line for line in demo_run.problems() if line.startswith("torchaudio")]
    assert "libcudart.so.13" in line
    assert line.endswith("pip uninstall -y torchaudio")
