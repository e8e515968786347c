"""A server (V1, on the CPU) with a recipe pack and a memory of earlier answers: requests that bring no prediction
take fewer steps for the same text, and usage and metrics say what the drafts came from."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from request_server import serve
from usage_harness import moved, scrape
from v2_harness import Spoken, prompt_of
from vllm_harness import Server

pytestmark = pytest.mark.vllm

N = 24
ALONE = {"recipes": [], "memory": False}


@pytest.fixture(scope="module")
def server(spoken: Spoken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("recipe-server")
    variables = {
        "GPU_ALIGN_RECIPES": f"{spoken.pack},{directory / 'gone.json'}",
        "GPU_ALIGN_MEMORY_TOKENS": "100000",
        "GPU_ALIGN_USAGE_DETAILS": "1",
        "GPU_ALIGN_RECIPE_MISSES": str(directory / "misses"),
    }
    with serve(spoken.model, directory, "--enable-log-requests", environment=variables) as running:
        yield running


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": "tiny", "temperature": 0, "max_tokens": N, "ignore_eos": True, **body})
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


def answer(
    server: Server, prompt: list[int], xargs: dict[str, Any], **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and the details of its usage."""
    body = post(server, {"prompt": prompt, "vllm_xargs": xargs, "return_token_ids": True, **more})
    return body["choices"][0]["token_ids"], body["usage"].get("completion_tokens_details") or {}


def test_a_request_without_a_prediction_is_drafted_for_from_the_pack(
    server: Server, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    before, sums = scrape(server.url), Counter[str]()
    for prompt in spoken.prompts:
        token_ids, details = answer(server, prompt, {"memory": False})
        assert token_ids == greedy(prompt, N)
        assert not {"accepted_prediction_tokens", "rejected_prediction_tokens"} & details.keys()
        counts = details["gpu_align"]
        assert counts["steps"] < N
        assert set(counts["by_source"]) <= {"recipe", "context"}
        assert counts["by_source"]["recipe"]["accepted"] > 0
        sums["accepted"] += counts["by_source"]["recipe"]["accepted"]
        sums["rejected"] += (
            counts["by_source"]["recipe"]["drafted"] - counts["by_source"]["recipe"]["accepted"]
        )
    deltas = moved(before, scrape(server.url))
    for verdict, count in sums.items():
        name = f'gpu_align_draft_tokens_total{{source="recipe",verdict="{verdict}"}}'
        assert deltas.get(name, 0) == count
    assert not any(name.startswith(("gpu_align_requests", "gpu_align_prediction")) for name in deltas)


def test_a_request_chooses_its_packs(
    server: Server, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    prompt = spoken.prompts[0]
    name = spoken.pack.name.partition(".")[0]
    for chosen in ([name], name):
        token_ids, details = answer(server, prompt, {"recipes": chosen, "memory": False})
        assert token_ids == greedy(prompt, N)
        assert "recipe" in details["gpu_align"]["by_source"]
    before = scrape(server.url)
    token_ids, details = answer(server, prompt, ALONE)
    assert token_ids == greedy(prompt, N)
    assert not details.get("gpu_align")
    assert not moved(before, scrape(server.url))


def test_where_a_pack_cannot_be_read_an_unknown_name_is_told_once(
    server: Server, spoken: Spoken, greedy: Callable[[list[int], int], list[int]]
) -> None:
    """The front end cannot know the names then; the worker uses all packs."""
    prompt = spoken.prompts[0]
    for _ in range(2):
        token_ids, details = answer(server, prompt, {"recipes": ["nope"], "memory": False})
        assert token_ids == greedy(prompt, N)
        assert "recipe" in details["gpu_align"]["by_source"]
    warnings = [
        line for line in server.output.read_text().splitlines() if "names recipes that are not" in line
    ]
    assert len(warnings) == 1


def test_an_answer_is_remembered_for_its_tenant(
    server: Server, greedy: Callable[[list[int], int], list[int]]
) -> None:
    prompt, xargs = prompt_of(900), {"recipes": []}
    steps = []
    for salt in ("a", "a", "b", None, None):
        salted = {} if salt is None else {"cache_salt": salt}
        token_ids, details = answer(server, prompt, xargs, **salted)
        assert token_ids == greedy(prompt, N)
        counts = details["gpu_align"]
        steps.append((counts["steps"], "memory" in counts["by_source"]))
        if "memory" in counts["by_source"]:
            assert counts["by_source"]["memory"]["accepted"] > 0
            assert "accepted_prediction_tokens" not in details
    (first, _), (again, _), (other, _), _, (unsalted, _) = steps
    assert [drafted for _, drafted in steps] == [False, True, False, False, True]
    assert again < first == other
    assert unsalted < first
    assert not answer(server, prompt, ALONE, cache_salt="a")[1].get("gpu_align")
    # Nor is the answer of one that stays out remembered, whether it is drafted for or not.
    for salt, apart in (("c", ALONE), ("d", {"memory": False})):
        answer(server, prompt, apart, cache_salt=salt)
        later = answer(server, prompt, xargs, cache_salt=salt)[1]
        assert "memory" not in later["gpu_align"]["by_source"]
