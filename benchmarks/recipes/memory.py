"""Response memory: ``python -m benchmarks.recipes.memory [--write]``.

Requests without predictions draft from earlier answers. Six kinds of earlier answers, each beside the same
requests without memory; the first also beside the earlier version as a prediction. The prompt of a file names its
package, the package's files and its own path, and says nothing of its content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.quality.replays import replay_batched
from benchmarks.quality.runs import Entry, cached_corpus, make_corpora, read_entries
from benchmarks.recipes import json_records, page, tasks, triage
from benchmarks.recipes.groups import Output, shuffled
from benchmarks.recipes.runs import BATCH_SIZE, base_recipes, counts_of, encode, records_of
from benchmarks.tables import command
from gpu_align import Recipes
from gpu_align.memory import Recalled, ResponseMemory
from gpu_align.simulate import Record

#: Tokens that a memory holds, and that a request is given of it.
MEMORY_TOKENS, RECALLED_TOKENS = 1 << 20, 65_536
#: K; of the cases that nothing is asked of the first alone.
SIZES = (16, 64)
MORE = ("all_packages", "unrelated_alike")
REAL = ("python", "document", "json", "config", "sql")
Ids = Sequence[int]


class Case(NamedTuple):
    """Requests of one kind: each with what is remembered when it comes, and what a client would bring."""

    name: str
    records: list[Record]
    recalled: list[Recalled]
    prediction: list[list[int]] | None = None


def _recall(prompt: Ids, answers: Iterable[tuple[Ids, Ids]]) -> Recalled:
    """What a request is given when these prompts and answers are remembered, the oldest first."""
    memory = ResponseMemory(MEMORY_TOKENS)
    for asked, tokens in answers:
        memory.remember(None, tokens, asked)
    return memory.recall_for(None, prompt, RECALLED_TOKENS)


def _prompts(entries: Sequence[Entry]) -> dict[str, list[int]]:
    """Record's id → the prompt that asks for the file."""
    prompts = {}
    for package, members in _by_package(entries).items():
        paths = {entry.record.id: entry.record.id.split("/", 2)[-1] for entry in members}
        files = "".join(f"- {path}\n" for path in sorted(paths.values()))
        for name, path in paths.items():
            prompts[name] = f"Package: {package}\nFiles:\n{files}\nWrite the file {path}.\n"
    return dict(zip(prompts, encode(list(prompts.values())), strict=True))


def _asked(entries: Sequence[Entry]) -> list[Record]:
    """The requests for these files."""
    prompts = _prompts(entries)
    return [Record(e.record.id, prompts[e.record.id], [], e.record.output, "tekken") for e in entries]


def _by_package(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.package].append(entry)
    return found


def next_version(entries: Sequence[Entry]) -> Case:
    """A file is written again. The memory holds its earlier version among those of up to 6 other files."""
    packages, prompts = _by_package(entries), _prompts(entries)
    recalled = []
    for entry in entries:
        others = shuffled((o for o in packages[entry.package] if o is not entry), entry.record.id)[:6]
        while sum(len(o.record.prediction) for o in [*others, entry]) > RECALLED_TOKENS:
            others.pop()
        half = len(others) // 2
        earlier = [*others[:half], entry, *others[half:]]
        answers = [(prompts[o.record.id], o.record.prediction) for o in earlier]
        recalled.append(_recall(prompts[entry.record.id], answers))
    return Case("next_version", _asked(entries), recalled, [e.record.prediction for e in entries])


#: Case → which other files the memory holds when a file is written.
KNOWN: dict[str, Callable[[Entry, Entry], bool]] = {
    "same_package": lambda entry, other: other.package == entry.package,
    "all_packages": lambda entry, other: True,
    "unrelated": lambda entry, other: (
        other.package != entry.package and (other.kind == "python") != (entry.kind == "python")
    ),
}


def written(name: str, entries: Sequence[Entry], alike: bool = False) -> Case:
    """A file is written. The memory holds the others that are `KNOWN`; `alike`: as answers to its own prompt."""
    prompts, recalled = _prompts(entries), []
    for entry in entries:
        own = prompts[entry.record.id]
        others = (o for o in entries if o is not entry and KNOWN[name](entry, o))
        answers = [
            (own if alike else prompts[o.record.id], o.record.output)
            for o in shuffled(others, entry.record.id)
        ]
        recalled.append(_recall(own, answers))
    return Case(f"{name}_alike" if alike else name, _asked(entries), recalled)


def one_form(name: str, outputs: Sequence[Output]) -> Case:
    """Records of one form, one after another. The memory holds those before."""
    records = records_of(outputs)
    memory = ResponseMemory(MEMORY_TOKENS)
    recalled = []
    for record in records:
        recalled.append(memory.recall_for(None, record.prompt, RECALLED_TOKENS))
        memory.remember(None, record.output, record.prompt)
    return Case(name, records, recalled)


def forms(folder: Path) -> Iterator[Case]:
    """The forms of the tasks."""
    outputs = tasks.read(json_records.NAME, folder).outputs
    for form in json_records.FORMS:
        asked = f"Extract the {form.name} from"
        yield one_form(f"form: {form.name}", [o for o in outputs if asked in o.prompt])
    yield one_form(f"form: {triage.NAME}", tasks.read(triage.NAME, folder).outputs)


def replayed(
    case: Case, size: int, recipes: Recipes | None, without: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The counts of a case with memory, without (unless they are known), and with the prediction, if any."""

    def run(texts: Sequence[list[int]], memory: bool, related: Sequence[bool] = ()) -> dict[str, Any]:
        records = [
            Record(r.id, r.prompt, text, r.output, r.tokenizer)
            for r, text in zip(case.records, texts, strict=True)
        ]
        pairs = replay_batched(
            records, size, recipes=recipes, batch_size=BATCH_SIZE, memory=memory, related=related
        )
        return counts_of(pairs)

    texts = [recalled.token_ids.tolist() for recalled in case.recalled]
    related = [recalled.related for recalled in case.recalled]
    found = {
        "without": without or run([[]] * len(case.records), False),
        "memory": {**run(texts, True, related), "related": sum(related)},
    }
    if case.prediction is not None:
        found["prediction"] = run(case.prediction, False)
    return found


def measure(corpus_file: Path, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All cases at each K: case → K → drafter → counts."""
    entries = [e for e in read_entries(corpus_file) if e.tokens == "tekken" and e.kind in REAL]
    recipes = base_recipes()
    results: dict[str, Any] = {}
    # Files are the same requests in every case.
    known: dict[tuple[str, int], dict[str, Any]] = {}
    files = (*(written(name, entries) for name in KNOWN), written("unrelated", entries, alike=True))
    for case in (next_version(entries), *forms(folder), *files):
        results[case.name] = {}
        for size in SIZES[:1] if case.name in MORE else SIZES:
            key = ("" if case.name.startswith("form: ") else "file", size)
            counts = replayed(case, size, recipes, known.get(key))
            if key[0]:
                known[key] = counts["without"]
            results[case.name][str(size)] = counts
            say(f"{case.name:22} K={size:2} " + " ".join(f"{n} {c['steps']:,}" for n, c in counts.items()))
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: a package could not be had)."""
    parser = command("benchmarks.recipes.memory", __doc__)
    parser.add_argument("--write", action="store_true", help=f"into {page.RESULTS} and the page")
    options = parser.parse_args(argv)
    if failed := make_corpora({"test": (cached := cached_corpus("test"))}) or tasks.ensure(tasks.DEFAULT_OUT):
        return failed
    found = measure(cached, tasks.DEFAULT_OUT, lambda line: print(line, flush=True))
    print(page.memory_table({"memory": found}))
    if options.write:
        page.update(memory=found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
