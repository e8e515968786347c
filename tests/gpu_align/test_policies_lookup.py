"""prompt_lookup and input_lookup against plain scans, and against the code they stand for."""

from __future__ import annotations

import ast
import importlib.util
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.policies import (
    InputLookup,
    PromptLookup,
    prompt_lookup_transformers,
    prompt_lookup_vllm,
    prompt_lookup_vllm_v2,
)
from gpu_align.tools.policies.lookup import Tie

TOKENS = st.lists(st.integers(0, 3), max_size=30)
STEPS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=12)


def scan(text: list[int], sizes: range, prediction_min: int, limit: int, tie: Tie) -> list[int]:
    """What the documentation of `PromptLookup` says, word for word."""
    for n in reversed(sizes):
        ends = [
            e
            for e in range(n, len(text) - prediction_min + 1)
            if n <= len(text) and text[e - n : e] == text[-n:]
        ]
        if ends:
            e = max(ends) if tie == "latest" else min(ends)
            return text[e : e + limit]
    return []


@settings(max_examples=400, deadline=None)
@given(
    prompt=TOKENS,
    prediction=TOKENS,
    steps=STEPS,
    pattern=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    lengths=st.tuples(st.integers(1, 3), st.none() | st.integers(0, 4)),
    tie=st.sampled_from(["latest", "earliest"]),
    k=st.integers(1, 6),
)
def test_index_equals_the_scan(
    prompt: list[int],
    prediction: list[int],
    steps: list[list[int]],
    pattern: tuple[int, int],
    lengths: tuple[int, int | None],
    tie: Tie,
    k: int,
) -> None:
    smallest, more = pattern
    shortest, extra = lengths
    longest = None if extra is None else shortest + extra
    policy = PromptLookup(smallest, smallest + more, shortest, longest, tie)
    policy.start(prompt, prediction, k)
    text = prompt + prediction
    limit = k if longest is None else min(k, longest)
    for step in [*steps, [0]]:
        expected = scan(text, range(smallest, smallest + more + 1), shortest, limit, tie)
        assert policy.propose() == expected
        policy.extend(step)
        text = text + step


def test_tie_rules_on_a_worked_example() -> None:
    prediction = [7, 8, 1, 7, 8, 2]
    for tie, expected in (("latest", [2, 9, 7]), ("earliest", [1, 7, 8])):
        policy = PromptLookup(tie=tie)
        policy.start([], prediction, 3)
        policy.extend([9, 7, 8])
        assert policy.propose() == expected


def test_cost_of_a_step_does_not_grow_with_the_text() -> None:
    rng = random.Random(5)
    prediction = [rng.randrange(300) for _ in range(8000)]
    policy = PromptLookup()
    policy.start([], prediction, 64)
    started = time.process_time()
    for token in prediction:
        policy.propose()
        policy.extend([token])
    # About 0.1 s; rescanning 16,000 tokens for four pattern lengths at each of 8,000 steps takes minutes.
    assert time.process_time() - started < 10


def upstream(package: str, file: str, name: str, namespace: dict[str, Any]) -> Any:
    """One definition out of an installed package's source, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.origin).parent / file
    if not path.is_file():
        pytest.skip(f"{package} has no {file}")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
            return namespace[name]
    pytest.skip(f"{package}/{file} has no {name}")


def random_texts(count: int) -> Iterator[list[int]]:
    rng = random.Random(17)
    for _ in range(count):
        yield [rng.randrange(rng.choice([1, 2, 3, 5])) for _ in range(rng.randrange(1, 60))]


def test_vllm_preset_equals_vllm() -> None:
    find = upstream(
        "vllm",
        "v1/spec_decode/ngram_proposer.py",
        "_find_longest_matched_ngram_and_propose_tokens",
        {"np": np},
    )
    for text in random_texts(600):
        for low, high in ((5, 5), (1, 3), (2, 5)):
            policy = PromptLookup(low, high, tie="earliest")
            policy.start([], [], 7)
            policy.extend(text)
            theirs = find(np.array(text, dtype=np.int32), low, high, 10_000, 7)
            assert policy.propose() == theirs.tolist(), text


def test_vllm_presets_differ_in_the_tie_rule_only() -> None:
    prediction = [1, 2, 3, 4, 5, 60, 1, 2, 3, 4, 5, 70]
    for make, expected in ((prompt_lookup_vllm, [60, 1]), (prompt_lookup_vllm_v2, [70, 9])):
        policy = make()
        policy.start([], prediction, 2)
        policy.extend([9, 2, 3, 4, 5])
        assert policy.propose() == []  # five tokens are needed by default
        policy.extend([9, 1, 2, 3, 4, 5])
        assert policy.propose() == expected


def test_transformers_preset_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from typing import Optional

    generator = upstream(
        "transformers",
        "generation/candidate_generator.py",
        "PromptLookupCandidateGenerator",
        {"torch": torch, "Optional": Optional, "CandidateGenerator": object},
    )
    theirs = generator(num_output_tokens=10, max_matching_ngram_size=2, max_length=10_000)
    for text in random_texts(300):
        policy = prompt_lookup_transformers()
        policy.start([], [], 64)
        policy.extend(text)
        candidates, _ = theirs.get_candidates(torch.tensor([text]))
        assert policy.propose() == candidates[0, len(text) :].tolist(), text


class PlainInputLookup:
    """node-llama-cpp's predictor, followed line by line over plain lists."""

    def __init__(
        self, pattern_min: int, pattern_max: int | None, prediction_min: int, prediction_max: int
    ) -> None:
        self.pattern_min, self.pattern_max = pattern_min, pattern_max
        self.prediction_min, self.prediction_max = prediction_min, max(pattern_min, prediction_max)

    def start(self, text: list[int]) -> None:
        self.input, self.state = list(text), list(text)
        self.match: tuple[int, int] | None = None  # start and length in the input

    def push(self, tokens: list[int]) -> None:
        self.state += tokens
        if self.match is not None:
            self.match = (self.match[0], self.match[1] + len(tokens))

    def predict(self) -> list[int]:
        if not self.input or not self.state:
            return []
        if self.match is not None:
            start, length = self.match
            if self.input[start : start + length] != self.state[len(self.state) - length :]:
                self.match = None
            elif start + length < len(self.input):
                return self.input[start + length : start + length + self.prediction_max]
        best = (0, self.pattern_min - 1)
        for end in range(1, min(len(self.input), len(self.input) - self.prediction_min + 1) + 1):
            longest = min(end, len(self.state))
            if self.pattern_max is not None:
                longest = min(longest, self.pattern_max)
            length = 0
            while length < longest and self.input[end - 1 - length] == self.state[-1 - length]:
                length += 1
            if length > best[1]:
                best = (end, length)
        end, length = best
        draft = self.input[end : end + self.prediction_max]
        if end == 0 or len(draft) < self.prediction_min:
            return []
        self.match = (end - length, length)
        return draft


@settings(max_examples=400, deadline=None)
@given(
    prompt=TOKENS,
    prediction=TOKENS,
    steps=STEPS,
    pattern_min=st.integers(1, 3),
    pattern_more=st.none() | st.integers(0, 3),
    prediction_min=st.integers(1, 3),
    prediction_max=st.integers(1, 5),
    draft_in_prefill=st.booleans(),
)
def test_input_lookup_equals_the_plain_scan(
    prompt: list[int],
    prediction: list[int],
    steps: list[list[int]],
    pattern_min: int,
    pattern_more: int | None,
    prediction_min: int,
    prediction_max: int,
    draft_in_prefill: bool,
) -> None:
    pattern_max = None if pattern_more is None else pattern_min + pattern_more
    policy = InputLookup(pattern_min, pattern_max, prediction_min, prediction_max)
    plain = PlainInputLookup(pattern_min, pattern_max, prediction_min, prediction_max)
    policy.start(prompt, prediction, 64)
    plain.start(prompt + prediction)
    for at, step in enumerate(steps):
        if at or draft_in_prefill:
            assert policy.propose() == plain.predict()
        policy.extend(step)
        plain.push(step)
    assert policy.propose() == plain.predict()


def test_input_lookup_follows_its_match_instead_of_looking_again() -> None:
    policy = InputLookup(pattern_max=None)
    policy.start([], [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 0], 64)
    policy.extend([4])
    assert policy.propose() == [5, 6, 7]
    policy.extend([5])
    assert policy.propose() == [6, 7, 8]
    policy.extend([0])
    assert policy.propose() == []
