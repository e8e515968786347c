"""How a prediction travels, and what a worker takes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_integration
from vllm_integration.seams.guard import shown_error, shown_id
from vllm_integration.wire import request as wire
from vllm_integration.wire.request import KEY, PredictedOutputParams, Prediction, TextKind
from vllm_integration.worker.request_drafter import RequestDrafter
from vllm_integration.worker.requests import Refusals, open_request

TWO = b"\1\0\0\0\2\0\0\0"


@given(st.lists(st.integers(0, wire.MAX_TOKEN_ID)))
def test_token_ids_round_trip(token_ids: list[int]) -> None:
    encoded = wire.encode_token_ids("token_ids", token_ids)
    assert len(encoded) == 4 * len(token_ids)
    assert wire.decode_token_ids(encoded).tolist() == token_ids
    assert wire.decode_token_ids(encoded).dtype == np.int32


@pytest.mark.parametrize(
    ("given", "prediction"),
    [
        ({"prediction": "a\r\nb"}, PredictedOutputParams("a\r\nb")),
        ({"token_ids": [1, 2]}, Prediction(token_ids=TWO)),
        ({"prediction": ["a", "b"]}, PredictedOutputParams(["a", "b"])),
        ({"token_ids": [[1, 2], [], [3]]}, Prediction(token_ids=TWO + b"\xff\xff\xff\x7f\3\0\0\0")),
        ({"token_ids": [[1, 2], [1, 2]]}, Prediction(token_ids=TWO + b"\xff\xff\xff\x7f" + TWO)),
        ({"token_ids": [[1, 2]]}, Prediction(token_ids=TWO)),
        ({"prediction": ["", ""]}, None),
        ({"token_ids": [[], []]}, None),
        ({"prediction": ""}, None),
        ({"token_ids": []}, None),
    ],
)
def test_params_of_the_offline_api(given: dict[str, Any], prediction: Any) -> None:
    params = vllm_integration.PredictedOutputParams(**given)
    assert params.to_extra_args() == ({} if prediction is None else {KEY: prediction})
    assert repr(params) == "PredictedOutputParams(...)"
    shown = repr(params.to_extra_args())
    assert not prediction or " tokens)" in shown or "PredictedOutputParams(...)" in shown


@pytest.mark.parametrize(
    ("given", "error", "found"),
    [
        ({}, ValueError, "exactly one of prediction and token_ids, got neither"),
        ({"prediction": "a", "token_ids": [1]}, ValueError, "got both"),
        ({"prediction": 5}, TypeError, "^prediction: expected a string, got int"),
        ({"prediction": ["a", 5]}, TypeError, r"^prediction\[1\]: expected a string, got int"),
        ({"prediction": ["\ud800"]}, ValueError, r"^prediction\[0\]: .*lone surrogate"),
        ({"prediction": "ab\ud800"}, ValueError, "^prediction: .*lone surrogate at character 2"),
        *[
            ({"token_ids": token_ids}, error, f"^token_ids.*{found}")
            for token_ids, error, found in (
                ("w1", TypeError, "str"),
                (b"ab", TypeError, "bytes"),
                ([[1], 2], TypeError, r"\[1\].*int"),
                ([[1], [2, -1]], ValueError, r"\[1\].*-1"),
                ([[1], [2**31 - 1]], ValueError, "below"),
                ([[[1]]], TypeError, "list"),
                (7, TypeError, "int"),
                ({1: 2}, TypeError, "dict"),
                ([1, True], TypeError, r"\[1\].*bool"),
                ([1, 2.0], TypeError, r"\[1\].*float"),
                ([1, -1], ValueError, "-1"),
                ([2**31], ValueError, "2147483648"),
                (np.array([0.5]), TypeError, "float64"),
                (np.zeros((2, 2), dtype=np.int32), TypeError, "2-d"),
                (np.array([-5]), ValueError, "-5"),
                (np.array([2**31]), ValueError, "2147483648"),
            )
        ],
    ],
    ids=str,
)
def test_bad_params_are_named(given: dict[str, Any], error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        PredictedOutputParams(**given)


FULL = Prediction(TWO, ("a", "b"), False, None, b"k", TextKind.MEMORY)


@pytest.mark.parametrize(
    ("value", "prediction"),
    [
        ([1, 2], Prediction(TWO)),
        ((1, 2), Prediction(TWO)),
        (np.array([1, 2]), Prediction(TWO)),
        ({"token_ids": [1, 2]}, Prediction(TWO)),
        ({"token_ids": memoryview(TWO)}, Prediction(TWO)),
        (FULL, FULL),
        # What MessagePack makes of it.
        ({**vars(FULL), "recipes": ["a", "b"], "kind": 1}, FULL),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),  # alike in all workers
)
def test_every_form_of_a_prediction_is_read(value: Any, prediction: Prediction) -> None:
    assert wire.read(value) == prediction


#: Values that are no prediction; and predictions with ids that the model does not have.
BAD: list[Any] = [
    *(5, 1.5, {}, {"text": "a", "token_ids": b""}, {"x": 1}, {"text": 5}, {"token_ids": 5}, "w", "\udc00"),
    *([77, -31337], [31337, 2**31], [31337, 2**90], [31337, "31337"], [31337.0], {"token_ids": b"1"}),
    *({"token_ids": b"", **bad} for bad in ({"recipes": "a"}, {"recipes": [1]}, {"memory": 1})),
    *({"token_ids": b"", **bad} for bad in ({"kind": "1"}, {"kind": 4}, {"sharing_key": 5})),
]
FOREIGN: list[Any] = [[100], [5, 2**31 - 2**16 - 1], {"token_ids": b"\xff" * 4}]


@pytest.mark.parametrize("value", [None, *BAD], ids=str)
def test_anything_else_is_refused_in_words_that_a_log_may_show(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^prediction|TextKind|bytes") as caught:
        wire.decode_token_ids(wire.read(value).token_ids or b"")
    assert "31337" not in str(caught.value)
    assert str(2**31) not in str(caught.value).replace("2**31", "")


def test_a_malformed_prediction_becomes_one_that_shows_nothing() -> None:
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={KEY: {"x": 1}, "x": None}))
    wire.put_back(request)
    assert request.sampling_params.extra_args == {KEY: Prediction(None, sharing_key=b""), "x": None}
    assert wire.brought_by(request.sampling_params) == Prediction(None, sharing_key=b"")
    assert wire.brought_by(SimpleNamespace(extra_args=None)) is None
    with pytest.raises(ValueError, match="multiple of 4 bytes, got 3"):
        wire.decode_token_ids(b"123")


def accept(value: Any, refused: Refusals | None = None) -> list[int] | None:
    params = SimpleNamespace(extra_args={KEY: value})
    refused = Refusals() if refused is None else refused
    content = open_request("req-7", params, refused, vocab_size=100, capacity=8)
    return None if content is None else content.token_ids.tolist()


def test_the_worker_takes_what_fits(plugin_log: list[str]) -> None:
    assert accept([0, 99]) == [0, 99]
    for extra_args in (None, {"x": 1}):
        params = SimpleNamespace(extra_args=extra_args)
        assert open_request("r", params, Refusals(), vocab_size=9, capacity=9) is None
        content = open_request("r", params, Refusals(), vocab_size=9, capacity=9, even_without=True)
        assert content == wire.RequestContent()
    assert accept([]) == []
    assert plugin_log == []
    refused = Refusals()
    assert accept(list(range(12)), refused) == list(range(8))
    assert refused.take() == {"req-7": "tokens"}
    (line,) = plugin_log
    assert all(part in line for part in ("req-7", "at most 8", "got 12"))


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, ()), ({"eos_token_id": 2, "stop_token_ids": None}, (2,)),
        ({"eos_token_id": 2, "stop_token_ids": [7, 5]}, (2, 7, 5)),
        # With `ignore_eos` vLLM keeps no end of sequence.
        ({"eos_token_id": None, "stop_token_ids": [7]}, (7,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("extra_args", [{KEY: [1]}, {}])
def test_the_worker_knows_what_ends_a_request(params: Any, ends: Any, extra_args: Any) -> None:
    given = SimpleNamespace(extra_args=extra_args, temperature=0.9, **params)
    content = open_request("r", given, Refusals(), vocab_size=9, capacity=9, even_without=True)
    assert content is not None
    assert (content.end_tokens, content.temperature) == (ends, 0.9)


@pytest.mark.parametrize("value", [*BAD, *FOREIGN], ids=str)
def test_the_worker_drops_what_is_malformed(value: Any, plugin_log: list[str]) -> None:
    refused = Refusals()
    assert accept(value, refused) is None
    (line,) = plugin_log
    assert line.startswith("Request req-7 is served without its prediction: ")
    assert "31337" not in line
    assert refused.take() == {"req-7": "malformed"}


def test_an_unknown_pack_is_told_once_and_all_are_used(plugin_log: list[str]) -> None:
    """Where a pack cannot be read, the front end does not know the names."""
    for recipes, used in ((("a",), ("a",)), (("a", "other\n"), None), (("other\n",), None), ((), ())):
        params = SimpleNamespace(extra_args={KEY: Prediction(TWO, recipes=recipes)})
        content = open_request("r", params, Refusals(), vocab_size=9, capacity=9, packs=("a", "b"))
        assert content is not None
        assert content.recipes == used
    (line,) = plugin_log
    assert r"names unknown recipe packs: other\n" in line


# Nothing that a client chooses breaks a log line: request ids and messages of errors.

HOSTILE = {
    "chatcmpl-8f-1a2b3c4d": "chatcmpl-8f-1a2b3c4d",
    "grüße-字": "grüße-字",
    "a\nERROR all is lost": r"a\nERROR all is lost",
    "a\r\x1b[31mred": r"a\r\x1b[31mred",
    "a\x00\x7f\x85": r"a\x00\x7f\x85",
    "\u2028\u202eabc\ud800": r"\u2028\u202eabc\ud800",
    r"a\n": r"a\\n",
    "x" * 100: "x" * 100,
    "x" * 5000: "x" * 100 + "… of 5000 characters",
}


def test_a_message_is_one_line_and_may_fail() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert shown_error(RuntimeError("CUDA error\nat line 7")) == r"RuntimeError: CUDA error\nat line 7"
    assert shown_error(ValueError("y" * 1000)) == "ValueError: " + "y" * 400 + "… of 1000 characters"
    assert shown_error(SilentError()) == "SilentError: "


@pytest.mark.parametrize("req_id", HOSTILE)
def test_log_lines_about_requests(req_id: str, plugin_log: list[str]) -> None:
    refused = Refusals()
    assert shown_id(req_id) == HOSTILE[req_id]
    for value, capacity in (({"x": 1}, 9), ([1, 2, 3], 2)):
        params = SimpleNamespace(extra_args={wire.KEY: value})
        open_request(req_id, params, refused, vocab_size=9, capacity=capacity)
    no_room = SimpleNamespace(drafter=SimpleNamespace(add=lambda *_, **__: False), refused=refused)
    RequestDrafter.add(cast(Any, no_room), 0, req_id, wire.RequestContent(), 0)
    assert refused.take() == {req_id: "room"}  # the last one
    assert len(plugin_log) == 3
    assert all(HOSTILE[req_id] in line and line.isprintable() and len(line) < 400 for line in plugin_log)
