"""The server's own counts: `/metrics` before and after each round."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

#: How long `/metrics` may lag behind the last answer.
SETTLE_S = 3.0
#: How long other counters may still move once all output tokens are counted.
REST_S = 0.5
_POLL_S = 0.05


_COUNTERS = frozenset(
    {
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "gpu_align_steps_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    }
)


@dataclass(frozen=True)
class Counts:
    """Counters of one moment, or what they counted between two.

    Attributes:
        generated: output tokens of all requests.
        plugin_steps: forward passes that produced tokens of a request that gets drafts (our plugin's counter).
        drafts: draft tokens that the plugin verified, by (source, verdict).
        vllm_drafted, vllm_accepted: draft tokens as vLLM counts them, also after an answer's end.
        vllm_drafts: steps of a request that verified draft tokens, as vLLM counts them.
        requests: finished requests.
        has_plugin: whether the server has our plugin's counters.
        has_drafts: whether it has vLLM's counters of speculative decoding.
        info: labels of `gpu_align_info`, empty where there is none.
    """

    generated: int = 0
    plugin_steps: int = 0
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)
    vllm_drafted: int = 0
    vllm_accepted: int = 0
    vllm_drafts: int = 0
    requests: int = 0
    has_plugin: bool = False
    has_drafts: bool = False
    info: dict[str, str] = field(default_factory=dict)

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        drafts = Counter({key: n - before.drafts[key] for key, n in self.drafts.items()})
        return Counts(
            self.generated - before.generated,
            self.plugin_steps - before.plugin_steps,
            drafts,
            self.vllm_drafted - before.vllm_drafted,
            self.vllm_accepted - before.vllm_accepted,
            self.vllm_drafts - before.vllm_drafts,
            self.requests - before.requests,
            self.has_plugin,
            self.has_drafts,
        )

    @property
    def accepted(self) -> int:
        """Draft tokens that the model agreed with, from all sources."""
        return self._verdict("accepted") if self.has_plugin else self.vllm_accepted

    @property
    def rejected(self) -> int:
        """Draft tokens that were verified and refused."""
        return self._verdict("rejected") if self.has_plugin else self.vllm_drafted - self.vllm_accepted

    @property
    def steps(self) -> int:
        """Forward passes that produced tokens, a pass counted once for each request in it.

        The plugin counts them for requests that get drafts. Other requests get one token a step. With vLLM's own
        drafts this is the larger of two lower bounds: the output tokens less the accepted ones, of which some may
        be beyond an answer's end; and the steps with drafts and one prefill a request.
        """
        if self.has_plugin or not self.vllm_drafts:
            return self.plugin_steps or self.generated
        return max(self.generated - self.vllm_accepted, self.vllm_drafts + self.requests)

    def by_source(self) -> dict[str, dict[str, int]]:
        """Return accepted and rejected draft tokens of each source that had any."""
        sources = sorted({source for (source, _), n in self.drafts.items() if n})
        verdicts = ("accepted", "rejected")
        return {source: {v: self.drafts[source, v] for v in verdicts} for source in sources}

    def _verdict(self, verdict: str) -> int:
        return sum(n for (_, found), n in self.drafts.items() if found == verdict)


def parse(text: str) -> Counts:
    """Read the counters of a `/metrics` page, summed over engines and API servers.

    Raises:
        ValueError: it is no such page.
    """
    totals: Counter[str] = Counter()
    drafts: Counter[tuple[str, str]] = Counter()
    has_plugin, info = False, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _COUNTERS:
                totals[sample.name] += int(sample.value)
            has_plugin |= sample.name.startswith("gpu_align_")
            if sample.name == "gpu_align_draft_tokens_total":
                drafts[sample.labels["source"], sample.labels["verdict"]] += int(sample.value)
            elif sample.name == "gpu_align_info":
                info = dict(sample.labels)
    return Counts(
        totals["vllm:generation_tokens_total"],
        totals["gpu_align_steps_total"],
        drafts,
        totals["vllm:spec_decode_num_draft_tokens_total"],
        totals["vllm:spec_decode_num_accepted_tokens_total"],
        totals["vllm:spec_decode_num_drafts_total"],
        totals["vllm:request_success_total"],
        has_plugin,
        "vllm:spec_decode_num_drafts_total" in totals,
        info,
    )


async def scrape(fetch: Callable[[], Awaitable[str | None]]) -> Counts | None:
    """Return the counters; None where the server has no `/metrics` that vLLM wrote."""
    text = await fetch()
    try:
        return parse(text) if text and "vllm:generation_tokens" in text else None
    except (ValueError, KeyError, OverflowError):
        return None


async def settled(fetch: Callable[[], Awaitable[str | None]], before: Counts, tokens: int) -> Counts | None:
    """Return what was counted since `before`, once all `tokens` output tokens are in it and nothing moves.

    The counters of the last step may come a moment after its tokens. After `SETTLE_S` seconds, or `REST_S` seconds
    after all tokens are in it, it returns what there is: other clients may keep a server busy.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    last: Counts | None = None
    while True:
        now = await scrape(fetch)
        if now is None:
            return None
        found = now.since(before)
        if found == last and found.generated >= tokens:
            return found
        if found.generated >= tokens:
            deadline = min(deadline, loop.time() + REST_S)
        if loop.time() >= deadline:
            return found
        last = found
        await asyncio.sleep(_POLL_S)
