"""Each policy drafts what its rule says in plain Python, keeps the contract of `Policy`, and names bad input."""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import DrafterConfig, Recipes, Source
from gpu_align.policies import (
    POLICIES,
    RECIPE_POLICIES,
    Cursor,
    InputLookup,
    Myers,
    OpenAI,
    Policy,
    PromptLookup,
    RecipeLookup,
    StaticText,
    SuffixDecoding,
    guess_line_end,
    prompt_lookup_transformers,
)
from gpu_align.predictors import DisposedError, PredictorOptions
from gpu_align.simulate import Record
from gpu_align.tools.policies import GUESSED_LINE_LENGTH
from gpu_align.tools.simulate.policies import our_drafter

lcs_seq = pytest.importorskip("rapidfuzz.distance").LCSseq

Ids = list[int]
#: Prompt, prediction, output so far → draft, however long.
Rule = Callable[[Ids, Ids, Ids], Ids]
TOKENS = st.lists(st.integers(0, 3), max_size=70)


@st.composite
def outputs(draw: Any) -> tuple[Ids, list[Ids]]:
    """A prediction, and an output in steps that follows it with edits, or does not."""
    prediction = draw(TOKENS)
    output = list(prediction)
    for at, length, new in draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(0, 9), TOKENS.map(lambda t: t[:6])), max_size=4)
    ):
        output[at : at + length] = new
    output = draw(st.sampled_from([output, draw(TOKENS)]))
    steps, done = [], 0
    for width in draw(st.lists(st.integers(1, 9), min_size=70, max_size=70)):
        steps.append(output[done : done + width])
        done += width
    return prediction, [step for step in steps if step]


def cursor_rule(data: Any) -> tuple[Policy, Rule]:
    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        return prediction[len(output) :] if prediction[: len(output)] == output else []

    return Cursor(), rule


def openai_rule(data: Any) -> tuple[Policy, Rule]:
    lookahead, after, delay = (data.draw(st.integers(low, 4)) for low in (1, 1, 0))

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        cursor, wait, diverged = 0, 0, None
        for n, token in enumerate(output, start=1):
            if diverged is None and prediction[cursor : cursor + 1] == [token]:
                cursor, wait = cursor + 1, max(0, wait - 1)
            elif diverged is None:
                diverged = n
            elif n - diverged >= after:
                ends = [
                    end
                    for end in range(after, len(prediction) + 1)
                    if prediction[end - after : end] == output[n - after : n]
                ]
                if ends:
                    cursor = min((end for end in ends if end > cursor), default=ends[-1])
                    diverged, wait = None, delay
        return prediction[cursor : cursor + lookahead] if diverged is None and not wait else []

    return OpenAI(lookahead, after, delay), rule


def myers_rule(data: Any) -> tuple[Policy, Rule]:
    """The end of a shortest edit script that ends in a match, by the table of all distances."""

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        row = list(range(len(prediction) + 1))
        for y, token in enumerate(output, start=1):
            diagonal, row[0] = row[0], y
            for x, other in enumerate(prediction, start=1):
                best = diagonal if token == other else min(row[x], row[x - 1]) + 1
                diagonal, row[x] = row[x], best
        least = min(row)
        ends = (
            [x for x in range(1, len(row)) if prediction[x - 1] == output[-1] and row[x] == least]
            if output
            else [0]
        )
        return prediction[max(ends) :] if ends else []

    return Myers(), rule


def prompt_lookup_rule(data: Any) -> tuple[Policy, Rule]:
    """What the documentation of `PromptLookup` says, word for word."""
    low, shortest = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    high, longest = low + data.draw(st.integers(0, 3)), data.draw(st.none() | st.integers(3, 7))
    tie = data.draw(st.sampled_from(["latest", "earliest"]))

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        text = prompt + prediction + output
        for n in range(min(high, len(text)), low - 1, -1):
            if ends := [e for e in range(n, len(text) - shortest + 1) if text[e - n : e] == text[-n:]]:
                end = max(ends) if tie == "latest" else min(ends)
                return text[end:] if longest is None else text[end : end + longest]
        return []

    return PromptLookup(low, high, shortest, longest, tie), rule


def input_lookup_rule(data: Any) -> tuple[Policy, Rule]:
    """node-llama-cpp's predictor, followed line by line over plain lists."""
    low, shortest, longest = (data.draw(st.integers(1, most)) for most in (3, 3, 5))
    more = data.draw(st.none() | st.integers(0, 3))
    high = None if more is None else low + more
    match: list[int] = []  # where the match starts in the input, and in the state

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        text = prompt + prediction
        state, width = text + output, max(low, longest)
        if not text:
            return []
        if match:
            start, length = match[0], len(state) - match[1]
            if text[start : start + length] != state[len(state) - length :]:
                match.clear()
            elif start + length < len(text):
                return text[start + length : start + length + width]
        best = (0, low - 1)
        for end in range(1, min(len(text), len(text) - shortest + 1) + 1):
            most = min(end, len(state)) if high is None else min(end, len(state), high)
            length = 0
            while length < most and text[end - 1 - length] == state[-1 - length]:
                length += 1
            if length > best[1]:
                best = (end, length)
        end, length = best
        draft = text[end : end + width]
        if end == 0 or len(draft) < shortest:
            return []
        match[:] = end - length, len(state) - length
        return draft

    return InputLookup(low, high, shortest, longest), rule


def recipe_rule(data: Any) -> tuple[Policy, Rule]:
    entries = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.125, 0.25, 0.5, 1.0])), max_size=5)
    contexts = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
    table, least = (
        data.draw(st.dictionaries(contexts, entries, max_size=12)),
        data.draw(st.sampled_from([0.0, 0.25, 0.5])),
    )
    rows = [
        (list(context), [t for t, _ in entry], sorted((p for _, p in entry), reverse=True))
        for context, entry in table.items()
    ]

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        tokens, best = prompt + output, []
        for context, continuation, alive in sorted(rows, key=lambda row: len(row[0])):
            if tokens[-len(context) :] == context:
                best = [t for t, p in zip(continuation, alive, strict=True) if p >= least]
        return best

    return RecipeLookup(Recipes.from_lists(rows), least), rule


@pytest.mark.parametrize(
    "ruled", [cursor_rule, openai_rule, myers_rule, prompt_lookup_rule, input_lookup_rule, recipe_rule]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), prompt=TOKENS, texts=outputs(), k=st.integers(1, 9), prefill=st.booleans())
def test_a_policy_drafts_what_its_rule_says(
    ruled: Callable[[Any], tuple[Policy, Rule]],
    data: Any,
    prompt: Ids,
    texts: tuple[Ids, list[Ids]],
    k: int,
    prefill: bool,
) -> None:
    policy, rule = ruled(data)
    prediction, steps = texts
    policy.start([5], [6], k)
    policy.extend([5])  # of another sequence: forgotten
    policy.start(prompt, prediction, k)
    output: Ids = []
    for step in [*steps, []]:
        if output or prefill:
            assert policy.propose() == rule(prompt, prediction, output)[:k]
        if step:
            policy.extend(step)
            output += step


ALL = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


@ALL
@settings(max_examples=25, deadline=None)
@given(prompt=TOKENS, texts=outputs(), k=st.integers(1, 9))
def test_a_draft_is_a_short_slice_of_what_is_known(
    make: Callable[[], Policy], prompt: Ids, texts: tuple[Ids, list[Ids]], k: int
) -> None:
    prediction, steps = texts
    policy, again, given_prediction = make(), make(), list(prediction)
    again.start([1], [2, 1], 4)
    again.propose()
    again.extend([1])
    policy.start(prompt, given_prediction, k)
    again.start(prompt, prediction, k)
    given_prediction[:] = [9] * len(prediction)
    known = prompt + prediction
    for step in steps:
        draft = policy.propose()
        assert len(draft) <= k
        assert any(known[i : i + len(draft)] == draft for i in range(len(known) + 1))
        policy.propose().append(99)
        assert policy.propose() == draft == again.propose()
        policy.extend(step)
        again.extend(step)
        known += step


@ALL
def test_a_policy_is_a_predictor(make: Callable[[], Policy]) -> None:
    prediction = [1, 2, 3, 4, 1, 2, 3, 5, 1]
    policy, direct = make(), make()
    policy.reset([3, 4], PredictorOptions(num_draft_tokens=4, prediction=tuple(prediction)))
    direct.start([3, 4], prediction, 4)
    for step in (prediction[:3], [4], [1, 2]):
        policy.push_tokens(step)
        direct.extend(step)
        assert policy.predict_tokens() == direct.propose()
    assert policy.state_tokens == [3, 4, *prediction[:6]]
    policy.dispose()
    with pytest.raises(DisposedError):
        policy.predict_tokens()


def test_names_are_the_keys() -> None:
    assert [make().name for make in POLICIES.values()] == list(POLICIES)
    [(name, with_recipes)] = RECIPE_POLICIES.items()
    assert with_recipes(Recipes.from_lists([])).name == name


@ALL
@pytest.mark.parametrize(
    ("error", "given_texts", "name"),
    [
        (ValueError, ([], [1], 0), "num_draft_tokens"),
        (TypeError, ([], [1], 2.5), "num_draft_tokens"),
        (ValueError, ([], [1, -3], 2), "prediction"),
        (TypeError, ("abc", [1], 2), "prompt"),
        (TypeError, ([], [1, 0.5], 2), "prediction"),
        (TypeError, ([], 7, 2), "prediction"),
    ],
)
def test_bad_input_is_named(
    make: Callable[[], Policy], error: type[Exception], given_texts: Any, name: str
) -> None:
    policy = make()
    for call in (policy.propose, lambda: policy.extend([1])):
        with pytest.raises(RuntimeError, match="start"):
            call()
    with pytest.raises(error, match=f"^{name}: expected"):
        policy.start(*given_texts)
    policy.start([], [1], 2)
    with pytest.raises(ValueError, match="tokens: expected at least one"):
        policy.extend([])


#: A policy, and arguments of which it refuses the last one.
BAD_ARGUMENTS: list[tuple[Callable[..., Policy], dict[str, Any]]] = [
    (OpenAI, {"lookahead": 0}), (OpenAI, {"resume_after": 0}), (OpenAI, {"resume_delay": -1}),
    (PromptLookup, {"pattern_min": 0}), (PromptLookup, {"pattern_min": 4, "pattern_max": 3}),
    (PromptLookup, {"prediction_min": 0}), (PromptLookup, {"prediction_min": 3, "prediction_max": 2}),
    (PromptLookup, {"tie": "first"}), (InputLookup, {"pattern_max": 0}), (InputLookup, {"prediction_max": 0}),
    (SuffixDecoding, {"max_spec_factor": -1}), (SuffixDecoding, {"min_token_prob": 2}),
    (SuffixDecoding, {"max_tree_depth": 0}), (RecipeLookup, {"recipes": None, "min_survival": 1.5}),
    (StaticText, {"ends_line": {10}}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "arguments"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(make: Callable[..., Policy], arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{list(arguments)[-1]}: expected"):
        make(**arguments)


def test_policies_never_import_torch() -> None:
    code = "import sys; from gpu_align.policies import *; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def drafts_of(policy: Policy, prediction: Ids, steps: Sequence[Ids], k: int = 64) -> Ids:
    """What it drafts after these steps."""
    policy.start([], prediction, k)
    for step in steps:
        policy.extend(step)
    return policy.propose()


def test_openai_resumes_after_32_matching_tokens_behind_the_divergence() -> None:
    """By default; in a run of one token every window matches, and the 32 must still be waited for."""
    for policy, prediction, first, then, draft in (
        (OpenAI(), [*range(100)], [0, 1, 2, 777], [*range(4, 36)], [*range(36, 52)]),
        (OpenAI(), [5] * 60 + [6, 7], [5] * 61, [5] * 32, [6, 7]),
        # Of several positions the first behind the one that diverged, 2; else the last before it.
        (OpenAI(16, 2), [1, 2, 1, 2, 9, 1, 2, 3], [1, 2, 7], [1, 2], [9, 1, 2, 3]),
        (OpenAI(16, 2), [1, 2, 8, 1, 2, 9, 6], [1, 2, 8, 1, 2, 9, 7], [1, 2], [9, 6]),
        (OpenAI(16, 2, 2), [1, 2, 1, 2, 9, 1, 2, 3], [1, 2, 7], [1, 2, 9, 1], [2, 3]),  # two tokens later
    ):
        steps = [first, *([token] for token in then)]
        assert drafts_of(policy, prediction, steps[:-1]) == []
        assert drafts_of(policy, prediction, steps) == draft


def upstream(package: str, file: str, name: str, namespace: dict[str, Any]) -> Any:
    """One definition out of an installed package's source, without importing the package."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin if spec and spec.origin else "nowhere").parent / file
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
            return namespace[name]
    pytest.skip(f"{package} is not installed, or its {file} has no {name}")


def random_texts(count: int) -> Iterator[Ids]:
    rng = random.Random(17)
    for _ in range(count):
        yield [rng.randrange(rng.choice([1, 2, 3, 5])) for _ in range(rng.randrange(1, 60))]


def test_vllm_preset_equals_vllm() -> None:
    file, name = "v1/spec_decode/ngram_proposer.py", "_find_longest_matched_ngram_and_propose_tokens"
    find = upstream("vllm", file, name, {"np": np})
    for text in random_texts(300):
        for low, high in ((5, 5), (1, 3), (2, 5)):
            theirs = find(np.array(text, dtype=np.int32), low, high, 10_000, 7)
            found = drafts_of(PromptLookup(low, high, tie="earliest"), [], [text], 7)
            assert found == theirs.tolist(), text


def test_transformers_preset_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from typing import Optional

    names = {"torch": torch, "Optional": Optional, "CandidateGenerator": object}
    name = "PromptLookupCandidateGenerator"
    theirs = upstream("transformers", "generation/candidate_generator.py", name, names)(
        num_output_tokens=10, max_matching_ngram_size=2, max_length=10_000
    )
    for text in random_texts(300):
        candidates, _ = theirs.get_candidates(torch.tensor([text]))
        assert drafts_of(prompt_lookup_transformers(), [], [text]) == candidates[0, len(text) :].tolist(), (
            text
        )


def test_vllm_presets_differ_in_the_tie_rule_only() -> None:
    prediction = [1, 2, 3, 4, 5, 60, 1, 2, 3, 4, 5, 70]
    for name, expected in (("prompt_lookup_vllm", [60, 1]), ("prompt_lookup_vllm_v2", [70, 9])):
        assert drafts_of(POLICIES[name](), prediction, [[9, 2, 3, 4, 5]], 2) == []  # five are needed
        assert drafts_of(POLICIES[name](), prediction, [[9, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]], 2) == expected


def test_our_drafter_drafts_the_recipe_where_it_has_nothing_else() -> None:
    """With neither a prediction nor anything repeated, recipes are all that either has."""
    recipes = Recipes.from_lists([
        ([1], [2, 3], [0.9, 0.5]), ([7, 1], [4], [0.8]), ([5, 7, 1], [], []), ([3], [9], [0.1]),
    ])  # fmt: skip
    for tokens, expected in (([1], [2, 3]), ([7, 1], [4]), ([5, 7, 1], []), ([8], []), ([3], [])):
        assert drafts_of(RecipeLookup(recipes), [], [tokens], 8) == expected
        config = DrafterConfig(use_context=False)
        ours = our_drafter([Record("a", [], [], [*tokens, *[6] * 8])], config, recipes)
        ours.reset([], PredictorOptions(8))
        ours.push_tokens(tokens)
        assert ours.predict_tokens() == expected
        assert ours.source == (Source.RECIPE if expected else Source.NONE)


POEM = "one\ntwo\nthree\nfour\nfive\n"


def draft_after(prediction: str, steps: Sequence[str], k: int = 64) -> str:
    """Of static text, with one token a character, so that tests can be read; a newline ends a line."""
    policy = StaticText(lambda token: chr(token) == "\n")
    return "".join(map(chr, drafts_of(policy, [*map(ord, prediction)], [[*map(ord, s)] for s in steps], k)))


@pytest.mark.parametrize(
    ("prediction", "output", "expected"),
    [
        pytest.param(POEM, "", POEM, id="before any output"),
        pytest.param(POEM, "one\ntw", "o\nthree\nfour\nfive\n", id="aligned inside a line"),
        pytest.param(POEM, "one\ntwX", "", id="lost inside a line"),
        pytest.param(POEM, "one\ntwX\n", "", id="a changed line alone does not realign"),
        pytest.param(POEM, "one\ntwX\nthree\n", "four\nfive\n", id="one equal line realigns"),
        pytest.param(POEM, "one\nthree\n", "four\nfive\n", id="a deleted line"),
        pytest.param(POEM, "one\nnew\nlines\ntwo\n", "three\nfour\nfive\n", id="inserted lines"),
        pytest.param(POEM, "one\ntwX\nthree\nfour\nfive\n", "", id="end of the prediction"),
        pytest.param("a\nb\na\nb\nc\n", "x\na\nb\n", "a\nb\nc\n", id="repeated lines: the first place"),
        pytest.param("a\nb\na\nb\nc\n", "a\nb\nx\na\nb\n", "c\n", id="repeated lines: the next place"),
        pytest.param("a\n\nb\n\nc\n", "a\nx\n\n", "b\n\nc\n", id="blank lines"),
        pytest.param("", "a\nb\n", "", id="empty prediction"),
    ],
)
def test_static_text_realigns_at_line_ends(prediction: str, output: str, expected: str) -> None:
    assert draft_after(prediction, output) == expected
    assert draft_after(prediction, output, k=3) == expected[:3]
    # A line that is completed in the middle of a step: there is a part of the next one to compare.
    assert draft_after(POEM, ["X\ntwo\nth"]) == "ree\nfour\nfive\n"
    assert draft_after(POEM, ["X\ntwo\ntX"]) == ""


def test_what_ends_a_line() -> None:
    """A token with a newline among other characters; without a tokenizer a tenth of all tokens."""
    pieces = {1: b"if x", 2: b":\n\n", 3: b"  y", 4: b"()\n", 5: b"  z"}
    policy = StaticText(lambda token: b"\n" in pieces[token])
    assert drafts_of(policy, [1, 2, 3, 4, 5, 4, 1], [[5, 2, 3, 4]], 8) == [5, 4, 1]
    share = sum(map(guess_line_end, range(131_072))) / 131_072
    assert share == pytest.approx(1 / GUESSED_LINE_LENGTH, rel=0.02)
    rng = random.Random(3)
    prediction = [rng.randrange(131_072) for _ in range(400)]
    assert max(i for i in range(100, 200) if guess_line_end(prediction[i])) > 100, "choose another seed"
    assert drafts_of(StaticText(), prediction, [[1, 2, 3, *prediction[100:200]]], 16) == prediction[200:216]


LINES = st.lists(st.integers(0, 6), max_size=40)


@settings(max_examples=500, deadline=None)
@given(prediction=LINES, output=LINES.filter(bool))
def test_static_text_aligns_lines_as_rapidfuzz(prediction: Ids, output: Ids) -> None:
    """A token a line, and behind the last one an empty line, not complete. The first output line is another."""
    lost = [255, *output]
    operations = lcs_seq.opcodes([*prediction, -1], lost).as_list()
    ends = [end for tag, _, end, _, output_end in operations if (tag, output_end) == ("equal", len(lost))]
    expected = prediction[ends[0] :] if ends else []
    assert drafts_of(StaticText(lambda _: True), prediction, [lost], 64) == expected
