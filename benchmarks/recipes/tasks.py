"""The data of the tasks: ``python -m benchmarks.recipes.tasks [OUT_DIR]``.

For each task two files, ``NAME.samples.jsonl`` to learn from and ``NAME.outputs.jsonl`` to replay::

    {"task": "triage", "prompt": "…", "samples": ["…", "…", "…", "…", "…"]}
    {"task": "triage", "prompt": "…", "output": "…"}

No model has written them: forms are made here, what fills them is of pinned packages. The samples of a group are
different records of one kind. The same packages give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.corpus.build import DEFAULT_CACHE
from benchmarks.corpus.files import Fetch, download
from benchmarks.recipes import changelogs, json_records, python_client, python_code, triage
from benchmarks.recipes.groups import Group, Output, Task
from benchmarks.recipes.packages import Shelf
from benchmarks.tables import command

DEFAULT_OUT = Path(".cache/recipe_tasks")
#: Name → what makes it, in the order of the tables.
TASKS: dict[str, Callable[[Shelf], Task]] = {
    module.NAME: module.task for module in (json_records, triage, python_client, python_code, changelogs)
}


def write(name: str, task: Task, folder: Path) -> dict[str, str]:
    """Write a task's two files; path → the SHA-256 of its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    parts: Mapping[str, Sequence[Group] | Sequence[Output]] = {
        "samples": task.groups,
        "outputs": task.outputs,
    }
    for part, rows in parts.items():
        path = folder / f"{name}.{part}.jsonl"
        lines = (json.dumps(row._asdict(), ensure_ascii=False, separators=(",", ":")) for row in rows)
        content = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(content)
        digests[str(path)] = hashlib.sha256(content).hexdigest()
    return digests


def read(name: str, folder: Path) -> Task:
    """A task from its two files."""
    groups = [
        Group(row["task"], row["prompt"], tuple(row["samples"]))
        for row in map(json.loads, _lines(folder / f"{name}.samples.jsonl"))
    ]
    return Task(groups, [Output(**row) for row in map(json.loads, _lines(folder / f"{name}.outputs.jsonl"))])


def ensure(folder: Path) -> int:
    """Make the data of all tasks unless they are there; returns `main`'s exit code."""
    there = all(
        (folder / f"{name}.{part}.jsonl").is_file() for name in TASKS for part in ("samples", "outputs")
    )
    return 0 if there else main([str(folder)])


def _lines(path: Path) -> Iterable[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def main(argv: list[str] | None = None, fetch: Fetch = download) -> int:
    """Command line; returns the exit code (0, 1: a package could not be had)."""
    parser = command("benchmarks.recipes.tasks", __doc__)
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT, metavar="OUT_DIR")
    said = f"downloads are kept here ({DEFAULT_CACHE})"
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help=said)
    options = parser.parse_args(argv)
    shelf = Shelf(options.cache, fetch)
    for name, make in TASKS.items():
        try:
            task = make(shelf)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {len(task.groups)} groups, {len(task.outputs)} outputs")
        for path, digest in write(name, task, options.out).items():
            print(f"  {path} sha256 {digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
