"""Recipes and earlier answers on the V2 runner, up to the usage: fewer steps, the same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from gpu_align.recipes import learn
from tests.vllm.engines import SHORT, Request, V2Engine, prompt_of

pytestmark = pytest.mark.vllm

#: No earlier answers.
APART = {"memory": False}


class Spoken(NamedTuple):
    """The tiny model with a tokenizer that cuts texts at words, and a recipe pack learned from what it writes.

    prompts: after each, the pack knows the model's greedy output of `num_tokens`.
    """

    model: Path
    pack: Path
    prompts: list[list[int]]
    num_tokens: int


@pytest.fixture(scope="module")
def spoken(
    tiny_model: Path,
    greedy: Callable[[list[int], int], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Spoken:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("spoken")
    shutil.copytree(tiny_model, directory, dirs_exist_ok=True)
    letters = "abcdefghijklmnopqrst"
    names = [f" {a}{b}" for a in letters for b in letters]  # 400 words of one token each
    words = ["<unk>", "<s>", "</s>", "<assistant>", *names]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" [a-z]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)

    num_tokens = 24
    prompts = [prompt_of(seed) for seed in range(80, 84)]
    texts = ["".join(words[t] for t in prompt + greedy(prompt, num_tokens)) for prompt in prompts]
    pack = directory / "pack.json.gz"
    learn([("texts", text) for text in texts * 3]).save(pack)
    return Spoken(directory, pack, prompts, num_tokens)


@pytest.fixture(scope="module")
def engine(spoken: Spoken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engine]:
    """K = 4, asynchronous scheduling, with a pack that knows what the model writes."""
    directory = tmp_path_factory.mktemp("recipes")
    with V2Engine(
        spoken.model,
        directory,
        num_draft_tokens=4,
        asynchronous=True,
        delay_counts=1,
        step_log=True,
        environment={
            "GPU_ALIGN_RECIPES": str(spoken.pack),
            **SHORT,
            "GPU_ALIGN_MEMORY_TOKENS": "1000",
        },
    ) as running:
        yield running


def test_recipes_change_steps_and_no_token(
    engine: V2Engine, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    n = spoken.num_tokens
    outputs = [greedy(prompt, n) for prompt in spoken.prompts]
    useless = [[7] * 12, outputs[1][::-1], None, list(range(300, 320))]
    run = engine.run(
        [Request(p, guess, n, extra=APART) for p, guess in zip(spoken.prompts, useless, strict=True)]
        + [Request(spoken.prompts[0], None, n, extra={"recipes": [], "memory": False})]
    )
    *answers, alone = run.answers
    assert run.outputs == [*outputs, outputs[0]]
    # A plain one-token step at a time, beside others that are drafted for.
    assert alone["usage"] is None
    assert run.of(4)[1:] == [(1, 0, 1)] * (n - 1)
    logs = {path.name.split("-")[0]: path for path in engine.steps.iterdir()}
    assert sorted(logs) == ["0", "1", "2", "3"]
    for index, answer in enumerate(answers):
        count = answer["usage"]["by_source"]["recipe"]
        assert 0 < count["accepted"] <= count["drafted"]
        assert run.verification_steps(index) < n - 1
        log = yaml.safe_load(logs[str(index)].read_text())
        assert log["usage"]["by_source"] == answer["usage"]["by_source"]
        assert [token for step in log["steps"] for token in step["new"]] == outputs[index]
        for step in log["steps"]:
            if step["proposed"]:
                assert step["candidate"]["source"] == step["source"]
    assert engine.warnings() == []
