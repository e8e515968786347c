"""The example for llama-cpp-python, with a stand-in that verifies drafts as `Llama.generate` does."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.modules import load

END = 0


class Llama:
    """Answers each prompt with the text after its blank line, a token a byte, and counts its passes."""

    made: ClassVar[list[Llama]] = []

    def __init__(self, path: str, draft_model: Any = None, **_: Any) -> None:
        self.draft_model, self.passes = draft_model, 0
        self.made.append(self)

    def tokenize(self, text: bytes, **_: Any) -> list[int]:
        return list(text)

    def token_eos(self) -> int:
        return END

    def generate(self, prompt: list[int], **_: Any) -> Iterator[int]:
        text = bytes(prompt).split(b"\n\n", 1)[1].split(b"<|im_end|>")[0]
        output, draft, written = [*text, END], [], list(prompt)
        while output:
            self.passes += 1
            accepted = [*draft, None]
            for wanted in accepted:
                token = output.pop(0)
                written.append(token)
                yield token
                if token != wanted or not output:
                    break
            if self.draft_model is not None:
                draft = self.draft_model(np.array(written, np.intc)).tolist()


class Lookup:
    """llama-cpp-python's: no match here."""

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        return np.array([], np.intc)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, speculative = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    package.Llama = Llama  # type: ignore[attr-defined]
    speculative.LlamaDraftModel = object  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = Lookup  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.setattr(Llama, "made", [])
    return load("docs/examples/with_llama_cpp.py")


def test_the_example_drafts_from_the_prediction(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["with_llama_cpp.py", "model.gguf"])
    assert example.main() == 0
    found = {
        name: (int(tokens), int(passes))
        for name, tokens, passes in re.findall(
            r"^(.*): (\d+) tokens, (\d+) passes", capsys.readouterr().out, re.M
        )
    }
    length = len(example.TEXT)
    assert {tokens for tokens, _ in found.values()} == {length}
    assert found["no drafts"][1] == found["llama-cpp-python's lookup"][1] == length
    assert found["gpu-align"][1] <= length // 8
    assert [llama.passes - 1 for llama in Llama.made] == [passes for _, passes in found.values()]


def test_a_second_request_begins_anew(example: Any) -> None:
    llama = example.load("model.gguf", example.drafters()["gpu-align"])
    for text in ("one two three four", "five six seven eight nine"):
        prompt = list(f"Repeat:\n\n{text}<|im_end|>".encode())
        made = example.complete(llama, prompt, list(text.encode()), 100)
        assert bytes(made["tokens"]).decode() == text
        assert made["passes"] < len(text) // 4
    stopped = example.complete(llama, prompt, [], 5)
    assert bytes(stopped["tokens"]).decode() == text[:5]
