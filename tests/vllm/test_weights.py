"""Whatever changes the weights of a running engine ends its memory of earlier answers, on both runners."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.engines import Request, V2Engine, prompt_of

pytestmark = pytest.mark.vllm

#: Calls that change the model, or may. On a CPU workers have no sleep mode: the engine core's part of it runs.
CHANGES = {
    "reload_weights": "engine.llm.collective_rpc('reload_weights')",
    "a worker's own method, which fails": """
try:
    engine.llm.collective_rpc("update_weights", args=({},))
except Exception as error:
    assert "eight" in str(error), error
""",
    "reset_prefix_cache": "assert engine.llm.reset_prefix_cache()",
    "a new version": "engine.core.set_weight_version('2')",
    "sleep of level 2": "engine.core.sleep(2); engine.core.wake_up()",
    "other weights": """
def change(model):
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.roll(1, 0)
engine.llm.apply_model(change)
""",
}
SIZE = "found = engine.scheduler._recall._memory.num_tokens"
N = 8


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_changed_model_remembers_no_answer(runner: str, start_engine: Callable[..., V2Engine]) -> None:
    environment = {
        "GPU_ALIGN_MEMORY_TOKENS": "1000",
        "GPU_ALIGN_RECIPES": "off",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    engine = start_engine(f"weights {runner}", runner=runner, num_draft_tokens=4, environment=environment)
    request = Request(prompt_of(3), None, N)
    first, again = engine.run([request]), engine.run([request])
    assert again.outputs == first.outputs
    assert again.accepted > max(first.accepted, N // 2), "answers are remembered"
    for name, code in CHANGES.items():
        assert engine.execute(SIZE) >= N, name
        engine.execute(code)
        assert engine.execute(SIZE) == 0, name
        run = engine.run([request])
        if name == "other weights":
            assert run.outputs != first.outputs
        else:
            assert (run.outputs, run.accepted) == (first.outputs, first.accepted), name
