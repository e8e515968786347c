"""vLLM's adaptive verification: our confidences in its own manager, and starting where it cannot work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from v2_harness import Request, V2Engine, edited, prompt_of

pytestmark = pytest.mark.vllm

Greedy = Callable[[list[int], int], list[int]]
N = 30


def served(greedy: Greedy) -> list[Request]:
    """Without a prediction, verbatim, edited, unrelated."""
    requests = []
    for seed in range(8):
        output = greedy(prompt_of(seed), N)
        prediction = (None, output, edited(output, seed), prompt_of(seed + 99, 30))[seed % 4]
        requests.append(Request(prompt_of(seed), prediction, N, arrives=seed // 3))
    return requests


def test_vllm_trims_by_our_confidences(k16: V2Engine, greedy: Greedy) -> None:
    """Real manager, real compaction of the batch, real rejection of ragged drafts. The host chooses how many
    drafts a step is worth, from confidences a step old; the device, which of them."""
    requests = served(greedy)
    k16.trim(0.02)
    try:
        run = k16.run(requests)
    finally:
        steps = k16.trim(None)
    assert run.outputs == [greedy(request.prompt, N) for request in requests]
    assert run.accepted > 60
    drafted = [(row, step) for step in steps for row in step.values() if row[0]]
    assert sum(row[1] for row, _ in drafted) < 0.7 * sum(row[0] for row, _ in drafted)
    trimmed = 0
    for step in steps:
        kept, cut = [], []
        for scheduled, verified, confidences in step.values():
            survival = 1.0
            for k in range(scheduled):
                survival *= confidences[k]
                (kept if k < verified else cut).append(survival)
        if kept and cut:
            trimmed += 1
            assert min(kept) >= max(cut)  # what was not proposed has confidence 0: it goes first
    assert trimmed >= 2
    # In some steps nothing was worth verifying.
    assert any(
        sum(row[1] for row in step.values()) == 0 < sum(row[0] for row in step.values()) for step in steps
    )
    # The scheduler heard of fewer accepted drafts than it gave slots, and nothing is left over.
    assert k16.state() == {"occupied": 0, "known": 0, "counted": 0, "rows": 0}


def check_one_warning(engine: V2Engine, greedy: Greedy, reason: str) -> None:
    (line,) = [line for line in engine.warnings() if "adaptive" in line]
    assert "without adaptive verification" in line
    assert reason in line
    output = greedy(prompt_of(3), N)
    assert engine.run([Request(prompt_of(3), output, N)]).outputs == [output]


def test_the_server_starts_where_the_attention_backend_refuses(k4: V2Engine, greedy: Greedy) -> None:
    check_one_warning(k4, greedy, "CPUAttentionBackend allows none")


def test_the_server_starts_where_the_configuration_refuses(tight: V2Engine, greedy: Greedy) -> None:
    check_one_warning(tight, greedy, "requires full CUDA graphs")
