"""The CPU step compiled by Numba, and as plain Python; when it is compiled, and what is kept of it."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from gpu_align.ops import host
from gpu_align.ops.step.reference import StepReference
from gpu_align.texts.several import joined
from tests.gpu_align.engine import Engine, edited
from tests.modules import ROOT, python

compiled_only = pytest.mark.skipif(not host.COMPILED, reason="needs Numba")
#: As much as an int32 holds: what arithmetic on NumPy's scalars would overflow with.
HOSTILE = (-(2**31), -1, 2**31 - 1)


def drafts(num_seeds: int) -> list[object]:
    """What is drafted for random requests, a step at a time, with tokens that no vocabulary has in between."""
    found: list[object] = []
    for seed in range(num_seeds):
        generator = random.Random(seed)
        alphabet = generator.choice([2, 5, 40])
        prediction = generator.choices(range(alphabet), k=generator.choice([0, 1, 2, 30, 300]))
        prompt = generator.choices(range(alphabet), k=generator.randint(0, 20))
        output = edited(generator, prediction, alphabet, 60)
        for _ in range(generator.randint(0, 2)):
            output[generator.randrange(len(output))] = generator.choice(HOSTILE)
        engine = Engine("reference", N=300, T=90)
        if seed % 2:  # several samples
            prediction = joined([prediction[:100], edited(generator, prediction, alphabet, 60)[:100]])
        engine.add(1, prediction, prompt, temperature=0.7)
        while output:
            step, output = output[: (num := generator.choice([1, 2, 5, 30]))], output[num:]
            engine.write(1, step)
            found += map(list, engine.propose([1]))
    return found


NO_NUMBA = ("numba", "None", "Numba is not installed", 8), ("numba.core.options", "sys", "Numba: cannot", 1)


@pytest.mark.parametrize(("module", "value", "said", "seeds"), NO_NUMBA, ids=["absent", "broken"])
def test_plain_python_drafts_the_same_and_never_overflows(module, value, said, seeds):
    code = f"""import json, sys, warnings
sys.modules["{module}"] = {value}
from gpu_align.ops import host
from tests.gpu_align.test_compiled import drafts
assert not host.COMPILED and host.not_kept.startswith({said!r}), host.not_kept
warnings.simplefilter("error")
print(json.dumps(drafts({seeds})))"""
    assert json.loads(python(code)[0]) == drafts(seeds)


def test_what_looks_through_all_modules_meets_no_invalid_function() -> None:
    """As vLLM does on the CPU when an engine starts."""
    pytest.importorskip("numba")
    assert vars(sys.modules["llvmlite.binding.ffi"].lib) == {}


@compiled_only
def test_no_step_compiles() -> None:
    """Whatever the strides of what it is given: a drafter that is built has compiled all."""
    engine = Engine("reference")
    step = engine.drafter._step
    assert isinstance(step, StepReference)
    engine.add(1, [1, 2, 3, 4, 5, 6], [9], [1, 2, 3])
    expected = engine.propose([1])
    wide = torch.full((4, engine.T + 7), -5, dtype=torch.int32)
    other = Engine("reference", rows=(wide[:, 3:-4], torch.zeros(4, dtype=torch.int32)))
    assert not other.token_ids.is_contiguous()
    other.add(1, [1, 2, 3, 4, 5, 6], [9], [1, 2, 3])
    assert other.propose([1]) == expected
    assert other.drafter._step._run is step._run
    assert len(step._run.signatures) == 1


@compiled_only
def test_what_is_compiled_is_kept_and_never_outlives_a_source(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "gpu_align", tmp_path / "gpu_align", ignore=shutil.ignore_patterns("__pycache__"))
    source = """
from gpu_align.ops import compose
from gpu_align.ops.host import Entry
from .numbers import ONE

@Entry
def twice(x):
    return compose.MAX_REPLAYS * x * ONE
"""
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "__init__.py").write_text(source)
    (tmp_path / "loops" / "numbers.py").write_text("ONE = 1\n")
    code = "import gpu_align, json\nfrom loops import twice\nhits = twice.prepare(21).stats.cache_hits.values()\n"
    code += "print(json.dumps([gpu_align.__file__, sum(hits), twice(21)]))"
    cache = tmp_path / "cache"

    def start() -> tuple[int, int]:
        file, hits, found = json.loads(python(code, folder=tmp_path, NUMBA_CACHE_DIR=str(cache))[0])
        assert Path(file).is_relative_to(tmp_path)
        return hits, found

    assert start() == (0, 84)
    assert start() == (1, 84)
    # Nor does it depend on what else a process has imported.
    code = f"from gpu_align.ops.host import lcs\n{code}"
    assert start() == (1, 84)
    # A constant in another file than the function that is kept, of the same package or an operation.
    (tmp_path / "loops" / "numbers.py").write_text("ONE = 2\n")
    assert start() == (0, 168)
    (tmp_path / "loops" / "numbers.py").write_text("ONE = 1\n")
    numbers = tmp_path / "gpu_align" / "ops" / "compose" / "__init__.py"
    source = numbers.read_text()
    assert "MAX_REPLAYS = 4\n" in source
    numbers.write_text(source.replace("MAX_REPLAYS = 4\n", "MAX_REPLAYS = 5\n"))
    assert start() == (0, 105)
