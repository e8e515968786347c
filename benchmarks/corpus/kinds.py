"""Ten kinds of text, and for each kind outputs like a model's and predictions of every quality.

``python -m benchmarks.corpus OUT.jsonl.gz --set kinds-tune|kinds-test``. A record's `kind` is its sort of text
where it is a change between two neighbouring releases. For the others it is the name of what was made of such a
change: an output as a model might write it (`model`), or another prediction of the same output (`QUALITIES`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.corpus.files import NPM, SORTS, Edit, Fetch, Releases, fetch_all, hash_of, releases_of
from benchmarks.corpus.model_like import badly_applied, model_output, wrong_lines

#: The kinds, in the order in which they are shown. No Go and no Java: no package in use holds either twice.
KINDS = (
    "python", "javascript", "typescript", "c", "cpp", "rust", "document", "json", "markup", "sql",
)  # fmt: skip
#: Predictions of a real change's output, beside the version before it.
QUALITIES = ("older", "sibling", "draft_05", "draft_20", "draft_40", "draft_60", "bad_diff")
#: The kind of an output that a script of typed edits made.
MODEL = "model"
#: Records a kind of text; records a quality and `MODEL`.
NUM_REAL = {"tune": 60, "test": 24}
NUM_MADE = {"tune": 60, "test": 20}
#: Mean length of a line above which nobody wrote the text by hand, characters; JSON may be one line.
MAX_LINE = 160
#: Most characters of a text, and about as many as a part of a longer one has where `Releases.cut` says so.
MAX_CHARACTERS, PART_CHARACTERS = 48_000, 12_000
#: Texts of one package and kind that are looked at.
MOST = 400


class KindText(NamedTuple):
    """A file in two neighbouring releases of a package. path: inside the package, and the number of a part.

    oldest: the file in the oldest release, where that is not the older one of the two and has it.
    """

    edit: Edit
    path: str
    oldest: str | None


def _releases(text: str, *kinds: str, sdist: bool = True, cut: bool = False) -> Releases:
    return releases_of(text, *kinds, sdist=sdist, most=MOST, cut=cut)


def _npm(text: str, *kinds: str) -> Releases:
    return _releases(NPM + text, *kinds)


_PAGES = ("document", "markup")
#: Nothing of a package is in both splits, of these sets or of those in `sources`.
RELEASES: dict[str, tuple[Releases, ...]] = {
    "tune": (
        _releases("click 8.0.4 8.1.7", "python", sdist=False),
        _releases("attrs 22.1.0 23.2.0", "python", sdist=False),
        _releases("urllib3 1.26.15 2.2.1", "python", sdist=False),
        _releases("httpx 0.23.3 0.27.0", "python", sdist=False),
        _releases("pydantic 2.0 2.7.0", "python", sdist=False),
        _releases("fastapi 0.109.0 0.110.0", "python", sdist=False),
        _releases("trio 0.24.0 0.25.0", "python", sdist=False),
        _releases("textual 0.47.0 0.60.0", "python", "document", sdist=False),
        _releases("ansible-core 2.15.0 2.17.0", "python", "markup", sdist=False),
        _releases("check-jsonschema 0.26.3 0.29.0", "json", sdist=False),
        _releases("dbt-adapters 1.1.0 1.10.0", "sql", sdist=False),
        _releases("sqlfluff 2.3.0 3.0.0", "sql", "python", "markup", sdist=False),
        _releases("click 8.0.4 8.1.7", *_PAGES),
        _releases("structlog 22.3.0 24.1.0", *_PAGES),
        _releases("celery 5.2.7 5.4.0", *_PAGES),
        _releases("regex 2022.10.31 2023.12.25 2024.11.6", "c", cut=True),
        _releases("pycryptodome 3.15.0 3.18.0 3.20.0", "c", "document"),
        _releases("cffi 1.14.6 1.15.1 1.17.1", "c", cut=True),
        _releases("cffi 1.14.6 1.15.1 1.17.1", "document"),
        _releases("grpcio 1.51.3 1.60.1", "cpp", "document"),
        _releases("rpds-py 0.10.6 0.13.2 0.18.1 0.22.3", "rust", *_PAGES, cut=True),
        _releases("watchfiles 0.18.1 0.20.0 0.21.0 0.24.0", "rust", *_PAGES),
        _npm("lodash 4.16.6 4.17.15 4.17.21", "javascript"),
        _npm("mocha 9.2.2 10.2.0 10.7.3", "javascript", "json", "markup"),
        _npm("jest 28.1.3 29.7.0", "json"),
        _npm("knex 1.0.7 2.4.2 3.1.0", "javascript", "typescript", "json", "document"),
        _npm("d3 6.7.0 7.8.5", "json", "document"),
        _npm("prettier 2.8.8 3.0.0 3.3.3", "json", "document"),
        _npm("rollup 2.79.1 3.29.4 4.9.6", "javascript", "typescript", "json"),
        _npm("yargs 16.2.0 17.6.2 17.7.2", "javascript", "json", "document"),
        _npm("pino 7.11.0 8.11.0 8.19.0 9.3.2", "javascript", "typescript", "json", "document"),
        _npm("ws 7.5.9 8.8.1 8.13.0 8.17.0", "javascript", "json"),
        _npm("graphql 15.8.0 16.6.0 16.8.1", "javascript", "typescript", "json"),
        _npm("@types/node 16.18.23 18.15.11 20.11.5", "typescript"),
        _npm("vue 3.2.47 3.3.4 3.4.21", "typescript", "json"),
        _npm("bootstrap 4.6.2 5.2.3 5.3.2", "javascript", "markup", "json"),
    ),
    "test": (
        _releases("requests 2.28.2 2.32.3", "python", sdist=False),
        _releases("rich 13.3.5 13.9.4", "python", sdist=False),
        _releases("anyio 3.7.1 4.4.0", "python", sdist=False),
        _releases("marshmallow 3.19.0 3.21.3", "python", sdist=False),
        _releases("typer 0.9.0 0.12.3", "python", sdist=False),
        _releases("django 4.2 5.0", "python", "javascript", "markup", sdist=False),
        _releases("jupyterlab 4.0.0 4.2.0", "json", sdist=False),
        _releases("jupyterlab 4.0.0 4.2.0", "typescript", "document"),
        _releases("flask 2.2.5 3.0.3", *_PAGES),
        _releases("werkzeug 2.2.3 3.0.6", *_PAGES),
        _releases("pytest 7.2.2 8.2.0", *_PAGES),
        _releases("tox 4.4.0 4.15.0", *_PAGES),
        _releases("sqlglot 20.0.0 25.0.0", "sql"),
        _releases("msgpack 1.0.4 1.0.5 1.0.8", "c"),
        _releases("protobuf 4.21.12 4.25.3 5.27.0", "c"),
        _releases("greenlet 1.1.3 2.0.2 3.0.3", "cpp", "document"),
        _releases("pybind11 2.9.2 2.11.1 2.13.6", "cpp"),
        _releases("jiter 0.4.2 0.6.1 0.8.2", "rust", *_PAGES),
        _releases("nh3 0.2.14 0.2.17 0.2.20", "rust", "markup"),
        _npm("react 17.0.2 18.2.0 18.3.1", "javascript", "json"),
        _npm("chai 4.3.7 4.4.1 5.1.1", "javascript", "json", "document"),
        _npm("sequelize 6.21.6 6.31.1 6.37.3", "javascript", "typescript", "json"),
        _npm("three 0.150.1 0.152.2 0.160.0", "javascript", "json", "document"),
        _npm("winston 3.8.2 3.10.0 3.13.0", "javascript", "typescript", "json", "document"),
        _npm("inquirer 8.2.5 9.1.4 9.2.15", "javascript", "json", "document"),
        _npm("redis 4.0.6 4.6.5 4.6.13", "javascript", "json", "document"),
        _npm("pg 8.7.3 8.9.0 8.11.3", "javascript", "json"),
        _npm("svelte 3.59.2 4.2.0 4.2.18", "javascript", "typescript", "json", "document"),
        _npm("chart.js 3.9.1 4.3.0 4.4.4", "typescript", "json", "document"),
        _npm("typescript 4.9.5 5.1.6 5.4.5", "typescript", "json", "document"),
        _npm("@angular/core 14.2.12 15.2.9 16.2.12", "javascript", "typescript", "json"),
    ),
}


def kind_texts(split: str, cache: Path, fetch: Fetch) -> dict[str, list[KindText]]:
    """Kind → all files that differ between two neighbouring releases of a package of this split."""
    fetch_all(sorted({archive for r in RELEASES[split] for archive in r.archives}), cache, fetch)
    found: dict[str, list[KindText]] = defaultdict(list)
    for releases in RELEASES[split]:
        texts = releases.texts(cache, fetch)
        for kind in releases.sorts:
            of_kind = [{p: t for p, t in files.items() if SORTS[kind].fullmatch(p)} for files in texts]
            edits: dict[tuple[str, str], KindText] = {}
            for text in _edits(releases, kind, of_kind):
                # A file that is in an archive twice is one edit.
                edits.setdefault((text.edit.before, text.edit.after), text)
            found[kind] += sorted(edits.values(), key=lambda t: hash_of(t.edit.id))[: releases.most]
    return found


def _edits(releases: Releases, kind: str, texts: Sequence[Mapping[str, str]]) -> Iterator[KindText]:
    name = releases.name.removeprefix(NPM)
    for (old, before), (new, after) in pairwise(zip(releases.versions, texts, strict=True)):
        for path in sorted(before.keys() & after.keys()):
            parts = [(before[path], after[path])]
            oldest = None if old == releases.versions[0] else texts[0].get(path)
            if releases.cut and len(after[path]) > 1.5 * PART_CHARACTERS:
                parts, oldest = _parts(*parts[0]), None
            for number, (a, b) in enumerate(parts):
                written = kind in ("json", "document") or is_written(b)
                if a != b and max(len(a), len(b)) <= MAX_CHARACTERS and written:
                    where = f"{path}#{number}" if number else path
                    older = oldest if oldest != a and len(oldest or "") <= MAX_CHARACTERS else None
                    yield KindText(Edit(f"{name}/{old}..{new}/{where}", kind, kind, name, a, b), where, older)


def is_written(text: str) -> bool:
    """Whether the lines are as short as those that people write."""
    return len(text) <= MAX_LINE * (text.count("\n") + 1)


def _parts(before: str, after: str) -> list[tuple[str, str]]:
    """A long text in parts that begin and end at lines that both versions have."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    parts, i0, k0 = [], 0, 0
    for i, k, size in SequenceMatcher(None, old, new).get_matching_blocks():
        for n in range(size):
            if sum(map(len, new[k0 : k + n])) >= PART_CHARACTERS:
                parts.append(("".join(old[i0 : i + n]), "".join(new[k0 : k + n])))
                i0, k0 = i + n, k + n
    return [*parts, ("".join(old[i0:]), "".join(new[k0:]))]


def in_turns(texts: Sequence[KindText], *salt: str) -> list[KindText]:
    """All texts, the packages in turn, each package's by the hash of its id: the first few are a fair sample."""
    by_package: dict[str, list[KindText]] = defaultdict(list)
    for text in sorted(texts, key=lambda t: hash_of(*salt, t.edit.id)):
        by_package[text.edit.package].append(text)
    rank = {t.edit.id: i for found in by_package.values() for i, t in enumerate(found)}
    return sorted(texts, key=lambda t: (rank[t.edit.id], hash_of(*salt, t.edit.id)))


def made_pairs(chosen: dict[str, list[KindText]]) -> Iterator[Edit]:
    """For `MODEL` and each quality in turn, an edit of each kind of text in turn, until no file is left."""
    names = (MODEL, *QUALITIES)
    turns = {(name, kind): in_turns(chosen.get(kind, []), name)[::-1] for name in names for kind in KINDS}
    while any(turns.values()):
        for (name, kind), texts in turns.items():
            pair = None
            while texts and pair is None:
                pair = made(name, texts.pop(), chosen[kind])
            if pair is not None:
                yield pair


def made(name: str, text: KindText, alike: Sequence[KindText]) -> Edit | None:
    """One record of `MODEL` or of a quality from one file; None where the file does not lend itself to it.

    alike: files of the same kind and split: siblings, and donors of new lines.
    """
    edit = text.edit
    rng = random.Random(hash_of(name, edit.id))
    others = [t for t in alike if t.path != text.path]
    if not others:
        return None
    elsewhere = [t for t in others if t.edit.package != edit.package] or others
    donor = rng.choice(elsewhere).edit.after
    before: str | None = None
    after: str | None = edit.after
    if name == MODEL:
        before, after = edit.after, model_output(edit.after, donor, edit.kind, rng)
    elif name == "older":
        before = text.oldest
    elif name == "sibling":
        siblings = [t for t in others if t.edit.package == edit.package and t.edit.after != edit.after]
        if siblings:
            nearest = max(siblings, key=lambda t: (_common_prefix(t.path, text.path), hash_of(t.edit.id)))
            before = nearest.edit.after
    elif name == "bad_diff":
        before = badly_applied(edit.before, edit.after, rng)
    else:
        before = wrong_lines(edit.after, donor, int(name.removeprefix("draft_")) / 100, rng)
    if before is None or after is None or before == after or not before.strip():
        return None
    return Edit(f"{name}/{edit.id}", name, edit.kind, edit.package, before, after)


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
