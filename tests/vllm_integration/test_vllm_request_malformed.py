"""Whatever a client puts into `prediction`: a 400 that names it or an answer, never a 500, and the next
request is served. With vLLM's own application, routes and request models around a serving that only says "served";
the campaign's `bodies` asks a whole server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed_bodies import RAW_BODIES, as_json, is_taken, predictions
from request_app import ENDPOINTS
from vllm_fakes import config
from vllm_harness import MAX_MODEL_LEN

from vllm_integration.frontend.prediction import CHARS_PER_TOKEN, Limits

pytestmark = pytest.mark.vllm

EXPECTED = {"characters": CHARS_PER_TOKEN * MAX_MODEL_LEN, "parts": 1000}


@pytest.fixture(scope="module")
def post(request_app: Any) -> Any:
    """`post(path, content)` → the response; any exception of the application is raised here."""
    import anyio

    async def send(path: str, content: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(request_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    return lambda path, content: anyio.run(send, path, content)


def check(path: str, value: Any, answer: Any) -> None:
    """`answer` to a request with this value is what the documentation says."""
    taken = is_taken(value, plain_text=path == "/v1/completions", **EXPECTED)
    assert answer.status_code == (200 if taken else 400), (path, str(value)[:100], answer.text[:300])
    if not taken:
        error = answer.json()["error"]
        assert error["param"] == "prediction"
        assert error["message"].startswith("prediction")
        assert len(error["message"]) < 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_malformed_prediction_is_a_400(post: Any, path: str) -> None:
    values = predictions()
    for value in values:
        check(path, value, post(path, as_json({"model": "tiny", **ENDPOINTS[path], "prediction": value})))
    refused = [v for v in values if not is_taken(v, plain_text=path == "/v1/completions", **EXPECTED)]
    assert len(refused) >= 150


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(["content", "text", "type"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "content", "text"]) | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
LIKELY = st.fixed_dictionaries(
    {
        "type": st.just("content"),
        "content": JSON
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=3),
    }
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(value=JSON | LIKELY, path=st.sampled_from(sorted(ENDPOINTS)))
def test_any_json_is_answered_as_documented(post: Any, value: Any, path: str) -> None:
    check(path, value, post(path, as_json({"model": "tiny", **ENDPOINTS[path], "prediction": value})))


@pytest.mark.parametrize("name", RAW_BODIES)
def test_what_is_no_json_is_a_400_too(post: Any, name: str) -> None:
    for path in ENDPOINTS:
        answer = post(path, RAW_BODIES[name])
        assert answer.status_code == 400, (path, answer.text[:300])


def test_a_duplicate_key_counts_by_its_last_value(post: Any) -> None:
    head = b'{"model":"tiny","prompt":"w5","prediction":'
    assert post("/v1/completions", head + b'7,"prediction":"w1"}').status_code == 200
    assert post("/v1/completions", head + b'"w1","prediction":7}').status_code == 400


@pytest.mark.parametrize("path", ENDPOINTS)
def test_malformed_ids_in_vllm_xargs_are_a_400(post: Any, path: str) -> None:
    junk: list[Any] = [None, 7, 1.5, {}, {"a": 1}, [None], [[1]], [{}], ["1"], [1.5], [-1], [100], [2**31]]
    junk += [[2**63], [10**30], "\ud800", [1] * 10 + ["x"]]
    for value in junk:
        body = {"model": "tiny", **ENDPOINTS[path], "vllm_xargs": {"gpu_align_prediction": value}}
        answer = post(path, as_json(body))
        assert answer.status_code == 400, (value, answer.text[:300])
        assert "prediction" in answer.json()["error"]["message"]
        assert "prediction" in answer.json()["error"]["param"]
    body = {"model": "tiny", **ENDPOINTS[path], "vllm_xargs": {"gpu_align_prediction": [1, 99]}}
    assert post(path, as_json(body)).status_code == 200


def test_the_oracle_knows_the_limits_of_the_application() -> None:
    limits = Limits.of(config(max_model_len=MAX_MODEL_LEN))
    assert {"characters": limits.characters, "parts": limits.settings.max_prediction_parts} == EXPECTED
