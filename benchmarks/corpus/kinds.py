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
from operator import eq
from typing import NamedTuple

from benchmarks.corpus.files import NPM, SORTS, Edit, Releases, fetch_all, hash_of, releases_in
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
#: Mean length of a line, in characters, above which a text was not written by hand; JSON may be one line.
MAX_LINE = 160
#: Most characters of a text, and about as many as a part of a longer one has where `Releases.cut` says so.
MAX_CHARACTERS, PART_CHARACTERS = 48_000, 12_000


class KindText(NamedTuple):
    """A file in two neighbouring releases of a package. path: inside the package, and the number of a part.

    oldest: the file in the oldest release, where that is not the older one of the two and has it.
    """

    edit: Edit
    path: str
    oldest: str | None


#: Nothing of a package is in both splits, of these sets or of those in `files.SETS`.
RELEASES = {split: releases_in(f"kinds-{split}") for split in ("tune", "test")}


def kind_texts(split: str) -> dict[str, list[KindText]]:
    """Kind → all files that differ between two neighbouring releases of a package of this split."""
    fetch_all(sorted({archive for r in RELEASES[split] for archive in r.archives}))
    found: dict[str, list[KindText]] = defaultdict(list)
    for releases in RELEASES[split]:
        texts = releases.texts()
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
            # Whose path begins like this one's for longest.
            same = {t: [*map(eq, t.path, text.path), False].index(False) for t in siblings}
            before = max(siblings, key=lambda t: (same[t], hash_of(t.edit.id))).edit.after
    elif name == "bad_diff":
        before = badly_applied(edit.before, edit.after, rng)
    else:
        before = wrong_lines(edit.after, donor, int(name.removeprefix("draft_")) / 100, rng)
    if before is None or after is None or before == after or not before.strip():
        return None
    return Edit(f"{name}/{edit.id}", name, edit.kind, edit.package, before, after)
