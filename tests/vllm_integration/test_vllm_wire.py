"""How a prediction travels, and what a worker takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_integration.wire import request as wire
from vllm_integration.wire.request import PredictedOutputParams
from vllm_integration.worker import requests as predictions
from vllm_integration.worker.requests import open_request


@given(st.lists(st.integers(0, wire.MAX_TOKEN_ID)))
def test_token_ids_round_trip(token_ids: list[int]) -> None:
    encoded = wire.encode_token_ids("token_ids", token_ids)
    assert len(encoded) == 4 * len(token_ids)
    assert wire.decode_token_ids(encoded).tolist() == token_ids
    assert wire.decode_token_ids(encoded).dtype == np.int32


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays_are_taken_whatever_their_layout(dtype: Any) -> None:
    ids = np.arange(20, dtype=dtype)[::3]
    assert wire.decode_token_ids(wire.encode_token_ids("token_ids", ids)).tolist() == [0, 3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize(
    ("token_ids", "error", "found"),
    [
        ("w1", TypeError, "str"),
        (b"ab", TypeError, "bytes"),
        (7, TypeError, "int"),
        ({1: 2}, TypeError, "dict"),
        ([1, True], TypeError, r"token_ids\[1\].*bool"),
        ([1, 2.0], TypeError, r"token_ids\[1\].*float"),
        ([1, -1], ValueError, "-1"),
        ([2**31], ValueError, "2147483648"),
        (np.array([0.5]), TypeError, "float64"),
        (np.zeros((2, 2), dtype=np.int32), TypeError, "2-d"),
        (np.array([-5]), ValueError, "-5"),
        (np.array([2**31]), ValueError, "2147483648"),
    ],
)
def test_bad_token_ids_are_named(token_ids: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found) as caught:
        PredictedOutputParams(token_ids=token_ids)
    assert str(caught.value).startswith("token_ids")


def test_exactly_one_of_text_and_token_ids() -> None:
    with pytest.raises(ValueError, match="neither"):
        PredictedOutputParams()
    with pytest.raises(ValueError, match="both"):
        PredictedOutputParams(prediction="a", token_ids=[1])


def test_text_must_be_unicode_text() -> None:
    with pytest.raises(TypeError, match="prediction: expected a string, got int"):
        PredictedOutputParams(prediction=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        PredictedOutputParams(prediction="ab\ud800")


def test_newlines_become_lf_once() -> None:
    args = PredictedOutputParams(prediction="a\r\nb\rc\nd\r\r\ne").to_extra_args()
    assert args == {wire.KEY: wire.Prediction(text="a\nb\nc\nd\n\ne")}


def test_an_empty_prediction_is_none() -> None:
    assert PredictedOutputParams(prediction="").to_extra_args() == {}
    assert PredictedOutputParams(token_ids=[]).to_extra_args() == {}


def test_no_repr_shows_content() -> None:
    params = PredictedOutputParams(prediction="secret")
    assert "secret" not in repr(params) + repr(params.to_extra_args())
    assert repr(PredictedOutputParams(token_ids=[77, 78]).to_extra_args()[wire.KEY]) == "Prediction(2 tokens)"


def test_a_prediction_crosses_a_process_boundary_as_a_dict() -> None:
    msgspec = pytest.importorskip("msgspec")
    value = PredictedOutputParams(token_ids=[1, 2, 3]).to_extra_args()
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    assert type(arrived[wire.KEY]) is dict
    assert wire.read(arrived[wire.KEY]) == value[wire.KEY]


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        {"token_ids": [1, 2]},
        {"token_ids": memoryview(b"\1\0\0\0\2\0\0\0"), "text": None},
    ],
)
def test_what_is_read_as_token_ids(value: Any) -> None:
    assert wire.read(value) == wire.Prediction(token_ids=b"\1\0\0\0\2\0\0\0")


def test_text_is_read_from_a_string_or_a_dict() -> None:
    assert wire.read("a\r\nb") == wire.read({"text": "a\rb"}) == wire.Prediction(text="a\nb")


@pytest.mark.parametrize(
    "value",
    [None, 5, 1.5, {}, {"text": "a", "token_ids": b""}, {"x": 1}, {"text": 5}, {"token_ids": 5}, "\udc00"],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"prediction|expected"):
        wire.read(value)


def accept(value: Any, capacity: int = 8) -> list[int] | None:
    params = SimpleNamespace(extra_args={wire.KEY: value})
    content = open_request("req-7", params, vocab_size=100, capacity=capacity)
    return None if content is None else content.token_ids.tolist()


def test_the_worker_takes_what_fits(plugin_log: list[str]) -> None:
    assert accept([0, 99]) == [0, 99]
    for extra_args in (None, {"x": 1}):
        params = SimpleNamespace(extra_args=extra_args)
        assert open_request("r", params, vocab_size=9, capacity=9) is None
        content = open_request("r", params, vocab_size=9, capacity=9, even_without=True)
        assert content == wire.RequestContent()
    assert accept([]) == []
    assert plugin_log == []


def test_the_worker_cuts_what_is_too_long(plugin_log: list[str]) -> None:
    before = predictions.refused["cut"]
    assert accept(list(range(12))) == list(range(8))
    assert predictions.refused["cut"] == before + 1
    (line,) = plugin_log
    assert "req-7" in line
    assert "at most 8" in line
    assert "got 12" in line


@pytest.mark.parametrize(
    "value", [[100], [5, 2**31 - 1], {"token_ids": b"\xff" * 4}, {"token_ids": b"1"}, 7, "w"]
)
def test_the_worker_drops_what_is_malformed(value: Any, plugin_log: list[str]) -> None:
    before = predictions.refused["dropped"]
    assert accept(value) is None
    (line,) = plugin_log
    assert line.startswith("Request req-7 is served without its prediction: ")
    assert predictions.refused["dropped"] == before + 1
    assert line.endswith(f"({before + 1} dropped so far)")


def test_the_http_request_id_crosses_the_process_boundary() -> None:
    prediction = wire.Prediction(
        token_ids=wire.encode_token_ids("p", [1, 2]), http_request_id="of one request"
    )
    as_sent = {"token_ids": prediction.token_ids, "text": None, "http_request_id": "of one request"}
    assert wire.read(prediction) == wire.read(as_sent) == prediction
    assert wire.read({"text": "a\r", "http_request_id": "t"}) == wire.Prediction(
        text="a\n", http_request_id="t"
    )
    with pytest.raises(TypeError, match=r"prediction\.http_request_id"):
        wire.read({"text": "a", "http_request_id": 5})


@pytest.mark.parametrize("ids", [[77, -31337], [31337, 2**31], [31337, 2**90], [31337, "31337"], [31337.0]])
def test_what_a_log_may_show_names_no_id(ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        wire.read(ids)
    assert str(caught.value).startswith("prediction")
    assert "31337" not in str(caught.value)
    assert str(2**31) not in str(caught.value).replace("2**31", "")
