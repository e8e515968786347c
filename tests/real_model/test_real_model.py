"""A language model of 135M parameters: greedy answers are its own whatever is predicted, by vLLM and transformers.

`python -m benchmarks.real_model.model` fetches the model once; where it cannot, the tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from gpu_align import hf
from tests.vllm.engines import Request, V2Engine

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "real_model" / "SmolLM2-135M-Instruct"
TEXTS = (
    "Repeat this text exactly:\n\nThe bakery in Zürich opens at 6:30 and sells crème brûlée, coffee and bread.",
    'Repeat this JSON exactly:\n\n{"name": "Tomas Berg", "city": "Halvorsund", "tags": ["a", "b"], "n": 12}',
    "Repeat this list exactly:\n\n- two lamps\n- one table\n- three chairs",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    if not FOLDER.exists():
        fetch = [sys.executable, "-m", "benchmarks.real_model.model"]
        done = subprocess.run(fetch, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(done.stderr.strip().splitlines()[-1])
    return FOLDER


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def single_bytes(tokenizer: Any, output: list[int]) -> list[int]:
    """The same text in tokens that nothing is merged in."""
    pieces = tokenizer.convert_ids_to_tokens(output, skip_special_tokens=True)
    return tokenizer.convert_tokens_to_ids([byte for piece in pieces for byte in piece])


def half_a_character(tokenizer: Any, output: list[int]) -> list[int]:
    """The bytes up to the first of two that are a character together."""
    found = single_bytes(tokenizer, output)
    first = tokenizer.convert_tokens_to_ids("Ã")  # byte 0xC3
    return found[: found.index(first) + 1] if first in found else found


def of_text(change: Callable[[str], str]) -> Callable[[Any, list[int]], list[int]]:
    """A prediction that is text, encoded by itself: what touches its borders is not merged with it."""
    return lambda tokenizer, output: tokenizer.encode(
        change(tokenizer.decode(output, skip_special_tokens=True))
    )


END_OF_TURN = [2, 198, 1, 520, 9531, 198]  # <|im_end|>\n<|im_start|>assistant\n
#: What is predicted of an answer, and whether drafts from it have to be accepted.
PREDICTIONS: dict[str, tuple[Callable[[Any, list[int]], list[int]], bool]] = {
    "the answer": (lambda _, output: output, True),
    "its text from inside of a word on": (of_text(lambda text: text[2:]), True),
    "its text behind the prompt's last word": (of_text(lambda text: f"exactly{text}"), True),
    "its text up to the middle of a character": (half_a_character, False),
    "its bytes one by one": (single_bytes, False),
    "end tokens inside": (lambda _, output: [*output[:6], *END_OF_TURN, *output[6:]], True),
    "end tokens alone": (lambda _, output: END_OF_TURN * 4, False),
    "another text": (of_text(lambda text: "It was the best of times, it was the worst of times."), False),
}


@pytest.mark.vllm
@pytest.mark.parametrize(("runner", "count", "max_tokens"), [("V1", len(PREDICTIONS), 32), ("V2", 3, 8)])
def test_greedy_answers_are_the_models_own(
    runner: str, count: int, max_tokens: int, folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [prompt_of(tokenizer, TEXTS[i % len(TEXTS)]) for i in range(count)]
    params = {"ignore_eos": False}
    with V2Engine(folder, tmp_path, num_draft_tokens=16, runner=runner) as engine:
        plain = engine.run([Request(prompt, None, max_tokens, params=params) for prompt in prompts])
        rows = list(zip(PREDICTIONS.values(), prompts, plain.outputs, strict=False))
        requests = [
            Request(prompt, predict(tokenizer, output), max_tokens, arrives=i % 3, params=params)
            for i, ((predict, _), prompt, output) in enumerate(rows)
        ]
        run = engine.run(requests)
    assert run.outputs == plain.outputs
    assert all(1 < len(output) <= max_tokens for output in run.outputs)
    saved = [len(output) - 1 - run.verification_steps(i) for i, output in enumerate(run.outputs)]
    told = dict(zip(PREDICTIONS, saved, strict=False))
    assert [name for name in told if PREDICTIONS[name][1] and told[name] < max_tokens // 4] == [], told


def test_generate_writes_what_transformers_writes_in_fewer_passes(folder: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(count)
    counts: dict[str, int] = {}
    for text in TEXTS:
        prompt = tokenizer(tokenizer.decode(prompt_of(tokenizer, text)), return_tensors="pt")
        settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": prompt["attention_mask"]}
        ours = partial(hf.generate, model, prediction=text.split("\n\n")[1], tokenizer=tokenizer)
        lookup = partial(model.generate, prompt_lookup_num_tokens=10)
        ways = {"plain": model.generate, "lookup": lookup, "ours": ours}
        outputs = {}
        for way, generate in ways.items():
            passes = 0
            outputs[way] = generate(prompt["input_ids"], **settings)[0].tolist()
            counts[way] = counts.get(way, 0) + passes
        assert outputs["ours"] == outputs["plain"] == outputs["lookup"]
    assert 2 * counts["ours"] < counts["plain"], counts
    assert counts["lookup"] < counts["plain"], counts
