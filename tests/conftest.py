"""Shared by all tests: without a GPU the kernels run under Triton's interpreter, with one natively; no recipes."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fast_interpreter

# Triton decides at decoration time, so this must come before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The shipped recipes take an engine seconds to read, and change how many steps an output takes. Tests of recipes
# say which ones they want.
os.environ.setdefault("GPU_ALIGN_RECIPES", "off")

if os.environ.get("TRITON_INTERPRET") == "1":
    fast_interpreter.speed_up()

# Two workers on two cores: each test process keeps to itself.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign-count",
        type=int,
        default=1,
        metavar="N",
        help="tests/campaign and random batches of kernels check N times as many cases",
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama and its tokenizer."""
    from tests.vllm.tiny_llama import build

    return build(tmp_path_factory.mktemp("tiny-model"))


gc.disable()  # until all tests are imported: what they import stays

#: Tests that share an engine or a server run on one worker, so that it starts once: group → parts of their ids.
#: The longest come first, so that the workers end together. The rest uses vLLM in the test process.
ENGINES = {
    "campaign": ["campaign/test_greedy", "campaign/test_distribution"],
    "inner": ["test_v2_inner"],
    "extras": ["vllm/test_extras"],
    "bench": ["test_vllm_server_bench"],
    "campaign-server": ["campaign/"],
    "hybrid": ["test_v2_hybrid"],
    "upstream": ["test_v2_upstream"],
    "real": ["test_real_model"],
    "real-edits": ["vllm/test_real_edits"],
    "server": ["test_vllm_request_endpoints", "test_vllm_request_clients"],
    "v2": ["test_v2_output"],
    "v2-server": ["test_v2_server"],
    "ranks": ["campaign/test_ranks"],
    "recipes": ["test_v2_recipes"],
    "weights": ["vllm/test_weights"],
    "in-process": [""],
}


def engine_of(test_id: str) -> str:
    matches = ((len(part), name) for name, parts in ENGINES.items() for part in parts if part in test_id)
    return max(matches)[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines come last, in the order of their groups."""
    order = ["", *ENGINES]
    items.sort(
        key=lambda item: order.index(engine_of(item.nodeid) if item.get_closest_marker("vllm") else "")
    )


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection in a test looks at it again: that takes longer than what some of them time
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` hands out these groups. (With pytest 9.2, pytest-xdist 3.8 ignores `xdist_group`.)"""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadEngineScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return engine_of(nodeid)

    return LoadEngineScheduling(config, log)
