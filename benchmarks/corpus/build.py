"""Edit pairs: texts before and after an edit, from real releases and from edits of known kinds.

``python -m benchmarks.corpus OUT.jsonl.gz`` downloads two pinned versions of each package, and writes one
record for each source file that changed::

    {"id": "flask/2.2.5..3.0.3/flask/app.py", "kind": "python", "text": "python", "package": "flask",
     "split": "test", "tokens": "tekken", "prediction": [ids], "output": [ids]}

The old file is the prediction, the new one what the model writes. ``--set`` chooses what is written:

- ``five`` (the default): the ``.py`` files of five packages, 117 records;
- ``test``: ``five``, more packages and sorts of text, edits of known kinds, two more tokenizers;
- ``tune``: the same from packages of which ``test`` has nothing; tables are learned from these;
- ``all``: ``tune`` and ``test``;
- ``kinds-tune``, ``kinds-test``: ten kinds of text from PyPI and npm, outputs like a model's, and predictions of
  every quality (`benchmarks.corpus.kinds`).

Selection rule: files that both versions have, whose text differs, and whose *new* version has 200 to 8,000
tokens (`MIN_TOKENS`, `MAX_TOKENS`); the old one may be of any length. Line ends are normalised to LF. Tokens are
Tekken's unless the record says otherwise, so that no model has to be fetched. Records are sorted by id, and the
gzip header carries no time: the same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import kinds
from benchmarks.corpus.files import (
    FIVE,
    SETS,
    Fetch,
    PackagePair,
    Source,
    changed_files,
    download,
    pip_download,
)
from benchmarks.corpus.mix import Text, other_tokens, synthetic_pairs
from gpu_align.errors import MissingExtraError
from gpu_align.tools.simulate.tokenizers import TextTokenizer, load_tokenizer

MIN_TOKENS = 200
MAX_TOKENS = 8_000
DEFAULT_CACHE = Path(".cache/corpus")
#: Sets of `benchmarks.corpus.kinds` -> their split.
KIND_SETS = {"kinds-tune": "tune", "kinds-test": "test"}


@dataclass(frozen=True)
class EditPair:
    """One edit as token ids, and what it is.

    Attributes:
        id: unique in the corpus.
        kind: the sort of text for a real change of such a file (`benchmarks.corpus.files.SORTS`); else the kind of
            edit that was made (`benchmarks.corpus.edits.EDITS`), "unrelated" or "state", or in the sets of kinds
            what was made of a change (`benchmarks.corpus.kinds`).
        text: the sort of text that was edited.
        package: where the text is from; "" for a text made here.
        split: "tune" or "test".
        tokens: "tekken", "bpe" or "bytes".
        prediction: token ids.
        output: token ids.
    """

    id: str
    kind: str
    text: str
    package: str
    split: str
    tokens: str
    prediction: list[int]
    output: list[int]


def source_pairs(
    source: Source, split: str, tokenizer: TextTokenizer, cache: Path, fetch: Fetch = pip_download
) -> list[tuple[EditPair, Text]]:
    """The edit pairs of one source by the module's selection rule, sorted by id, each with its texts.

    Of more than `Source.most` files of a sort, those are kept whose ids have the lowest hashes.
    """
    package = source.package
    found: dict[str, list[tuple[EditPair, Text]]] = defaultdict(list)
    for path, (sort, before, after) in sorted(changed_files(source, cache, fetch).items()):
        output = tokenizer.encode(after)
        if MIN_TOKENS <= len(output) <= MAX_TOKENS:
            identifier = f"{package.name}/{package.old}..{package.new}/{path}"
            pair = EditPair(
                identifier, sort, sort, package.name, split, "tekken", tokenizer.encode(before), output
            )
            found[sort].append((pair, Text(identifier, sort, package.name, before, after, len(output))))
    kept = []
    for pairs in found.values():
        pairs.sort(key=lambda found: hashlib.sha256(found[0].id.encode()).digest())
        kept += pairs[: source.most]
    return sorted(kept, key=lambda found: found[0].id)


def build(
    sources: Iterable[tuple[str, Source]],
    mixed: Sequence[str],
    cache: Path,
    fetch: Fetch = pip_download,
    report: bool = True,
) -> list[EditPair]:
    """All records of some sources, each given with its split.

    Args:
        sources: ``(split, source)``.
        mixed: the splits that get made edits and other tokenizers on top of their real files.
        cache: downloads are kept here.
        fetch: gets an archive.
        report: print one line a source.
    """
    tokenizer = load_tokenizer("tekken")
    sources = list(sources)
    pairs: list[EditPair] = []
    texts: dict[str, list[Text]] = defaultdict(list)
    needed = [s for _, s in sources] + [s for _, s in SETS["tune"] if mixed]
    wanted = {(s.package.name, version, s.sdist) for s in needed for version in s.package.versions}
    with ThreadPoolExecutor(4) as pool:  # downloads wait for the network, and sdists for their build scripts
        list(pool.map(lambda one: fetch(one[0], one[1], cache, one[2]), sorted(wanted)))
    for split, source in sources:
        found = source_pairs(source, split, tokenizer, cache, fetch)
        pairs += [pair for pair, _ in found]
        texts[split] += [text for _, text in found]
        if report:
            print(_summary(str(source.package), [pair for pair, _ in found]), flush=True)
    for split in mixed:
        made = [
            EditPair(
                e.id, e.kind, e.text, e.package, split, "tekken",
                tokenizer.encode(e.before), tokenizer.encode(e.after),
            )
            for e in synthetic_pairs(texts[split], split)
        ]  # fmt: skip
        made = [pair for pair in made if MIN_TOKENS <= len(pair.output) <= MAX_TOKENS]
        if report:
            print(_summary(f"{split}: edits made here", made), flush=True)
        pairs += made
    # The tokenizer of our own is trained on the tune split, whichever split it is used on.
    for split in mixed:
        corpus = texts["tune"] or _tune_texts(tokenizer, cache, fetch)
        again = [
            EditPair(
                f"{e.id}@{tokens}",
                e.kind,
                e.text,
                e.package,
                split,
                tokens,
                encode(e.before),
                encode(e.after),
            )
            for tokens, encode, chosen in other_tokens(texts[split], split, [t.after for t in corpus], cache)
            for e in chosen
        ]
        if report:
            print(_summary(f"{split}: other tokenizers", again), flush=True)
        pairs += again
    return pairs


def build_kinds(
    split: str, tokenizer: TextTokenizer, cache: Path, fetch: Fetch = download, report: bool = True
) -> list[EditPair]:
    """The records of ``kinds-tune`` or ``kinds-test``, by the module's selection rule.

    Of a kind of text, and of each thing that is made, so many records are kept as `kinds.NUM_REAL` and
    `kinds.NUM_MADE` say, from the packages in turn.
    """
    kinds.fetch_all(split, cache, fetch)
    texts = kinds.kind_texts(split, cache, fetch)
    pairs: list[EditPair] = []

    def add(pair: kinds.KindPair) -> bool:
        output = tokenizer.encode(pair.after)
        if not MIN_TOKENS <= len(output) <= MAX_TOKENS:
            return False
        prediction = tokenizer.encode(pair.before)
        pairs.append(
            EditPair(pair.id, pair.kind, pair.text, pair.package, split, "tekken", prediction, output)
        )
        return True

    for kind in kinds.KINDS:
        left = kinds.NUM_REAL[split]
        for pair in kinds.real_pairs(kinds.in_turns(texts.get(kind, []))):
            left -= add(pair)
            if not left:
                break
        if report:
            print(_summary(kind, [pair for pair in pairs if pair.kind == kind]), flush=True)
    missing = dict.fromkeys((kinds.MODEL, *kinds.QUALITIES), kinds.NUM_MADE[split])
    for pair in kinds.made_pairs(texts):
        if missing[pair.kind]:
            missing[pair.kind] -= add(pair)
        if not any(missing.values()):
            break
    if report:
        for name in missing:
            print(_summary(name, [pair for pair in pairs if pair.kind == name]), flush=True)
    return pairs


def _tune_texts(tokenizer: TextTokenizer, cache: Path, fetch: Fetch) -> list[Text]:
    """What the tokenizer of our own is trained on, where the tune split itself is not asked for."""
    return [text for split, s in SETS["tune"] for _, text in source_pairs(s, split, tokenizer, cache, fetch)]


def write_pairs(pairs: Iterable[EditPair], path: Path) -> str:
    """Write `pairs` sorted by id as gzipped JSON lines; returns the SHA-256 of the lines.

    The digest is of the uncompressed text: compressed bytes repeat on one machine, but another zlib may
    pack the same text differently.
    """
    text = io.StringIO()
    for pair in sorted(pairs, key=lambda pair: pair.id):
        text.write(json.dumps(vars(pair), separators=(",", ":")) + "\n")
    content = text.getvalue().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))
    return hashlib.sha256(content).hexdigest()


def main(argv: list[str] | None = None, fetch: Fetch = download) -> int:
    """Command line; returns the exit code (0, 1: a download failed, 2: bad arguments)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz")
    sets = sorted({*SETS, *KIND_SETS})
    parser.add_argument("--set", choices=sets, default="five", help="what to write (five)")
    parser.add_argument(
        "--packages",
        action="append",
        nargs="+",
        metavar="NAME:OLD:NEW",
        help="the .py files of these packages instead; repeatable",
    )
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"downloads are kept here ({DEFAULT_CACHE})"
    )
    options = parser.parse_args(argv)
    try:
        chosen = [PackagePair.parse(text) for group in options.packages or () for text in group]
        load_tokenizer("tekken")
    except (ValueError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    five = {package.name for package in FIVE}
    split_of_kinds = None if chosen else KIND_SETS.get(options.set)
    sources = [("test" if p.name in five else "tune", Source(p)) for p in chosen] or SETS.get(options.set, [])
    mixed = (
        () if chosen or options.set == "five" else [s for s in ("tune", "test") if options.set in (s, "all")]
    )

    print(f"{'package':<34} {'files':>6} {'prediction':>11} {'output':>9}   (tokens)")
    try:
        if split_of_kinds:
            pairs = build_kinds(split_of_kinds, load_tokenizer("tekken"), options.cache, fetch)
        else:
            pairs = build(sources, mixed, options.cache, fetch)
    except (RuntimeError, MissingExtraError) as error:
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
