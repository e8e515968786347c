"""The demo without a server: training, command, what it measures and promises, its page."""

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

from gpu_align.drafter.step_log import Step, StepLog
from gpu_align.tools.bench.client import Answer
from vllm_integration.demo import model, page, task
from vllm_integration.demo import run as demo_run

TEXTS = [task.ORIGINAL, task.CALL, task.EDITED]
ANSWER = Answer("ab", 4, id="chatcmpl-1", token_ids=[5, 6, 7, 0], prompt_token_ids=[1, 2])


def test_the_servers_template_adds_calls_and_changes_no_prompt() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": json.loads(task.CALL)}]}
    tokenizer = model.train_tokenizer(TEXTS, 400)
    own, served = (
        [
            tokenizer.apply_chat_template(
                each, chat_template=template, tokenize=False, add_generation_prompt=True
            )
            for each in (task.CALL_MESSAGES, [*task.CALL_MESSAGES, call])
        ]
        for template in (model.CHAT_TEMPLATE, model.CALLS_TEMPLATE)
    )
    assert own[0] == served[0]
    assert f"<|assistant|>{task.CALL}<|end|>" in served[1]


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


# --- the page and the table --------------------------------------------------------------------------


#: A token is a byte of UTF-8.
BYTES: Any = SimpleNamespace(name="bytes", vocab_size=256, token_bytes=lambda token_id: bytes([token_id]))


def _page_rows() -> list[page.Row]:
    text = 'if a<b: "&"</script>'
    ids = list(text.encode())
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
    html = page.render(_page_rows(), _page_rows(), BYTES, "<fact>", 8)
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
