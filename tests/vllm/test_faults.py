"""What can go wrong around an engine: a full disk, no home, no Numba or a broken cache of it, a broken pack, a
killed core. Each costs one line and no answer, and drafts go on."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.vllm.engines import prompt_of, serve
from tests.vllm.test_extras import Bench, K, N
from tests.vllm.tiny_llama import build, greedy_by_transformers

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Fault:
    """line: a pattern of the one line; "" for none. before, after: code around the engine's start. In these and in
    the environment FILE is one of garbage, CACHE one of Numba's whose files are."""

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
    "a broken cache of Numba": Fault(ANEW, CACHE_NUMBA),
    "a broken recipe pack": Fault(
        "WARNING .*gpu_align drafts without recipes .*PackError",
        environment=(("GPU_ALIGN_RECIPES", "FILE"),),
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def is_whole(path: Path) -> bool:
    """A file of the step log that reads to its last line."""
    log = yaml.safe_load(path.read_text())
    return sum(len(step["new"]) for step in log["steps"]) == log["usage"]["output_tokens"] > 0


def broken_cache(bench: Bench) -> str:
    """What Numba has cached for an engine, each file cut short or overwritten."""
    cache, rng = bench.folder / "numba", random.Random(0)
    with bench.engine("V1", "which fills the cache", before=CACHE_NUMBA.replace("'CACHE'", repr(str(cache)))):
        pass
    files = [path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert files, "nothing was cached"
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if rng.random() < 0.5 else rng.randbytes(len(data)))
    return str(cache)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_around_an_engine_costs_one_line(name: str, bench: Bench) -> None:
    fault, file = FAULTS[name], bench.folder / "file"
    file.write_bytes(random.Random(1).randbytes(999))
    cache = broken_cache(bench) if fault.before is CACHE_NUMBA else ""

    def named(text: str) -> str:
        return text.replace("'CACHE'", repr(cache)).replace("FILE", str(file))

    environment, before = {key: named(value) for key, value in fault.environment}, named(fault.before)
    with bench.engine("V1", re.sub(r"\W", "-", name), before=before, **environment) as engine:
        if fault.after:
            engine.execute(fault.after)
        for _ in range(2):
            assert bench.accepted(engine.run(bench.requests)) >= 3 * (N - 1 - N // (K + 1) - 2)
        assert [bool(re.search(fault.line, line)) for line in engine.warnings()] == [True] * bool(fault.line)
        assert all(map(is_whole, engine.steps.iterdir())), "no half-written file"


def killed(model: Path, folder: Path, *, plugin: bool) -> dict[str, Any]:
    """What becomes of a server whose engine core is killed while it serves six requests, after six others."""
    greedy = greedy_by_transformers(model)
    answers = [(prompt_of(seed), greedy([*prompt_of(seed), 3], 14)) for seed in range(6)]  # 3: <assistant>

    def words(tokens: list[int]) -> str:
        return " ".join(f"w{token - 4}" for token in tokens)

    def ask(prompt: list[int], predicted: list[int], n: int) -> tuple[int, Any]:
        messages = [{"role": "user", "content": words(prompt)}]
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": n}
        body["prediction"] = {"type": "content", "content": words(predicted)}
        try:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            return answer.status_code, answer.json()
        except (httpx.HTTPError, ValueError):
            return 0, {}

    def texts() -> list[str]:
        return [ask(*each, 14)[1]["choices"][0]["message"]["content"].strip() for each in answers]

    environment = {"GPU_ALIGN_STRICT": "0", "GPU_ALIGN_RECIPES": "off"}
    with serve(model, folder, environment=environment, runner="V1", plugin=plugin) as server:
        assert texts() == [words(output) for _, output in answers]
        with ThreadPoolExecutor(6) as pool:
            pending = [pool.submit(ask, prompt, output[::-1], 200) for prompt, output in answers]
            time.sleep(0.25)
            for process in server.engine_processes():
                process.kill()
            found = {
                "statuses": sorted({each.result()[0] for each in pending}),
                "ended": server.has_ended(60),
            }
    if plugin:
        files = sorted(server.logs.glob("*.yaml"))
        assert files
        assert all(map(is_whole, files))
        with serve(model, folder, environment=environment, runner="V1") as server:
            _, answer = ask(*answers[0], 14)
            assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert set(files) <= {*server.logs.glob("*.yaml")}
    return found


def test_a_killed_engine_core_ends_the_server_as_without_the_plugin(tmp_path: Path) -> None:
    """Step logs are whole, stay, and go on after a restart."""
    model = build(tmp_path / "model")
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    assert killed(model, tmp_path / "with", plugin=True) == killed(model, tmp_path / "without", plugin=False)
