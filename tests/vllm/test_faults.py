"""Faults around an engine: a full disk, no home, no Numba. Each costs one line and no answer, and drafts go on."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.vllm.test_extras import Bench, K, N

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Fault:
    """line: a pattern of the one line; "" for none. before, after: code around the engine's start. In these and in
    the environment FILE is one of garbage."""

    line: str
    before: str = ""
    after: str = ""
    environment: tuple[tuple[str, str], ...] = ()


HIDE_NUMBA = """
import sys
hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "numba"}
for name in hidden:
    del sys.modules[name]
sys.modules["numba"] = None
from gpu_align.ops import jit
assert not jit.COMPILED
del sys.modules["numba"]  # vLLM imports it for a drafter of its own
sys.modules.update(hidden)
"""
#: What is compiled is looked for, and kept, there.
CACHE_NUMBA = """
import os
os.environ["NUMBA_CACHE_DIR"] = 'CACHE'
import numba
from gpu_align.ops import jit
assert jit.COMPILED
numba.config.CACHE_DIR = 'CACHE'
"""
#: And nowhere else, as beside the sources.
NOWHERE = (
    CACHE_NUMBA.replace("'CACHE'", "'FILE/numba'")
    + """
from numba.core import caching
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
"""
)
#: From the second file of the step log on the system says that there is no space left.
FULL_DISK = """
import os
from types import SimpleNamespace
from gpu_align import files
calls = []
def open_full(path, flags, mode=0o777):
    calls.extend([path] * (".yaml." in str(path)))
    return os.open("/dev/full", os.O_WRONLY) if len(calls) > 1 else os.open(path, flags, mode)
files.os = SimpleNamespace(**{**vars(os), "open": open_full})
"""
#: No directory can be made below a file, not even by root.
NO_HOME = tuple(
    (name, "FILE/home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
)
ANEW = "WARNING .*gpu_align's code on the host is compiled anew with each start: "
FAULTS = {
    "nothing": Fault(""),
    "a full disk": Fault(
        r"ERROR .*writes no step logs any more: OSError \(No space left on device\) at ", after=FULL_DISK
    ),
    "no home, and packages that cannot be written to": Fault(ANEW, NOWHERE, environment=NO_HOME),
    "no Numba": Fault("WARNING .* is slow, in plain Python: Numba is not installed", HIDE_NUMBA),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def is_whole(path: Path) -> bool:
    """A file of the step log that reads to its last line."""
    log = yaml.safe_load(path.read_text())
    return sum(len(step["new"]) for step in log["steps"]) == log["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_around_an_engine_costs_one_line(name: str, bench: Bench) -> None:
    fault, file = FAULTS[name], bench.folder / "file"
    file.write_bytes(random.Random(1).randbytes(999))

    def named(text: str) -> str:
        return text.replace("FILE", str(file))

    environment, before = {key: named(value) for key, value in fault.environment}, named(fault.before)
    with bench.engine("V1", re.sub(r"\W", "-", name), before=before, **environment) as engine:
        if fault.after:
            engine.execute(fault.after)
        for _ in range(2):
            assert bench.accepted(engine.run(bench.requests)) >= 3 * (N - 1 - N // (K + 1) - 2)
        assert [bool(re.search(fault.line, line)) for line in engine.warnings()] == [True] * bool(fault.line)
        assert all(map(is_whole, engine.steps.iterdir())), "no half-written file"
