"""Recipe packs: ``python -m benchmarks.recipes [--write]``.

For each task: learn a pack from the samples, then replay the outputs, which have no predictions, with the pack
alone, with the whole drafter and with the peers, at K = 16. Then misses and merge, what packs cost
on free prose, what a pack covers of Python's structure, and how long learning takes.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.processes import pool
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.recipes import changelogs, page, python_client, python_code, tasks, triage
from benchmarks.recipes.groups import NUM_SAMPLES, Task
from benchmarks.recipes.runs import (
    TOKENIZER,
    K,
    base_recipes,
    counts_of,
    drafters,
    encode,
    merged,
    ours,
    records_of,
    structural_tokens,
    token_texts,
)
from benchmarks.tables import command
from gpu_align import RecipePack, Recipes, Source
from gpu_align.simulate import Record, load_tokenizer
from gpu_align.tools.simulate.replay import PairResult

Say = Callable[[str], None]
#: Groups of samples of so many tokens, for the time and the memory of learning.
NUM_GROUPS, NUM_TOKENS = 1_000, 500


def learn(name: str, task: Task) -> RecipePack:
    """The pack of a task's samples."""
    return RecipePack.observe(task.groups, encode, token_texts, task=name)


def size_of(pack: RecipePack) -> dict[str, int]:
    """Entries by kind, and the bytes of the file."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("recipes.json", "recipes.json.gz")]
        for path in paths:
            pack.save(path)
        plain, gzipped = (path.stat().st_size for path in paths)
    shape = sum(entry.is_shape for entry in pack.observed)
    return {
        "entries": len(pack.observed),
        "literal": len(pack.observed) - shape,
        "shape": shape,
        "bytes": plain,
        "gzipped": gzipped,
    }


def measure_task(
    task: Task, pack: RecipePack, recipes: Recipes
) -> tuple[dict[str, Any], dict[str, list[PairResult]]]:
    """Everything about one task, and the results of its runs."""
    records = records_of(task.outputs)
    results = {name: run(records) for name, run in drafters(base_recipes(), recipes, task).items()}
    found_merged = merged(pack, task.outputs)
    found = {
        "groups": len(task.groups),
        "sample_tokens": sum(len(ids) for group in task.groups for ids in encode(group.samples)),
        "outputs": len(task.outputs),
        "output_tokens": sum(len(record.output) for record in records),
        "pack": size_of(pack),
        "report": found_merged["learned"],
        "runs": {name: counts_of(pairs) for name, pairs in results.items()},
        "merged": found_merged,
    }
    return found, results


def structure_of(records: list[Record], pairs: list[PairResult]) -> dict[str, Any]:
    """Tokens of the outputs and those that recipes drafted, by what is structural."""
    tokenizer = load_tokenizer(TOKENIZER)
    found: dict[str, Any] = {"tokens": 0}
    parts = {name: {"tokens": 0, "covered": 0} for name in ("structural", "free")}
    for record, pair in zip(records, pairs, strict=True):
        pieces = [tokenizer.token_bytes(token) for token in record.output]
        structural = structural_tokens(b"".join(pieces).decode(), pieces)
        covered = pair.origins == Source.RECIPE
        found["tokens"] += len(pieces)
        for part, which in (("structural", structural), ("free", ~structural)):
            parts[part]["tokens"] += int(which.sum())
            parts[part]["covered"] += int((covered & which).sum())
    return {**found, **parts}


def prose_of(records: list[Record], recipes: Mapping[str, Recipes]) -> dict[str, Any]:
    """What packs do to free prose: its own, the shipped one, and those of other tasks, together and each alone."""
    others = {name: found for name, found in recipes.items() if name != changelogs.NAME}
    runs: dict[str, Recipes | None] = {"none": None, "own": recipes[changelogs.NAME], "base": base_recipes()}
    runs |= {"foreign": Recipes.join(others), **others}
    return {name: counts_of(ours(found)(records)) for name, found in runs.items()}


def groups_of(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Groups of samples of `NUM_TOKENS` tokens: the task's, one behind another and cut."""
    found = tasks.read(triage.NAME, folder).groups
    tokenizer = load_tokenizer(TOKENIZER)
    samples = [cycle(group.samples[i] for group in found) for i in range(NUM_SAMPLES)]
    groups = []
    for number in range(NUM_GROUPS):
        cut = []
        for stream in samples:
            ids = [token for text in islice(stream, 3) for token in tokenizer.encode(text)][:NUM_TOKENS]
            cut.append(b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="ignore"))
        groups.append((triage.NAME, f"Report {number}\n", cut))
    return groups


def learning(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of learning; the peak is that of this process, which has to be a fresh one."""
    groups = groups_of(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, began_processor = time.perf_counter(), time.process_time()
    pack = RecipePack.observe(groups, encode, token_texts, task=triage.NAME)
    seconds, processor = time.perf_counter() - began, time.process_time() - began_processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "groups": NUM_GROUPS, "samples": NUM_SAMPLES, "tokens": NUM_TOKENS, "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1), "before_mib": before // 1024, "peak_mib": peak // 1024,
        "entries": len(pack.observed),
    }  # fmt: skip


def measure(folder: Path, say: Say) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"num_draft_tokens": K, "tasks": {}, "python": {}}
    recipes = {}
    for name in tasks.TASKS:
        task = tasks.read(name, folder)
        began = time.perf_counter()
        pack = learn(name, task)
        say(f"{name}: {len(pack.observed):,} entries in {time.perf_counter() - began:.1f} s")
        recipes[name] = pack.tokenize(encode, token_texts)
        found["tasks"][name], results = measure_task(task, pack, recipes[name])
        if name in (python_client.NAME, python_code.NAME):
            found["python"][name] = structure_of(records_of(task.outputs), results["pack_alone"])
        report = found["tasks"][name]["report"]
        say(f"  coverage {report['coverage']:.1%}, accuracy {report['accuracy']:.2%}")
    found["prose"] = prose_of(records_of(tasks.read(changelogs.NAME, folder).outputs), recipes)
    with pool(1) as fresh:
        found["learning"] = fresh.apply(learning, [folder])
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: something could not be had)."""
    parser = command("benchmarks.recipes", __doc__)
    parser.add_argument("--write", action="store_true", help=f"into {page.RESULTS} and the page")
    options = parser.parse_args(argv)
    if not add_to_path():
        print("error: run python -m benchmarks.quality.build_suffix_peer first", file=sys.stderr)
        return 1
    if failed := tasks.ensure(tasks.DEFAULT_OUT):
        return failed
    found = measure(tasks.DEFAULT_OUT, lambda line: print(line, flush=True))
    for name, block in page.BLOCKS.items():
        if name != "memory":  # of `benchmarks.recipes.memory`
            print(f"\n{block(found)}")
    if options.write:
        page.update(**found)
    return 0
