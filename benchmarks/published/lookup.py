"""node-llama-cpp's input lookup: validated and refuted tokens of a summary and of edits.

Source: https://node-llama-cpp.withcat.ai/guide/token-prediction#input-lookup. The guide's example is a summary
with a shortest pattern of 2 and at most 2 predicted tokens. It prints validated and refuted tokens; no figures are
given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.published import texts
from gpu_align.predictors import InputLookupTokenPredictor, PredictedOutputTokenPredictor, TokenPredictor
from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.tokenizers import load_tokenizer

TOKENIZER = "tekken"
#: As many as any of `PREDICTORS` drafts.
K = 16
#: Longer than any text: what the documentation means by no limit.
UNLIMITED = 1 << 20
Maker = Callable[[list[int]], TokenPredictor]
#: Name → the predictor for an input.
PREDICTORS: dict[str, Maker] = {
    "example": lambda _: InputLookupTokenPredictor((2, 0), (1, 2)),
    "defaults": lambda _: InputLookupTokenPredictor(),
    "example_documented": lambda _: InputLookupTokenPredictor((2, UNLIMITED), (1, 2)),
    "defaults_documented": lambda _: InputLookupTokenPredictor((1, UNLIMITED)),
    "gpu_align": PredictedOutputTokenPredictor,
}


def tasks() -> dict[str, tuple[str, str]]:
    """Name → prompt and output. The prompt is the text and what to do with it."""

    def prompt(text: str, instruction: str) -> str:
        return f"{text}\n------\n\n{instruction}\n"

    report, snake = texts.read("report"), texts.read("snake")
    return {
        "summary": (prompt(texts.read("article"), "Summarize the above article."), texts.read("summary")),
        "rename": (
            prompt(report, "Rename data to orders. Answer with the whole file."),
            texts.renamed(report, "data", "orders"),
        ),
        "rewrite": (
            prompt(snake, "Make it multiplayer. Answer with the whole file."),
            texts.read("snake_multiplayer"),
        ),
    }


def run(predictor: TokenPredictor, prompt: list[int], output: list[int]) -> dict[str, int]:
    """One generation whose output is known; the prefill gives the first token."""
    found = replay(predictor, Record("", prompt, [], output), K)
    return {"steps": found.steps, "validated": found.accepted, "refuted": found.rejected}


def measure() -> dict[str, Any]:
    """Every task with every predictor."""
    tokenizer = load_tokenizer(TOKENIZER)
    found: dict[str, Any] = {"num_draft_tokens": K, "tasks": {}}
    for name, pair in tasks().items():
        prompt, output = (tokenizer.encode(text) for text in pair)
        runs = {label: run(make(prompt), prompt, output) for label, make in PREDICTORS.items()}
        found["tasks"][name] = {"prompt_tokens": len(prompt), "output_tokens": len(output), "runs": runs}
    return found
