"""Edit pairs: texts before and after an edit, from real releases and from edits of known kinds.

``python -m benchmarks.corpus OUT.jsonl.gz`` downloads two pinned versions of each package, and writes one
record, the fields of `Entry`, for each source file that changed.

Selection rule: files that both versions have, whose text differs, and whose *new* version has 200 to 8,000
tokens; the old one may be of any length. Tokens are Tekken's unless the record says otherwise, so that no model
has to be fetched.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.corpus import kinds
from benchmarks.corpus.files import FIVE, SETS, Edit, Releases, changed_files, fetch_all
from benchmarks.corpus.mix import other_tokens, synthetic_pairs
from benchmarks.tables import command
from gpu_align.ops.errors import MissingExtraError
from gpu_align.tools.simulate.replay import Record, load_tokenizer

MIN_TOKENS = 200
MAX_TOKENS = 8_000
#: Sets of `benchmarks.corpus.kinds` -> their split.
KIND_SETS = {"kinds-tune": "tune", "kinds-test": "test"}


class Entry(NamedTuple):
    """One edit as token ids, and what it is. id: as flask/2.2.5..3.0.3/flask/app.py.

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

    @property
    def record(self) -> Record:
        """To replay; without a prompt."""
        tokenizer = "tekken" if self.tokens == "tekken" else None
        return Record(self.id, [], self.prediction, self.output, tokenizer)

    @property
    def in_five(self) -> bool:
        """Whether it is one of the records of ``--set five``."""
        names = {package.name for package in FIVE}
        return self.kind == "python" and self.tokens == "tekken" and self.package in names

    @property
    def is_real(self) -> bool:
        """Whether it is a change between two releases, in the tokens of the shipped tables."""
        return self.kind == self.text and self.tokens == "tekken"


def as_pair(
    edit: Edit, split: str, encode: Callable[[str], list[int]] | None = None, tokens: str = "tekken"
) -> Entry:
    """An edit in the tokens of that name, which `encode` makes."""
    encode = encode or load_tokenizer(tokens).encode
    return Entry(*edit[:4], split, tokens, encode(edit.before), encode(edit.after))


def _is_selected(pair: Entry) -> bool:
    return MIN_TOKENS <= len(pair.output) <= MAX_TOKENS


def source_pairs(releases: Releases, split: str) -> list[tuple[Entry, Edit]]:
    """The edit pairs of one package by the module's selection rule, sorted by id, each with its texts.

    Of more than `Releases.most` files of a sort, those are kept whose ids have the lowest hashes.
    """
    found: dict[str, list[tuple[Entry, Edit]]] = defaultdict(list)
    for edit in changed_files(releases):
        pair = as_pair(edit, split)
        if _is_selected(pair):
            found[edit.text].append((pair, edit._replace(num_tokens=len(pair.output))))
    kept = []
    for pairs in found.values():
        pairs.sort(key=lambda found: hashlib.sha256(found[0].id.encode()).digest())
        kept += pairs[: releases.most]
    return sorted(kept, key=lambda found: found[0].id)


def build(name: str) -> list[Entry]:
    """All records of one of `SETS`; but for "five" with made edits and other tokenizers, too."""
    needed = [*SETS[name], *(SETS["tune"] if name != "five" else ())]
    fetch_all(sorted({archive for _, releases in needed for archive in releases.archives}))
    found = [each for split, releases in SETS[name] for each in source_pairs(releases, split)]
    pairs, texts = [pair for pair, _ in found], [text for _, text in found]
    if name == "five":
        return pairs
    pairs += filter(_is_selected, (as_pair(edit, name) for edit in synthetic_pairs(texts, name)))
    # The tokenizer of our own is trained on the tune split, whichever split it is used on.
    tune = texts if name == "tune" else [text for s, r in SETS["tune"] for _, text in source_pairs(r, s)]
    for tokens, encode, chosen in other_tokens(texts, [text.after for text in tune]):
        again = (edit._replace(id=f"{edit.id}@{tokens}") for edit in chosen)
        pairs += [as_pair(edit, name, encode, tokens) for edit in again]
    return pairs


def build_kinds(split: str) -> list[Entry]:
    """The records of ``kinds-tune`` or ``kinds-test``, by the module's selection rule.

    Of a kind of text, and of each thing that is made, so many records are kept as `kinds.NUM_REAL` and
    `kinds.NUM_MADE` say, from the packages in turn.
    """
    texts = kinds.kind_texts(split)
    pairs: list[Entry] = []
    real = (text.edit for kind in kinds.KINDS for text in kinds.in_turns(texts.get(kind, [])))
    made = kinds.MODEL, *kinds.QUALITIES
    missing = dict.fromkeys(kinds.KINDS, kinds.NUM_REAL[split]) | dict.fromkeys(made, kinds.NUM_MADE[split])
    for edit in chain(real, kinds.made_pairs(texts)):
        if missing[edit.kind] and _is_selected(pair := as_pair(edit, split)):
            missing[edit.kind] -= 1
            pairs.append(pair)
        if not any(missing[name] for name in made):
            break
    return pairs


def main(argv: list[str] | None = None) -> None:
    """Command line. SystemExit: a download failed, or a package is not installed."""
    parser = command("benchmarks.corpus", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz")
    sets = sorted({*SETS, *KIND_SETS})
    parser.add_argument("--set", choices=sets, default="five", help="what to write (five)")
    options = parser.parse_args(argv)
    try:
        is_kinds = options.set in KIND_SETS
        pairs = build_kinds(KIND_SETS[options.set]) if is_kinds else build(options.set)
    except (httpx.HTTPError, RuntimeError, MissingExtraError) as error:
        raise SystemExit(f"error: {error}") from error
    for kind, number in Counter(pair.kind for pair in pairs).items():
        print(f"{kind:16} {number:6,} records")
    lines = (json.dumps(pair._asdict(), separators=(",", ":")) + "\n" for pair in sorted(pairs))
    content = "".join(lines).encode()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))
    # Of the text: compressed bytes repeat on one machine, but another zlib may pack the same text differently.
    print(f"{options.out}: sha256 of the lines {hashlib.sha256(content).hexdigest()}")
