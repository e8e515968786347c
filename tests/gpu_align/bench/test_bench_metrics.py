"""What `/metrics` counts between two moments, summed over engines, and how long it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("prometheus_client")
from gpu_align.tools.bench import measure as metrics
from gpu_align.tools.bench.measure import Counts, parse, scrape, settled

PLUGIN = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="1"} 20.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 1600.0
# TYPE gpu_align_steps counter
gpu_align_steps_total 40.0
# TYPE gpu_align_draft_tokens counter
gpu_align_draft_tokens_total{source="prediction",verdict="accepted"} 60.0
gpu_align_draft_tokens_total{source="prediction",verdict="rejected"} 7.0
gpu_align_draft_tokens_total{source="context",verdict="accepted"} 20.0
gpu_align_draft_tokens_total{source="context",verdict="rejected"} 1.0
# TYPE gpu_align_acceptance_ratio summary
gpu_align_acceptance_ratio_sum NaN
"""
NGRAM = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total 120.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total 30.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total 150.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total 80.0
"""


def test_the_plugin_counts_what_was_verified() -> None:
    """vLLM's own counters count draft slots, not drafts."""
    found = parse(PLUGIN).since(Counts())
    assert (found.generated, found.steps, found.accepted, found.rejected) == (120, 40, 80, 8)
    assert found.by_source() == {
        "context": {"accepted": 20, "rejected": 1},
        "prediction": {"accepted": 60, "rejected": 7},
    }


def test_requests_without_drafts_get_one_token_a_step() -> None:
    before = parse(PLUGIN)
    after = parse(PLUGIN.replace('{engine="1"} 20.0', '{engine="1"} 50.0'))
    found = after.since(before)
    assert (found.generated, found.steps, found.accepted, found.rejected, found.by_source()) == (
        30,
        30,
        0,
        0,
        {},
    )


def test_ngram_is_counted_by_vllm() -> None:
    found = parse(NGRAM)
    assert (found.steps, found.accepted, found.rejected) == (40, 80, 70)
    # Two answers of 64 tokens: 2 prefills, and 4 steps of which the last ones accept beyond the end.
    page = {"generation_tokens": 128, "request_success": 2, "spec_decode_num_drafts": 4}
    page |= {"spec_decode_num_draft_tokens": 128, "spec_decode_num_accepted_tokens": 128}
    text = "".join(f"# TYPE vllm:{name} counter\nvllm:{name}_total {n}\n" for name, n in page.items())
    assert parse(text).steps == 6
    assert (found.has_plugin, found.has_drafts) == (False, True)


@pytest.mark.parametrize("text", [None, "", "<html>", "a 1\n", "vllm:generation_tokens_total x\n"])
def test_what_is_no_page_of_vllm_counts_nothing(text: str | None) -> None:
    async def fetch() -> str | None:
        return text

    assert asyncio.run(scrape(fetch)) is None


def pages(*values: int) -> Callable[[], Awaitable[str | None]]:
    """Each scrape sees the next value; the last one stays."""
    waiting = list(values)

    async def fetch() -> str | None:
        value = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {value}\n"

    return fetch


def test_late_counters_are_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_POLL_S", 0.001)
    monkeypatch.setattr(metrics, "SETTLE_S", 0.2)
    monkeypatch.setattr(metrics, "REST_S", 0.05)

    def generated(fetch: Callable[[], Awaitable[str | None]]) -> int | None:
        found = asyncio.run(settled(fetch, Counts(generated=10), 30))
        return None if found is None else found.generated

    assert generated(pages(20, 20, 20, 40)) == 30
    assert generated(pages(40, 41, 42, 42)) == 32  # of other requests
    assert generated(pages(20)) == 10  # never all: another replica counted them
    assert (generated(pages(*range(40, 100_000))) or 0) >= 30  # other clients do not stop
