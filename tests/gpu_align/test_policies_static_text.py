"""static_text: lines, realignment at line ends, and what the two aligners agree on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.policies import StaticText, guess_line_end, line_end_test
from gpu_align.tools.policies.static_text import GUESSED_LINE_LENGTH, Aligner, last_match_difflib

pytest.importorskip("rapidfuzz")
from gpu_align.tools.policies.static_text import last_match_rapidfuzz

BOTH = pytest.mark.parametrize("aligner", ["rapidfuzz", "difflib"])


def encode(text: str) -> list[int]:
    """One token a character, so that tests can be read; a newline ends a line."""
    return [ord(c) for c in text]


def policy_at(
    prediction: str, output: str, aligner: Aligner = "rapidfuzz", step: int = 1, k: int = 64
) -> StaticText:
    """The policy after ``output``, given in steps of ``step`` tokens."""
    policy = StaticText(line_end_test(lambda token: chr(token).encode()), aligner)
    policy.start([], encode(prediction), k)
    tokens = encode(output)
    for at in range(0, len(tokens), step):
        policy.extend(tokens[at : at + step])
    return policy


def draft_after(
    prediction: str, output: str, aligner: Aligner = "rapidfuzz", step: int = 1, k: int = 64
) -> str:
    return "".join(map(chr, policy_at(prediction, output, aligner, step, k).propose()))


POEM = "one\ntwo\nthree\nfour\nfive\n"


@BOTH
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
def test_realignment(aligner: Aligner, prediction: str, output: str, expected: str) -> None:
    assert draft_after(prediction, output, aligner) == expected


@BOTH
def test_a_step_that_ends_inside_the_next_line_checks_its_prefix(aligner: Aligner) -> None:
    """The line is completed in the middle of a step, so alignment has a partial line to compare."""
    assert draft_after(POEM, "X\ntwo\nth", aligner, step=8) == "ree\nfour\nfive\n"
    assert draft_after(POEM, "X\ntwo\ntX", aligner, step=8) == ""


def test_one_attempt_a_completed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line completed, no work: alignment is tried once after each newline, and not while aligned."""
    calls: list[int] = []
    policy = policy_at(POEM, "one\n")
    align = policy._align
    monkeypatch.setattr(policy, "_align", lambda a, b: calls.append(len(b)) or align(a, b))
    for token in encode("twX-yz\nq\nthree\nfour\nfi"):
        policy.extend([token])
    assert calls == [1, 2, 3, 4]
    assert policy.propose() == encode("ve\n")


def test_k_limits_the_draft() -> None:
    assert draft_after(POEM, "one\n", k=3) == "two"


def test_a_token_with_a_newline_among_other_characters_ends_a_line() -> None:
    pieces = {1: b"if x", 2: b":\n\n", 3: b"  y", 4: b"()\n", 5: b"  z"}
    policy = StaticText(line_end_test(pieces.__getitem__))
    policy.start([], [1, 2, 3, 4, 5, 4, 1], 8)
    policy.extend([5, 2, 3, 4])
    assert policy.propose() == [5, 4, 1]


def test_without_a_tokenizer_a_tenth_of_the_tokens_end_lines() -> None:
    share = sum(map(guess_line_end, range(131_072))) / 131_072
    assert share == pytest.approx(1 / GUESSED_LINE_LENGTH, rel=0.02)
    rng = random.Random(3)
    prediction = [rng.randrange(131_072) for _ in range(400)]
    policy = StaticText()
    policy.start([], prediction, 16)
    policy.extend([1, 2, 3, *prediction[100:200]])
    cut = max(i for i in range(100, 200) if guess_line_end(prediction[i]))
    assert cut > 100, "the sample has no cut; choose another seed"
    assert policy.propose() == prediction[200:216]


LINES = st.lists(st.integers(0, 6), max_size=40)


def lcs_table(a: list[int], b: list[int]) -> list[list[int]]:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table


@settings(max_examples=400, deadline=None)
@given(a=LINES, b=LINES.filter(bool))
def test_rapidfuzz_match_belongs_to_a_longest_common_subsequence(a: list[int], b: list[int]) -> None:
    at = last_match_rapidfuzz(a, b)
    table = lcs_table(a, b)
    best = table[len(a)][len(b)]
    possible = [i for i in range(len(a)) if a[i] == b[-1] and table[i][len(b) - 1] + 1 == best]
    if at is not None:
        assert at in possible
    else:
        # Only where leaving the last line unmatched costs nothing.
        assert not possible or table[len(a)][len(b) - 1] == best


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 60),
    edits=st.lists(st.tuples(st.integers(0, 59), st.sampled_from(["drop", "add"])), max_size=6),
    length=st.integers(1, 70),
)
def test_aligners_agree_without_repeated_or_moved_lines(
    size: int, edits: list[tuple[int, str]], length: int
) -> None:
    predicted = list(range(size))
    output = list(predicted)
    for serial, (at, kind) in enumerate(edits):
        at %= max(len(output), 1)
        if kind == "drop":
            del output[at : at + 1]
        else:
            output.insert(at, 1000 + serial)
    completed = output[:length]
    if completed:
        assert last_match_difflib(predicted, completed) == last_match_rapidfuzz(predicted, completed)


def test_aligners_differ_where_a_block_moved() -> None:
    """The documented difference: difflib takes the longest block, which here is not part of an LCS."""
    predicted = [1, 2, 3, 7, 8, 4, 5, 6]
    completed = [7, 8, 1, 9, 2, 9, 3]
    assert last_match_rapidfuzz(predicted, completed) == 2
    assert last_match_difflib(predicted, completed) is None


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StaticText().aligner == "rapidfuzz"
    assert StaticText(aligner="difflib").aligner == "difflib"
    with pytest.raises(ValueError, match="aligner: expected 'auto', 'rapidfuzz' or 'difflib', got 'diff'"):
        StaticText(aligner="diff")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ends_line: expected a callable or None, got set"):
        StaticText({10})  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert StaticText().aligner == "difflib"
    with pytest.raises(ImportError, match="pip install rapidfuzz"):
        StaticText(aligner="rapidfuzz")
