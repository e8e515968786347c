"""The replay loop: counts worked out by hand, the exact minimum of steps, and what a policy may see."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gpu_align import DrafterConfig
from gpu_align.simulate import SWEEP, Record, make_policies, replay, setting_name, simulate
from gpu_align.tools.html import Origin
from gpu_align.tools.policies import lookup
from gpu_align.tools.policies.base import Policy


class Scripted(Policy):
    """Drafts what it is told: ``drafts[i]`` at the i-th call."""

    name = "scripted"

    def __init__(self, drafts: Sequence[list[int]]) -> None:
        self.drafts = list(drafts)
        self.extended: list[list[int]] = []

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        self.extended = []
        self._calls = 0

    def propose(self) -> list[int]:
        self._calls += 1
        return self.drafts[self._calls - 1]

    def extend(self, tokens: Sequence[int]) -> None:
        self.extended.append(list(tokens))


class Oracle(Policy):
    """Knows the output (given as the prediction) and counts: always K correct tokens, then past the end."""

    name = "oracle"
    source = int(Origin.PREDICTION)

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        self._known, self._at, self._k = list(prediction), 0, num_draft_tokens

    def propose(self) -> list[int]:
        return (self._known[self._at :] + [7] * self._k)[: self._k]

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)


def record(output: list[int], prediction: list[int] | None = None, prompt: list[int] | None = None) -> Record:
    return Record("r", prompt or [], output if prediction is None else prediction, output)


def test_counts_by_hand() -> None:
    # prefill: 5 | draft 6 7 (both right) + 8 | draft 1 9 (wrong at once) + 9 | draft 3 0 (one right) + 4
    policy = Scripted([[6, 7], [1, 9], [3, 0]])
    result = replay(policy, record([5, 6, 7, 8, 9, 3, 4]), num_draft_tokens=2)
    assert (result.steps, result.accepted, result.rejected) == (4, 3, 3)
    assert policy.extended == [[5], [6, 7, 8], [9]]
    assert result.step_of.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert result.origins.tolist() == [
        Origin.GENERATED,
        Origin.ACCEPTED,
        Origin.ACCEPTED,
        Origin.GENERATED,
        Origin.GENERATED,
        Origin.ACCEPTED,
        Origin.GENERATED,
    ]
    assert len(result.propose_ns) == 3
    assert all(ns >= 0 for ns in result.propose_ns)


def test_drafts_in_prefill_are_verified() -> None:
    policy = Scripted([[5, 6], [9]])
    result = replay(policy, record([5, 6, 7, 8]), num_draft_tokens=2, draft_in_prefill=True)
    assert (result.steps, result.accepted, result.rejected) == (2, 2, 1)
    assert policy.extended == [[5, 6, 7]]
    assert result.step_of.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("draft", "accepted", "rejected"),
    [
        ([6, 7], 2, 0),  # ends with an accepted draft token: no token of the model's own
        ([6, 7, 1, 2, 3], 2, 0),  # what lies behind the last output token does not count
        ([6, 1, 2, 3, 4], 1, 1),  # and neither does it behind a mismatch
        ([6], 1, 0),
        ([1, 7], 0, 2),
        ([], 0, 0),
    ],
)
def test_a_draft_over_the_end(draft: list[int], accepted: int, rejected: int) -> None:
    policy = Scripted([draft, [7], [7]])
    result = replay(policy, record([5, 6, 7]), num_draft_tokens=5)
    first_step_tokens = min(accepted + 1, 2)
    more_steps = 0 if first_step_tokens == 2 else 1  # the second call drafts 7, and it is accepted
    assert result.steps == 2 + more_steps
    assert result.accepted == accepted + more_steps
    assert result.rejected == rejected


def test_one_token_needs_only_the_prefill() -> None:
    result = replay(Scripted([]), record([5]), num_draft_tokens=4)
    assert (result.steps, result.accepted, result.rejected, result.propose_ns) == (1, 0, 0, [])


@pytest.mark.parametrize("k", [1, 16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 33, 34, 64, 65, 66, 67, 131, 1000])
def test_perfect_prediction_takes_the_minimum(k: int, length: int) -> None:
    perfect = record(list(range(100, 100 + length)))
    result = replay(Oracle(), perfect, k)
    assert result.steps == 1 + -(-(length - 1) // (k + 1))
    assert result.rejected == 0
    assert replay(Oracle(), perfect, k, draft_in_prefill=True).steps == -(-length // (k + 1))


@pytest.mark.parametrize("k", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 17, 18, 65, 66, 131, 1000])
@pytest.mark.parametrize("draft_in_prefill", [False, True])
def test_our_drafter_takes_the_minimum(k: int, length: int, draft_in_prefill: bool) -> None:
    # Distinct tokens, so that nothing but the cursor decides.
    perfect = record(list(range(100, 100 + length)), prompt=[1, 2, 3])
    (policy,) = make_policies(["gpu_align"], [perfect], k)
    result = replay(policy, perfect, k, draft_in_prefill)
    minimum = -(-length // (k + 1)) if draft_in_prefill else 1 + -(-(length - 1) // (k + 1))
    assert result.steps == minimum
    assert result.rejected == 0
    assert set(result.origins.tolist()) <= {Origin.GENERATED, Origin.PREDICTION}


def test_a_drafter_serves_one_record_after_another_as_if_it_were_fresh() -> None:
    rng = random.Random(3)
    records = []
    for n in (40, 7, 90, 1, 0, 33):
        prediction = [rng.randrange(20) for _ in range(n)]
        output = prediction[: n // 2] + [rng.randrange(20) for _ in range(5)] + prediction[n // 2 :]
        records.append(Record(str(n), [1] * (n % 4), prediction, output))
    (shared,) = make_policies(["gpu_align"], records, 8)
    for each in records:
        (fresh,) = make_policies(["gpu_align"], records, 8)
        got, expected = replay(shared, each, 8), replay(fresh, each, 8)
        assert (got.steps, got.accepted, got.rejected) == (
            expected.steps,
            expected.accepted,
            expected.rejected,
        )
        assert got.origins.tolist() == expected.origins.tolist()


class Spy(Policy):
    """Hands everything on to another policy, and keeps what it was given."""

    name = "spy"

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.prompt: list[int] = []
        self.prediction: list[int] = []
        self.seen: list[int] = []
        self.seen_at_propose: list[int] = []

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        self.prompt, self.prediction = list(prompt), list(prediction)
        self.seen, self.seen_at_propose = [], []
        self.inner.start(prompt, prediction, num_draft_tokens)

    def propose(self) -> list[int]:
        self.seen_at_propose.append(len(self.seen))
        return self.inner.propose()

    def extend(self, tokens: Sequence[int]) -> None:
        self.seen += tokens
        self.inner.extend(tokens)


@pytest.mark.parametrize("draft_in_prefill", [False, True])
def test_a_policy_sees_no_token_before_it_is_generated(draft_in_prefill: bool) -> None:
    rng = random.Random(1)
    prediction = [rng.randrange(6) for _ in range(300)]
    output = prediction[:100] + [rng.randrange(6) for _ in range(30)] + prediction[140:]
    pair = Record("r", [3, 4], prediction, output)
    (inner,) = make_policies(["prompt_lookup"], [pair], 8)
    spy = Spy(inner)
    result = replay(spy, pair, 8, draft_in_prefill)
    assert (spy.prompt, spy.prediction) == ([3, 4], prediction)
    assert spy.seen == output[: len(spy.seen)]
    # What it had seen when it drafted for step s is exactly what the steps before s produced.
    first = 0 if draft_in_prefill else 1
    produced = [int((result.step_of < step).sum()) for step in range(first, result.steps)]
    assert spy.seen_at_propose == produced


class Vandal(Scripted):
    """Writes into what it is handed."""

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        super().start(prompt, prediction, num_draft_tokens)
        for given in (prompt, prediction):
            given[:] = [0] * len(given)

    def extend(self, tokens: Sequence[int]) -> None:
        tokens[:] = [0] * len(tokens)


def test_a_policy_cannot_change_the_record() -> None:
    pair = Record("r", [3], [1, 2], [5, 6, 7])
    replay(Vandal([[], []]), pair, 2)
    assert pair == Record("r", [3], [1, 2], [5, 6, 7])


def test_too_many_draft_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 'scripted': expected at most 2 draft tokens, found 3"):
        replay(Scripted([[1, 2, 3]]), record([5, 6]), num_draft_tokens=2)


def test_no_draft_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_draft_tokens: expected at least 1, found 0"):
        replay(Scripted([]), record([5, 6]), num_draft_tokens=0)


def test_totals_over_records() -> None:
    told: list[tuple[str, int]] = []
    (result,) = simulate(
        [record([1, 2, 3]), record([4, 5])], [Oracle()], 2, progress=lambda name, n: told.append((name, n))
    )
    assert told == [("oracle", 3), ("oracle", 2)]
    assert (result.output_tokens, result.steps, result.accepted, result.rejected) == (5, 4, 3, 0)
    assert result.tokens_per_step == pytest.approx(1.25)
    assert result.rejected_per_accepted == 0
    assert result.propose_us_median is not None
    assert result.propose_us_median > 0


def test_ratios() -> None:
    (two_of_three,) = simulate([record([1, 2, 3, 9])], [Scripted([[2, 3, 5]])], 3)
    assert two_of_three.rejected_per_accepted == 0.5
    (none_drafted,) = simulate([record([1])], [Scripted([])], 2)
    assert (none_drafted.rejected_per_accepted, none_drafted.propose_us_median) == (0.0, None)
    (none_accepted,) = simulate([record([1, 2])], [Scripted([[9]])], 2)
    assert none_accepted.rejected_per_accepted is None


def test_settings_reach_the_drafter() -> None:
    rng = random.Random(2)
    prediction = [rng.randrange(20) for _ in range(200)]
    edited = Record(
        "r", [], prediction, [t if rng.random() < 0.9 else rng.randrange(20, 30) for t in prediction]
    )
    few, many = {"length_factor": 0, "min_survival": 0.9}, {"length_factor": 64, "min_survival": 0.0}
    policies = make_policies(["gpu_align", "cursor"], [edited], 16, [few, many])
    assert [p.name for p in policies] == [setting_name(few, "off"), setting_name(many, "off"), "cursor"]
    first, second, _ = simulate([edited], policies, 16)
    assert first.rejected < second.rejected
    assert setting_name({}) == "gpu_align"
    for setting in SWEEP:
        DrafterConfig(**setting)


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.importlib, "import_module", lambda name: exec("raise ImportError(name)"))
    with pytest.raises(ImportError, match=r"benchmarks\.quality\.build_suffix_peer"):
        make_policies(["suffix_decoding"], [record([1])], 8)
