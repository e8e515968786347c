"""Learn the recipe pack that comes with the library: ``python -m benchmarks.learn.recipes [OUT.json.gz]``.

How far the promises hold is measured on packages that the pack does not know. One is learned from all but a
part of the packages, and the drafter replays the edits of that part with it. Drafts from recipes are accepted
less often than the counts promise, as they are chosen where nothing else is likely; the calibration says by how
much. It changes what is chosen, so the replay is repeated with it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from benchmarks.corpus.files import NPM, SETS, SORTS, Releases, fetch_all, sort_of, texts_in
from benchmarks.corpus.kinds import MODEL, QUALITIES, RELEASES, is_written
from benchmarks.quality.runs import JOBS, make_corpora, pool, read_entries
from benchmarks.tables import command
from gpu_align import RecipePack, Source
from gpu_align.ops.files import NUM_BINS
from gpu_align.ops.layout import Request, as_arrays
from gpu_align.ops.recipes import ALL_PACKS
from gpu_align.ops.recipes.reference import find_recipe
from gpu_align.ops.recipes.table import RecipeTable
from gpu_align.predictors import PredictorLoop
from gpu_align.recipes.pack import SHIPPED
from gpu_align.tools.recipes.learn import learn as learn_pack
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.replay import Record, follow, load_tokenizer

#: Parts of the split, by package, of which each is replayed with what the others taught.
NUM_PARTS = 6
NUM_DRAFT_TOKENS = 64
NUM_ROUNDS = 6
#: The sets whose edits are replayed.
SPLITS = ("tune", "kinds-tune")
#: Offsets are drawn towards none by so many drafts.
PRIOR = 30
#: Most characters of a text, and of all texts of one sort in one package.
MAX_CHARACTERS, MAX_OF_SORT = 400_000, 3_000_000
#: Folders of other projects' code, all that begin with one of these words. It says nothing about what this package
#: writes, and it may be of a package of the other split: grpcio has upb, which is protobuf's.
VENDORED = ("third_party", "vendor", "_vendor", "vendored", "node_modules", "upb")


def releases_of(split: str) -> list[Releases]:
    return [*RELEASES[split], *(releases for _, releases in SETS[split])]


def package_texts(split: str) -> Iterator[tuple[str, str]]:
    """``(package, text)`` of the first and the last release of every package of a split, sorted by package.

    Every file that is of one of `SORTS`, not `VENDORED`, at most `MAX_CHARACTERS` long and with lines as short as
    people write them; of a package each text once. Of a package and sort at most `MAX_OF_SORT` characters, in the
    order of a hash of release and path: of a large package more files are taken than both releases of some.
    """
    ends = {archive for r in releases_of(split) for archive in (r.archives[0], r.archives[-1])}
    by_package: dict[str, list[tuple[bytes, str, str]]] = defaultdict(list)
    for (name, version, _), archive in zip(sorted(ends), fetch_all(sorted(ends)), strict=True):
        by_package[name.removeprefix(NPM)] += [
            (hashlib.sha256(f"{version}/{path}".encode()).digest(), path, text)
            for path, text in texts_in(archive, SORTS).items()
        ]
    for package, files in sorted(by_package.items()):
        seen: set[str] = set()
        left = dict.fromkeys(SORTS, MAX_OF_SORT)
        for _, path, text in sorted(files):
            sort = sort_of(path, SORTS) or ""
            is_whole = 0 < len(text) <= min(MAX_CHARACTERS, left[sort]) and is_written(text)
            is_own = not any(folder.startswith(VENDORED) for folder in PurePosixPath(path).parts[:-1])
            if text not in seen and is_whole and is_own:
                left[sort] -= len(text)
                seen.add(text)
                yield package, text


#: ``(package, text)`` of each text.
Texts = Sequence[tuple[str, str]]


def without(texts: Texts, packages: Collection[str]) -> list[tuple[str, str]]:
    """The texts that none of these packages has."""
    theirs = {text for package, text in texts if package in packages}
    return [(package, text) for package, text in texts if text not in theirs]


def learn(texts: Texts) -> RecipePack:
    """A pack of these texts, each once, that is not calibrated."""
    package_of: dict[str, str] = {}
    for package, text in texts:
        package_of.setdefault(text, package)
    once = ((package, text) for text, package in package_of.items())
    return learn_pack(once, made_by="python -m benchmarks.learn.recipes")


def observe(part: tuple[RecipePack, list[Record]]) -> npt.NDArray[np.float64]:
    """[3, NUM_BINS]: drafts from recipes that were reached, by what the counts promise; that in sum; accepted."""
    pack, records = part
    ours = our_drafter(records, recipes=pack.tokenize(_encode))
    loop = PredictorLoop(ours, num_draft_tokens=NUM_DRAFT_TOKENS, strict=True)
    recipes = replace(pack, calibration=(0.0,) * NUM_BINS).tokenize(_encode)
    counted = as_arrays(RecipeTable.build(recipes, NUM_DRAFT_TOKENS, "cpu"))
    counts = np.zeros((3, NUM_BINS))
    for record in records:
        loop.start(record.prompt, record.prediction)
        tokens = np.array([*record.prompt, *record.output])
        for step in follow(loop, record.output):
            if step.source != Source.RECIPE:
                continue
            total = len(record.prompt) + step.start
            request = Request(tokens, total, 0, len(record.prompt), None, None, ALL_PACKS, None, None, None)
            recipe = find_recipe(counted, request).table_row
            for k in range(min(step.accepted + 1, len(step.draft))):
                p = float(counted.confidence[recipe, k])
                counts[:, min(int(p * NUM_BINS), NUM_BINS - 1)] += 1, p, k < step.accepted
    return counts


def _encode(texts: list[str]) -> list[list[int]]:
    return [load_tokenizer("tekken").encode(text) for text in texts]


def main() -> None:
    parser = command("benchmarks.learn.recipes", __doc__)
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped pack")
    args = parser.parse_args()
    # Without the texts that a package of the test splits has, too.
    archives = fetch_all({archive for r in releases_of("test") for archive in r.archives})
    reported = {text for archive in archives for text in texts_in(archive, SORTS).values()}
    texts = [(package, text) for package, text in package_texts("tune") if text not in reported]
    pack = learn(texts)
    print(f"{len(texts):,} texts, {sum(len(text) for _, text in texts):,} characters: {pack!r}", flush=True)
    make_corpora(*SPLITS)
    # Real edits, no wrong drafts and no outputs like a model's.
    made = MODEL, *QUALITIES[1:]
    tekken = (entry for name in SPLITS for entry in read_entries(name) if entry.tokens == "tekken")
    entries = [entry for entry in tekken if entry.kind not in made]
    packages = sorted({entry.package for entry in entries})
    parts = [set(packages[part::NUM_PARTS]) for part in range(NUM_PARTS)]
    records = [[entry.record for entry in entries if entry.package in part] for part in parts]
    calibration = [0.0] * NUM_BINS
    with pool(JOBS) as workers:
        packs = workers.map(learn, [without(texts, part) for part in parts], chunksize=1)
        for number in range(NUM_ROUNDS):
            calibrated = [replace(each, calibration=tuple(calibration)) for each in packs]
            tasks = zip(calibrated, records, strict=True)
            drafts, promised, accepted = np.sum(workers.map(observe, tasks, chunksize=1), axis=0)
            # Half of the way: what is chosen depends on it, and would go to and fro.
            offsets = (accepted - promised) / (drafts + PRIOR)
            calibration = rising(offsets if not number else (offsets + calibration) / 2)
            print(f"round {number}: {drafts.sum():,.0f} drafts, {accepted.sum():,.0f} accepted", flush=True)
    pack = replace(pack, calibration=tuple(calibration))
    pack.save(args.out)
    print(f"wrote {args.out}: {len(pack.words):,} words, {len(pack.recipes):,} recipes")


def rising(offsets: npt.NDArray[np.float64]) -> list[float]:
    """[N]: offsets of N bins of equal width, with which what is promised rises with what was counted."""
    middles = (np.arange(len(offsets)) + 0.5) / len(offsets)
    promised = np.maximum.accumulate(middles + offsets + np.arange(len(offsets)) * 1e-4)
    return [round(float(offset), 4) for offset in promised - middles]


if __name__ == "__main__":
    main()
