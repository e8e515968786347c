"""Response memory: ``python -m benchmarks.recipes.memory [--write]``.

Requests without predictions draft from earlier answers. Four kinds of earlier answers, each beside the same
requests without memory; the first also beside the earlier version as a prediction.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corpus import build as corpus
from benchmarks.quality.runs import Entry, read_entries
from benchmarks.recipes import json_records, page, reference_pages, tasks, triage
from benchmarks.recipes.groups import Output, shuffled
from benchmarks.recipes.runs import BATCH_SIZE, Counts, base_recipes, records_of
from gpu_align import Recipes
from gpu_align.memory import ResponseMemory
from gpu_align.simulate import Record
from gpu_align.simulate.drafter_policy import replay_batched

#: Tokens that a memory holds, and that a request is given of it.
MEMORY_TOKENS = 65_536
SIZES = (16, 64)
REAL = ("python", "document", "json", "config", "sql")
Ids = Sequence[int]


class Case(NamedTuple):
    """Requests of one kind: each with what is remembered when it comes, and what a client would bring."""

    name: str
    records: list[Record]
    recalled: list[list[int]]
    prediction: list[list[int]] | None = None


def _recall(answers: Iterable[Ids]) -> list[int]:
    """What a request is given when these answers are remembered, the oldest first."""
    memory = ResponseMemory(MEMORY_TOKENS)
    for tokens in answers:
        memory.remember(None, tokens)
    found: list[int] = memory.recall(None, MEMORY_TOKENS).tolist()
    return found


def _blank(entry: Entry) -> Record:
    return Record(entry.record.id, [], [], entry.record.output, "tekken")


def _by_package(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.package].append(entry)
    return found


def next_version(entries: Sequence[Entry]) -> Case:
    """A file is written again. The memory holds its earlier version among those of up to 6 other files."""
    packages = _by_package(entries)
    recalled = []
    for entry in entries:
        others = shuffled((o for o in packages[entry.package] if o is not entry), entry.record.id)[:6]
        texts = [o.record.prediction for o in others]
        while sum(map(len, texts)) + len(entry.record.prediction) > MEMORY_TOKENS:
            texts.pop()
        half = len(texts) // 2
        recalled.append(_recall([*texts[:half], entry.record.prediction, *texts[half:]]))
    return Case(
        "next_version", [_blank(e) for e in entries], recalled, [e.record.prediction for e in entries]
    )


def same_package(entries: Sequence[Entry]) -> Case:
    """A file is written. The memory holds the other files of its package."""
    packages = _by_package(entries)
    recalled = []
    for entry in entries:
        others = shuffled((o for o in packages[entry.package] if o is not entry), entry.record.id)
        recalled.append(_recall(o.record.output for o in others))
    return Case("same_package", [_blank(e) for e in entries], recalled)


def unrelated(entries: Sequence[Entry]) -> Case:
    """A file is written. The memory holds texts of another sort, of other packages."""
    recalled = []
    for entry in entries:
        others = (
            o
            for o in entries
            if o.package != entry.package and (o.kind == "python") != (entry.kind == "python")
        )
        recalled.append(_recall(o.record.output for o in shuffled(others, entry.record.id)))
    return Case("unrelated", [_blank(e) for e in entries], recalled)


def one_form(name: str, outputs: Sequence[Output]) -> Case:
    """Records of one form, one after another. The memory holds those before."""
    records = records_of(outputs)
    memory = ResponseMemory(MEMORY_TOKENS)
    recalled = []
    for record in records:
        recalled.append(memory.recall(None, MEMORY_TOKENS).tolist())
        memory.remember(None, record.output)
    return Case(name, records, recalled)


def forms(folder: Path) -> Iterator[Case]:
    """The forms of the tasks."""
    outputs = tasks.read(json_records.NAME, folder).outputs
    for form in json_records.FORMS:
        asked = f"Extract the {form.name} from"
        yield one_form(f"form: {form.name}", [o for o in outputs if asked in o.prompt])
    for name in (triage.NAME, reference_pages.NAME):
        yield one_form(f"form: {name}", tasks.read(name, folder).outputs)


def replayed(case: Case, size: int, recipes: Recipes | None) -> dict[str, Any]:
    """The counts of a case without memory, with it, and with the prediction where there is one."""

    def run(texts: Sequence[list[int]], memory: bool) -> dict[str, Any]:
        records = [
            Record(r.id, r.prompt, text, r.output, r.tokenizer)
            for r, text in zip(case.records, texts, strict=True)
        ]
        pairs = replay_batched(records, size, recipes=recipes, batch_size=BATCH_SIZE, memory=memory).pairs
        return Counts.of(pairs).as_json()

    found = {"without": run([[]] * len(case.records), False), "memory": run(case.recalled, True)}
    if case.prediction is not None:
        found["prediction"] = run(case.prediction, False)
    return found


def measure(corpus_file: Path, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All cases at each K: case → K → drafter → counts."""
    entries = [e for e in read_entries(corpus_file) if e.tokens == "tekken" and e.kind in REAL]
    recipes = base_recipes()
    results: dict[str, Any] = {}
    for case in (next_version(entries), *forms(folder), same_package(entries), unrelated(entries)):
        results[case.name] = {str(size): replayed(case, size, recipes) for size in SIZES}
        for size in SIZES:
            counts = results[case.name][str(size)]
            say(f"{case.name:22} K={size:2} " + " ".join(f"{n} {c['steps']:,}" for n, c in counts.items()))
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: a package could not be had)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes.memory", description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, default=Path(".cache/corpus-test.jsonl.gz"), help="made if not there"
    )
    parser.add_argument("--tasks", type=Path, default=tasks.DEFAULT_OUT, help="made if not there")
    parser.add_argument("--write", action="store_true", help=f"into {page.RESULTS} and the page")
    options = parser.parse_args(argv)
    if not options.corpus.is_file() and (failed := corpus.main([str(options.corpus), "--set", "test"])):
        return failed
    if failed := tasks.ensure(options.tasks):
        return failed
    found = measure(options.corpus, options.tasks, lambda line: print(line, flush=True))
    print(page.memory_table({"memory": found}))
    if options.write:
        page.update(memory=found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
