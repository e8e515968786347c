"""llama.cpp from Python: any predictor of gpu-align drafts for `llama_cpp.Llama`, through its `draft_model`.

::

    pip install llama-cpp-python                        # builds llama.cpp; `make llama-cpp` does this and the next
    python docs/examples/with_llama_cpp.py MODEL.gguf

llama-cpp-python verifies a draft in one pass and keeps the tokens that the model writes itself. `main` answers
one request without drafts, with llama-cpp-python's own lookup and with a prediction, and prints their passes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from gpu_align.predictors import PredictedOutputTokenPredictor, PredictorLoop, TokenPredictor

TEXT = '{\n  "name": "Tomas Berg",\n  "city": "Halvorsund",\n  "job": "electrician",\n  "since": "2021"\n}'


class PredictorDraft(LlamaDraftModel):
    """A `draft_model` around a predictor. `passes` counts the calls: one after each pass of the model.

    llama-cpp-python calls it with all tokens so far. Those that continue the last call's belong to the same
    sequence, others begin a new one. Set `prediction` before a request.
    """

    def __init__(self, predictor: TokenPredictor, num_draft_tokens: int = 32) -> None:
        self.prediction: Sequence[int] = ()
        self.passes = 0
        self._loop = PredictorLoop(predictor, num_draft_tokens=num_draft_tokens)
        self._tokens: list[int] = []

    def __call__(self, input_ids: np.ndarray[Any, Any], /, **_: Any) -> np.ndarray[Any, Any]:
        tokens, known = input_ids.tolist(), len(self._tokens)
        if 0 < known < len(tokens) and tokens[:known] == self._tokens:
            self._loop.push(tokens[known:])
        else:
            self._loop.start(tokens, self.prediction)
        self._tokens = tokens
        self.passes += 1
        return np.array(self._loop.draft(), dtype=np.intc)


class Lookup(LlamaPromptLookupDecoding):
    """llama-cpp-python's own lookup, whose passes are counted, too."""

    passes = 0

    def __call__(self, input_ids: np.ndarray[Any, Any], /, **_: Any) -> np.ndarray[Any, Any]:
        self.passes += 1
        return super().__call__(input_ids)


def drafters(num_draft_tokens: int = 32) -> dict[str, Any]:
    """By name: no drafts, llama-cpp-python's own lookup with its defaults, and ours."""
    ours = PredictorDraft(PredictedOutputTokenPredictor(), num_draft_tokens)
    return {"no drafts": None, "llama-cpp-python's lookup": Lookup(), "gpu-align": ours}


def load(path: str, draft_model: LlamaDraftModel | None) -> Llama:
    """The model on one thread."""
    return Llama(path, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False, draft_model=draft_model)


def complete(
    llama: Llama, prompt: Sequence[int], prediction: Sequence[int], max_tokens: int
) -> dict[str, Any]:
    """Greedy tokens, the end token left out; passes after the prefill; CPU seconds."""
    drafter = llama.draft_model
    if isinstance(drafter, PredictorDraft):
        drafter.prediction = prediction
    before, began, tokens = getattr(drafter, "passes", 0), time.process_time(), []
    for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        if token == llama.token_eos() or len(tokens) == max_tokens:
            break
        tokens.append(token)
    passes = len(tokens) if drafter is None else drafter.passes - before
    return {"tokens": tokens, "passes": passes, "cpu_s": time.process_time() - began}


def main() -> int:
    """Copy a JSON object, which is the prediction."""
    said = (("system", "You are a helpful AI assistant"), ("user", f"Repeat this JSON exactly:\n\n{TEXT}"))
    chat = (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"
    )
    for name, drafter in drafters().items():
        llama = load(sys.argv[1], drafter)
        prompt = llama.tokenize(chat.encode(), add_bos=False, special=True)
        found = complete(llama, prompt, llama.tokenize(TEXT.encode(), add_bos=False), 128)
        print(
            f"{name}: {len(found['tokens'])} tokens, {found['passes']} passes, {found['cpu_s']:.1f} s of CPU"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
