"""What a request chooses beside its prediction: packs of recipes, and no part in the memory of earlier answers."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.parallel_sampling import ParentRequest

from gpu_align import RecipePack
from gpu_align.recipes import Recipe
from tests.vllm_integration.fakes import Engine, config, refused
from vllm_integration.config import in_use
from vllm_integration.config import settings as packs
from vllm_integration.config.settings import Settings
from vllm_integration.frontend import inputs
from vllm_integration.frontend.inputs import params_of_sample, process_inputs
from vllm_integration.frontend.prediction import FieldError, choices_of
from vllm_integration.seams import guard, install
from vllm_integration.seams.install import wrapped_by
from vllm_integration.wire.request import (
    KEY,
    PredictedOutputParams,
    Prediction,
    decode_token_ids,
    encode_token_ids,
)

EMPTY = Prediction(token_ids=b"")


@pytest.fixture
def two_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`GPU_ALIGN_RECIPES` with a pack of one's own and the shipped one."""
    path = tmp_path / "house.json.gz"
    RecipePack({" a": 9, " b": 9}, [Recipe((" a",), " b", 9, 9)]).save(path)
    monkeypatch.setenv("GPU_ALIGN_RECIPES", f"{path},base")
    return f"{path},base"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipes": 5}, "recipes: expected an array of names, got int"),
        ({"recipes": ["a", 5]}, "recipes[1]: expected a name, got int"),
        ({"recipes": ["a", ""]}, "recipes[1]: expected a name, got an empty one"),
        ({"recipes": "a,,b"}, "recipes[1]: expected a name, got an empty one"),
        ({"recipes": ["a"] * 32}, "recipes: expected at most 31 names, got 32"),
        ({"memory": 7}, "memory: expected a boolean, got something else"),
    ],
)
def test_a_bad_choice_is_refused_with_its_place(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        choices_of(given, Settings())
    assert str(caught.value) == message
    assert caught.value.parameter == message.partition(":")[0].partition("[")[0]


def test_an_unknown_pack_is_refused_where_the_names_are_known(two_packs: str) -> None:
    settings = Settings.from_env()
    assert choices_of({"recipes": "house,base"}, settings) == {"recipes": ("house", "base")}
    with pytest.raises(FieldError, match="expected names out of house, base, got another one"):
        choices_of({"recipes": ["base", "secret"]}, settings)
    with pytest.raises(FieldError, match="no names, the server has no recipes"):
        choices_of({"recipes": "base"}, Settings(recipes="off"))
    unknown = Settings(recipes="base,/no/such/file")
    assert ("/no/such/file", None) in packs.packs_of(unknown)
    for names in (("anything",), tuple(map(str, range(31)))):
        assert choices_of({"recipes": names}, unknown) == {"recipes": names}


def brought(extra_args: dict[str, Any] | None, max_tokens: int | None = 16) -> dict[str, Any] | None:
    """What a request has in `extra_args` when the engine gets it; the caller's own are left alone."""
    given, before = SamplingParams(extra_args=extra_args, max_tokens=max_tokens), dict(extra_args or {})
    *_, params, rest, named = process_inputs(
        lambda self, *given, **named: (*given, named), Engine(limit=4), "r", "prompt", given, 1, priority=2
    )
    assert (given.extra_args or {}) == before
    assert (rest, named) == (1, {"priority": 2})
    found: dict[str, Any] | None = params.extra_args
    return found


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALIGN_RECIPES", "base")


IDS = b"\1\0\0\0"
ONE = {KEY: Prediction(token_ids=IDS)}


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize(
    ("variables", "given", "found"),
    [
        # Nothing changes where nothing is set, and an empty prediction is none.
        ({}, None, None),
        ({}, {"x": 1}, {"x": 1}),
        ({}, ONE, ONE),
        ({}, {KEY: EMPTY, "x": 1}, {"x": 1}),
        ({}, {KEY: []}, None),
        # A text is tokenised here, with LF as the only end of a line.
        (
            {},
            {KEY: PredictedOutputParams(prediction="\r\n\1")},
            {KEY: Prediction(token_ids=b"\n\0\0\0" + IDS)},
        ),
        ({}, {KEY: "\1" * 6}, {KEY: Prediction(token_ids=IDS * 4)}),
        # Requests without a prediction are drafted for.
        *[
            row
            for variables in (
                {"DRAFT_WITHOUT_PREDICTION": "1"},
                {"MEMORY_TOKENS": "9"},
                {"RECIPES": "base,mine"},
                {"RECIPES": "x@1"},
            )
            for row in ((variables, None, {KEY: EMPTY}), (variables, {"x": 1}, {"x": 1, KEY: EMPTY}))
        ],
        ({}, {"recipes": ["base"], "x": 1}, {"x": 1, KEY: Prediction(b"", recipes=("base",))}),
        ({}, {"recipes": []}, None),
        # Choices travel with a prediction.
        (
            {},
            {KEY: [1], "recipes": "base", "memory": False},
            {KEY: Prediction(IDS, recipes=("base",), memory=False)},
        ),
        ({}, {KEY: [1], "recipes": []}, {KEY: Prediction(IDS, recipes=())}),
        # Of a mapping the ids alone are taken: vLLM may take sampling parameters from a client as they are.
        ({}, {KEY: {"token_ids": [1], "memory": False, "sharing_key": b"other", "kind": 2}}, ONE),
        # Who needs nothing of what is set is left alone; its answer must not be remembered either.
        ({"RECIPES": "house,base"}, {"recipes": []}, None),
        ({"MEMORY_TOKENS": "9"}, {"recipes": []}, {KEY: Prediction(b"", recipes=())}),
        ({"MEMORY_TOKENS": "9"}, {"recipes": [], "memory": 0, "x": 1}, {"memory": False, "x": 1}),
        ({"MEMORY_TOKENS": "9"}, {KEY: Prediction(b"", recipes=(), memory=False)}, {"memory": False}),
        ({"RECIPES": "mine"}, {"memory": False}, {KEY: Prediction(b"", memory=False)}),
        # Off and on: nothing is left of what would be drafted from; who brings nothing is drafted for.
        *[
            (more, {KEY: [1], "gpu_align": "off", "x": 1}, {"memory": False, "x": 1})
            for more in ({}, {"MEMORY_TOKENS": "9"}, {"RECIPES": "mine"})
        ],
        (
            {"DRAFT_WITHOUT_PREDICTION": "1"},
            {KEY: [1], "gpu_align": 0},
            {KEY: Prediction(b"", memory=False, drafts=False)},
        ),
        ({}, {"gpu_align": "on"}, {KEY: Prediction(b"", drafts=True)}),
        ({}, {KEY: [1], "gpu_align": "on"}, {KEY: Prediction(IDS, drafts=True)}),
    ],
    ids=str,
)
def test_predictions_and_choices_travel_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: Any, found: Any
) -> None:
    """Every request on its way into the engine, of the offline API and of HTTP."""
    for name, value in variables.items():
        monkeypatch.setenv(f"GPU_ALIGN_{name}", value)
    assert brought(given) == brought(given, max_tokens=None) == found
    if given is None:
        assert brought(None, max_tokens=1) is None  # nothing can be drafted
        assert brought({"memory": False}, max_tokens=1) == {"memory": False}


@pytest.mark.usefixtures("recipes")
def test_a_bad_choice_is_the_callers_error_and_pooling_parameters_are_left_alone() -> None:
    before = refused("malformed")
    with pytest.raises(VLLMValidationError, match="prediction"):
        brought({KEY: 7})
    assert refused("malformed") == before + 1
    for given in (
        {"recipes": 5},
        {"recipes": ["no"]},
        {"memory": "x"},
        {"gpu_align": "x"},
        {"conversation": True},
    ):
        with pytest.raises(VLLMValidationError) as caught:
            brought(given)
        assert caught.value.parameter in given
    assert refused("malformed") == before + 1
    taken: list[Any] = []
    params = SimpleNamespace()
    process_inputs(
        lambda *given: taken.append(given[-1]), SimpleNamespace(vllm_config=None), "r", "prompt", params
    )
    assert taken == [params]


@pytest.mark.usefixtures("recipes")
def test_an_unforeseen_error_serves_an_offline_request_without(
    monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    monkeypatch.setattr(inputs.Limits, "of", lambda _: 1 / 0)
    assert brought({KEY: PredictedOutputParams(prediction="SECRET"), "other": 1}) == {"other": 1}
    assert plugin_log == ["Request r is served without its prediction: ZeroDivisionError"]


#: Of a request with a seed: three samples, which are drawn with seeds of their own.
SEEDED = {"n": 3, "seed": 5}
GAP = 2**31 - 1


@pytest.mark.parametrize(
    ("given", "sampling", "expected"),
    [
        ([[1], [2], [3]], SEEDED, [[1], [2], [3]]),
        ([[1], [2], [1]], SEEDED, [[1], [2], [1]]),
        ("abc", {**SEEDED, "n": 1}, [[97, 98, 99]]),
        (["a", "b", "a"], SEEDED, [[97], [98], [97]]),
        # Without a seed, or of another number: all draft from all of them, equal ones once.
        ([[1], [2], [1]], {"n": 3}, [[1, GAP, 2]] * 3),
        ([[1], [2], [1]], {**SEEDED, "n": 2}, [[1, GAP, 2]] * 2),
        ([[1], [2], []], SEEDED, [[1, GAP, 2]] * 3),
        ([1, 2], SEEDED, [[1, 2]] * 3),
        (["a", "b", "a"], {"n": 1}, [[97, GAP, 98]]),
    ],
)
def test_samples_with_seeds_have_predictions_of_their_own(
    given: Any, sampling: dict[str, Any], expected: list[list[int]]
) -> None:
    """By vLLM's own requests of samples; `sampling` is the caller's, the predictions are offline or in
    `vllm_xargs`."""
    key = "prediction" if isinstance(given, str) or isinstance(given[0], str) else "token_ids"
    made = PredictedOutputParams(**{key: given}).to_extra_args()
    params = SamplingParams(extra_args=made, temperature=1.0, max_tokens=8, **sampling)
    params = process_inputs(lambda *rest: rest[-1], Engine(limit=600), "r", "prompt", params)
    request: Any = SimpleNamespace(request_id="r", external_req_id="r", params=params)
    parent = ParentRequest(request)
    children = [
        wrapped_by(params_of_sample)(ParentRequest._get_child_sampling_params)(parent, i)
        for i in range(params.n)
    ]
    assert [decode_token_ids(child.extra_args[KEY].token_ids).tolist() for child in children] == expected
    assert [child.seed for child in children] == [sampling.get("seed") and 5 + i for i in range(params.n)]
    assert not any(guard.faults())


def test_a_fault_costs_samples_their_own_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {KEY: Prediction(token_ids=encode_token_ids("", [[1], [2]]), one_each=True)}
    monkeypatch.setattr(inputs, "samples", guard.Guard("samples", "gives none"))
    monkeypatch.setattr(inputs.wire, "of_sample", lambda *_: 1 / 0)
    params = params_of_sample(lambda self, index: SamplingParams(extra_args=both), object(), 1)
    assert params.extra_args == both
    assert "samples" in guard.faults()


def test_keys_near_ours_are_told_once_and_other_plugins_keys_never(plugin_log: list[str]) -> None:
    guard.warn_once.cache_clear()
    near = {
        "prediction": "x",
        "Predictions": "x",
        "recipe": 1,
        "memorry": 1,
        "gpu_aling": 1,
        "conversations": 1,
    }
    theirs = {"kv_transfer_params": {}, "mine": 1, "predicate": 1, 3: 4}
    for given in (near, near, theirs):
        assert brought(dict(given)) == given
    hint = "Unknown field of a request ignored; did you mean {!r}?"
    names = (KEY, "recipes", "memory", "gpu_align", "conversation")
    assert sorted(plugin_log) == sorted(map(hint.format, names))


@pytest.mark.parametrize("given", [{"min_p": 0.2}, {"logit_bias": {3: 5.0}}], ids=str)
@pytest.mark.parametrize(
    ("settings", "off", "served"),
    [
        ({}, None, False),
        ({"v2": True}, None, True),
        ({"v2": True, "method": "ngram"}, None, False),
        ({"v2": True}, "a seam is missing", False),
    ],
    ids=["V1", "V2", "another drafter", "the plugin off"],
)
def test_parameters_that_vllm_refuses_are_served_where_drafts_are_verified_by_them(
    given: dict[str, Any],
    settings: dict[str, Any],
    off: str | None,
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "_off_reason", off)
    vllm_config, params = config(**settings), SamplingParams(**given)
    check = wrapped_by(inputs.validate)(inspect.unwrap(type(params)._validate_spec_decode))

    def original(self: Any, request_id: str, prompt: Any, params: Any) -> None:
        check(params, self.vllm_config.speculative_config)

    refused = pytest.raises(VLLMValidationError, match="min_p and logit_bias")
    with nullcontext() if served else refused:
        process_inputs(original, SimpleNamespace(vllm_config=vllm_config), "r", "prompt", params)
    assert (params.min_p, params.logit_bias) == (given.get("min_p", 0.0), given.get("logit_bias"))
    assert in_use.engine_here() is (None if off or settings.get("method") else vllm_config)
