"""Recipe packs: ``python -m benchmarks.recipes [--write]``.

For each task: learn a pack from the samples, then replay the outputs, which have no predictions, with the pack
alone, with the whole drafter and with the peers, at K = 16. Then misses and merge, and what packs cost
on free prose.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.recipes import changelogs, page, tasks
from benchmarks.recipes.groups import Task
from benchmarks.recipes.runs import (
    K,
    base_recipes,
    counts_of,
    drafters,
    encode,
    merged,
    ours,
    records_of,
    token_texts,
)
from benchmarks.tables import command
from gpu_align import RecipePack, Recipes
from gpu_align.recipes import observe
from gpu_align.simulate import Record

Say = Callable[[str], None]


def learn(name: str, task: Task) -> RecipePack:
    """The pack of a task's samples."""
    return observe(task.groups, encode, token_texts, task=name)


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


def measure_task(task: Task, pack: RecipePack, recipes: Recipes) -> dict[str, Any]:
    """Everything about one task."""
    records = records_of(task.outputs)
    runs = drafters(base_recipes(), recipes, task)
    found_merged = merged(pack, task.outputs)
    return {
        "groups": len(task.groups),
        "sample_tokens": sum(len(ids) for group in task.groups for ids in encode(group.samples)),
        "outputs": len(task.outputs),
        "output_tokens": sum(len(record.output) for record in records),
        "pack": size_of(pack),
        "report": found_merged["learned"],
        "runs": {name: counts_of(run(records)) for name, run in runs.items()},
        "merged": found_merged,
    }


def prose_of(records: list[Record], recipes: Mapping[str, Recipes]) -> dict[str, Any]:
    """What packs do to free prose: its own, and those of other tasks together."""
    others = {name: found for name, found in recipes.items() if name != changelogs.NAME}
    runs: dict[str, Recipes | None] = {
        "none": None,
        "own": recipes[changelogs.NAME],
        "foreign": Recipes.join(others),
    }
    return {name: counts_of(ours(found)(records)) for name, found in runs.items()}


def measure(folder: Path, say: Say) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"num_draft_tokens": K, "tasks": {}}
    recipes = {}
    for name in tasks.TASKS:
        task = tasks.read(name, folder)
        began = time.perf_counter()
        pack = learn(name, task)
        say(f"{name}: {len(pack.observed):,} entries in {time.perf_counter() - began:.1f} s")
        recipes[name] = pack.tokenize(encode, token_texts)
        found["tasks"][name] = measure_task(task, pack, recipes[name])
        report = found["tasks"][name]["report"]
        say(f"  coverage {report['coverage']:.1%}, accuracy {report['accuracy']:.2%}")
    found["prose"] = prose_of(records_of(tasks.read(changelogs.NAME, folder).outputs), recipes)
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
    for block in page.PRINTED.values():
        print(f"\n{block(found)}")
    if options.write:
        page.update(**found)
    return 0
