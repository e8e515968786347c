"""Edit pairs: texts before and after an edit, from real releases and from edits of known kinds.

``python -m benchmarks.corpus OUT.jsonl.gz`` downloads two pinned versions of each package, and writes one
record for each source file that changed::

    {"id": "flask/2.2.5..3.0.3/flask/app.py", "kind": "python", "text": "python", "package": "flask",
     "split": "test", "tokens": "tekken", "prediction": [ids], "output": [ids]}

Selection rule: files that both versions have, whose text differs, and whose *new* version has 200 to 8,000
tokens; the old one may be of any length. Tokens are Tekken's unless the record says otherwise, so that no model
has to be fetched.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.corpus import kinds
from benchmarks.corpus.files import SETS, Edit, Releases, changed_files, fetch_all
from benchmarks.corpus.mix import other_tokens, synthetic_pairs
from benchmarks.tables import command
from gpu_align.errors import MissingExtraError
from gpu_align.simulate import load_tokenizer

MIN_TOKENS = 200
MAX_TOKENS = 8_000
#: Sets of `benchmarks.corpus.kinds` -> their split.
KIND_SETS = {"kinds-tune": "tune", "kinds-test": "test"}


class EditPair(NamedTuple):
    """One edit as token ids, and what it is.

    kind: the sort of text for a real change of such a file (`benchmarks.corpus.files.SORTS`); else the kind of
    edit that was made (`benchmarks.corpus.edits.EDITS`), "unrelated" or "state", or in the sets of kinds what
    was made of a change (`benchmarks.corpus.kinds`). text: the sort that was edited. package: "" for a text made
    here.
    """

    id: str
    kind: str
    text: str
    package: str
    split: str
    tokens: str
    prediction: list[int]
    output: list[int]


def as_pair(
    edit: Edit, split: str, encode: Callable[[str], list[int]] | None = None, tokens: str = "tekken"
) -> EditPair:
    """An edit in the tokens of that name, which `encode` makes."""
    encode = encode or load_tokenizer(tokens).encode
    return EditPair(*edit[:4], split, tokens, encode(edit.before), encode(edit.after))


def _is_selected(pair: EditPair) -> bool:
    return MIN_TOKENS <= len(pair.output) <= MAX_TOKENS


def source_pairs(releases: Releases, split: str) -> list[tuple[EditPair, Edit]]:
    """The edit pairs of one package by the module's selection rule, sorted by id, each with its texts.

    Of more than `Releases.most` files of a sort, those are kept whose ids have the lowest hashes.
    """
    found: dict[str, list[tuple[EditPair, Edit]]] = defaultdict(list)
    for edit in changed_files(releases):
        pair = as_pair(edit, split)
        if _is_selected(pair):
            found[edit.text].append((pair, edit._replace(num_tokens=len(pair.output))))
    kept = []
    for pairs in found.values():
        pairs.sort(key=lambda found: hashlib.sha256(found[0].id.encode()).digest())
        kept += pairs[: releases.most]
    return sorted(kept, key=lambda found: found[0].id)


def build(name: str) -> list[EditPair]:
    """All records of one of `SETS`; but for "five" with made edits and other tokenizers, too."""
    pairs: list[EditPair] = []
    texts: list[Edit] = []

    def add(label: str, found: Sequence[EditPair]) -> None:
        print(_summary(label, found), flush=True)
        pairs.extend(found)

    is_mixed = name != "five"
    needed = [*SETS[name], *(SETS["tune"] if is_mixed else ())]
    fetch_all(sorted({archive for _, releases in needed for archive in releases.archives}))
    for split, releases in SETS[name]:
        found = source_pairs(releases, split)
        texts += [text for _, text in found]
        add(f"{releases.name} {' → '.join(releases.versions)}", [pair for pair, _ in found])
    if not is_mixed:
        return pairs
    made = [as_pair(edit, name) for edit in synthetic_pairs(texts, name)]
    add(f"{name}: edits made here", [pair for pair in made if _is_selected(pair)])
    # The tokenizer of our own is trained on the tune split, whichever split it is used on.
    tune = texts if name == "tune" else [text for s, r in SETS["tune"] for _, text in source_pairs(r, s)]
    again = [
        as_pair(edit._replace(id=f"{edit.id}@{tokens}"), name, encode, tokens)
        for tokens, encode, chosen in other_tokens(texts, [text.after for text in tune])
        for edit in chosen
    ]
    add(f"{name}: other tokenizers", again)
    return pairs


def build_kinds(split: str) -> list[EditPair]:
    """The records of ``kinds-tune`` or ``kinds-test``, by the module's selection rule.

    Of a kind of text, and of each thing that is made, so many records are kept as `kinds.NUM_REAL` and
    `kinds.NUM_MADE` say, from the packages in turn.
    """
    texts = kinds.kind_texts(split)
    pairs: list[EditPair] = []
    real = (text.edit for kind in kinds.KINDS for text in kinds.in_turns(texts.get(kind, [])))
    made = kinds.made_pairs(texts)
    for edits, names, most in (
        (real, kinds.KINDS, kinds.NUM_REAL),
        (made, (kinds.MODEL, *kinds.QUALITIES), kinds.NUM_MADE),
    ):
        missing = dict.fromkeys(names, most[split])
        for edit in edits:
            if missing[edit.kind] and _is_selected(pair := as_pair(edit, split)):
                missing[edit.kind] -= 1
                pairs.append(pair)
            if not any(missing.values()):
                break
        for name in names:
            print(_summary(name, [pair for pair in pairs if pair.kind == name]), flush=True)
    return pairs


def write_pairs(pairs: Iterable[EditPair], path: Path) -> str:
    """Write `pairs` sorted by id as gzipped JSON lines; returns the SHA-256 of the lines.

    The digest is of the uncompressed text: compressed bytes repeat on one machine, but another zlib may
    pack the same text differently.
    """
    lines = (json.dumps(pair._asdict(), separators=(",", ":")) + "\n" for pair in sorted(pairs))
    content = "".join(lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))
    return hashlib.sha256(content).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1: a download failed, or a package is not installed)."""
    parser = command("benchmarks.corpus", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz")
    sets = sorted({*SETS, *KIND_SETS})
    parser.add_argument("--set", choices=sets, default="five", help="what to write (five)")
    options = parser.parse_args(argv)
    print(f"{'package':<34} {'files':>6} {'prediction':>11} {'output':>9}   (tokens)")
    try:
        is_kinds = options.set in KIND_SETS
        pairs = build_kinds(KIND_SETS[options.set]) if is_kinds else build(options.set)
    except (httpx.HTTPError, RuntimeError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_summary("all", pairs))
    digest = write_pairs(pairs, options.out)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, sha256 of the lines {digest}")
    return 0


def _summary(label: str, pairs: Sequence[EditPair]) -> str:
    prediction = sum(len(pair.prediction) for pair in pairs)
    output = sum(len(pair.output) for pair in pairs)
    return f"{label:<34} {len(pairs):>6,} {prediction:>11,} {output:>9,}"
