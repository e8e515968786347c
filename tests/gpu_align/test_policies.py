"""Each policy drafts what its rule says in plain Python, keeps the contract of `Policy`, and names bad input."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align import DrafterConfig, Recipes, Source
from gpu_align.predictors import InputLookupTokenPredictor, PredictorOptions, TokenPredictor
from gpu_align.tools.html import Origin
from gpu_align.tools.policies import (
    POLICIES,
    Myers,
    OpenAI,
    Policy,
    PromptLookup,
    RecipeLookup,
    StaticText,
    prompt_lookup_transformers,
)
from gpu_align.tools.recipes.learn import learn
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.replay import Record, load_tokenizer, make_policies, replay, simulate
from tests.modules import command

lcs_seq = pytest.importorskip("rapidfuzz.distance").LCSseq

Ids = list[int]
#: Prompt, prediction, output so far → draft, however long.
Rule = Callable[[Ids, Ids, Ids], Ids]
TOKENS = st.lists(st.integers(0, 3), max_size=70)


def begin(policy: TokenPredictor, prompt: Ids, prediction: Ids, k: int) -> None:
    policy.update_input_tokens([*prompt, *prediction])
    policy.reset(prompt, PredictorOptions(num_draft_tokens=k, prediction=tuple(prediction)))


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


def openai_rule(data: Any) -> tuple[Policy, Rule]:
    lookahead, after = (data.draw(st.integers(1, 4)) for _ in range(2))

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        cursor, diverged = 0, None
        for n, token in enumerate(output, start=1):
            if diverged is None and prediction[cursor : cursor + 1] == [token]:
                cursor += 1
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
                    diverged = None
        return prediction[cursor : cursor + lookahead] if diverged is None else []

    return OpenAI(lookahead, after), rule


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


def input_lookup_rule(data: Any) -> tuple[TokenPredictor, Rule]:
    """node-llama-cpp's predictor, followed line by line over plain lists."""
    low, shortest, longest = (data.draw(st.integers(1, most)) for most in (3, 3, 5))
    more = data.draw(st.none() | st.integers(0, 3))
    high = None if more is None else low + more
    match: list[int] = []  # where the match starts in the input, and in the state

    def rule(prompt: Ids, prediction: Ids, output: Ids) -> Ids:
        text = prompt + prediction
        state, width = text + (prompt if prediction else []) + output, max(low, longest)
        if not prompt + output:
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

    return InputLookupTokenPredictor((low, high or 1 << 30), (shortest, longest)), rule


@pytest.mark.parametrize("ruled", [openai_rule, myers_rule, input_lookup_rule])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), prompt=TOKENS, texts=outputs(), k=st.integers(1, 9), prefill=st.booleans())
def test_a_policy_drafts_what_its_rule_says(
    ruled: Callable[[Any], tuple[TokenPredictor, Rule]],
    data: Any,
    prompt: Ids,
    texts: tuple[Ids, list[Ids]],
    k: int,
    prefill: bool,
) -> None:
    policy, rule = ruled(data)
    prediction, steps = texts
    begin(policy, [5], [6], k)
    policy.push_tokens([5])  # of another sequence: forgotten
    begin(policy, prompt, prediction, k)
    output: Ids = []
    for step in [*steps, []]:
        if output or prefill:
            assert policy.predict_tokens()[:k] == rule(prompt, prediction, output)[:k]
        if step:
            policy.push_tokens(step)
            output += step


ALL = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


@ALL
@settings(max_examples=25, deadline=None)
@given(prompt=TOKENS, texts=outputs(), k=st.integers(1, 9))
def test_a_draft_is_a_short_slice_of_what_is_known(
    make: Callable[[], TokenPredictor], prompt: Ids, texts: tuple[Ids, list[Ids]], k: int
) -> None:
    prediction, steps = texts
    policy, again = make(), make()
    begin(again, [1], [2, 1], 4)
    again.predict_tokens()
    again.push_tokens([1])
    begin(policy, prompt, prediction, k)
    begin(again, prompt, prediction, k)
    known = prompt + prediction
    for step in steps:
        draft = policy.predict_tokens()[:k]
        assert len(draft) <= k
        assert any(known[i : i + len(draft)] == draft for i in range(len(known) + 1))
        policy.predict_tokens().append(99)
        assert policy.predict_tokens()[:k] == draft == again.predict_tokens()[:k]
        policy.push_tokens(step)
        again.push_tokens(step)
        known += step


def drafts_of(policy: TokenPredictor, prediction: Ids, steps: Sequence[Ids], k: int = 64) -> Ids:
    """What it drafts after these steps."""
    begin(policy, [], prediction, k)
    for step in steps:
        policy.push_tokens(step)
    return policy.predict_tokens()


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


def test_our_drafter_drafts_the_recipe_where_it_has_nothing_else() -> None:
    """With neither a prediction nor anything repeated, recipes are all that either has."""
    recipes = Recipes.from_lists([
        ([1], [2, 3], [0.9, 0.5]), ([7, 1], [4], [0.8]), ([5, 7, 1], [], []), ([3], [9], [0.05]),
    ])  # fmt: skip
    for tokens, expected in (([1], [2, 3]), ([7, 1], [4]), ([5, 7, 1], []), ([8], []), ([3], [])):
        assert drafts_of(RecipeLookup(recipes), [], [tokens], 8) == expected
        config = DrafterConfig(use_context=False)
        ours = our_drafter([Record("a", [], [], [*tokens, *[6] * 8])], config, recipes)
        ours.reset([], PredictorOptions(8))
        ours.push_tokens(tokens)
        assert ours.predict_tokens() == expected
        assert ours.source == (Source.RECIPE if expected else Source.NONE)


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


TEXT = "alpha beta gamma delta\n"


def encoded(text: str) -> Record:
    pytest.importorskip("mistral_common")
    return Record("a", [], [], load_tokenizer("tekken").encode(text), "tekken")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Of a made-up language, so that nothing else knows it."""
    path = tmp_path / "own.json.gz"
    learn([("one", TEXT * 20)]).save(path)
    return path


def test_recipes_draft_and_the_name_says_which(pack: Path) -> None:
    records = [encoded(TEXT)]
    steps = []
    for setting, recipes, name, drafts in (
        ({}, str(pack), f"gpu_align recipes={pack}", True),
        ({"length_factor": 1}, str(pack), f"gpu_align length_factor=1 recipes={pack}", True),
        ({"min_survival_recipe": 1.0}, str(pack), f"gpu_align min_survival_recipe=1.0 recipes={pack}", False),
        ({}, "off", "gpu_align recipes=off", False),
    ):
        [result] = simulate(records, make_policies(["gpu_align"], records, 8, [setting], recipes), 8)
        assert result.name == name
        assert (Origin.RECIPE in result.pairs[0].origins) == drafts
        steps.append(result.steps)
    assert steps[0] < steps[3]


DOCS = Path(__file__).parents[2] / "docs"
RECORDS = [Record("a", prompt=[1, 2, 3], prediction=[4, 5, 6, 7, 8, 9], output=[4, 5, 6, 7, 1, 9])]


@pytest.fixture
def after_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The predictor of the docs, as the module that the docs call it."""
    page = (DOCS / "predictors.md").read_text(encoding="utf-8")
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class AfterPair" in block
    ]
    body = code.split("class AfterPair")[1].strip().splitlines()
    assert 8 <= len(body) <= 10
    (tmp_path / "after_pair.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("after_pair")
    sys.modules.pop("after_pair", None)


def test_a_predictor_of_the_docs_runs_in_the_simulator(after_pair: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    row = {"id": "a", "prompt": [1, 2, 3], "prediction": [4, 5, 6, 7, 8, 9], "output": [4, 5, 6, 7, 1, 9]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    sys.modules.pop("after_pair")
    names = ["cursor", "after_pair:AfterPair"]
    options = [text for name in names for text in ("--policy", name)]
    done = command("simulate", "pairs.jsonl", *options, "--json", "out.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert list(found) == names
    # 4; of [5 6 7 8 9] three are right, and 1 follows; 9.
    counts = [found["after_pair:AfterPair"][name] for name in ("steps", "accepted", "rejected")]
    assert counts == [3, 3, 2]


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("gpu_align.predictors:InputLookupTokenPredictor", InputLookupTokenPredictor()),
        ("gpu_align.predictors:InputLookupTokenPredictor?pattern_length=(2,4)&prediction_length=(1,6)",
         InputLookupTokenPredictor((2, 4), (1, 6))),
        ("gpu_align.tools.policies:PromptLookup?pattern_min=2", PromptLookup()),
    ],
)  # fmt: skip
def test_options_of_a_predictor(path: str, same: TokenPredictor) -> None:
    [policy] = make_policies([path], RECORDS, 8)
    assert policy.name == path
    ours, theirs = replay(policy, RECORDS[0], 8), replay(same, RECORDS[0], 8)
    assert (ours.steps, ours.accepted, ours.rejected) == (theirs.steps, theirs.accepted, theirs.rejected)
    policy.dispose()
    with pytest.raises(RuntimeError, match="disposed"):  # figures would not be its own
        replay(policy, RECORDS[0], 8)
