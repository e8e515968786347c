"""Time and memory of learning from 1,000 groups of 5 samples of 500 tokens, in a process of its own."""

from __future__ import annotations

import resource
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.recipes import tasks
from benchmarks.recipes.groups import NUM_SAMPLES
from benchmarks.recipes.runs import TOKENIZER, encode, token_texts
from gpu_align import RecipePack
from gpu_align.simulate import load_tokenizer

NUM_GROUPS, NUM_TOKENS = 1_000, 500
#: The task whose samples are put one behind another.
TASK = "triage"


def groups_of(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Groups of samples of `NUM_TOKENS` tokens: the task's, one behind another and cut."""
    found = tasks.read(TASK, folder).groups
    tokenizer = load_tokenizer(TOKENIZER)
    samples = [cycle(group.samples[i] for group in found) for i in range(NUM_SAMPLES)]
    groups = []
    for number in range(NUM_GROUPS):
        cut = []
        for stream in samples:
            ids = [token for text in islice(stream, 3) for token in tokenizer.encode(text)][:NUM_TOKENS]
            cut.append(b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="ignore"))
        groups.append((TASK, f"Report {number}\n", cut))
    return groups


def measured(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of learning; the peak is that of this process, which has to be a fresh one."""
    groups = groups_of(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, began_processor = time.perf_counter(), time.process_time()
    pack = RecipePack.observe(groups, encode, token_texts, task=TASK)
    seconds, processor = time.perf_counter() - began, time.process_time() - began_processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "groups": NUM_GROUPS, "samples": NUM_SAMPLES, "tokens": NUM_TOKENS, "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1), "before_mib": before // 1024, "peak_mib": peak // 1024,
        "entries": len(pack.observed),
    }  # fmt: skip
