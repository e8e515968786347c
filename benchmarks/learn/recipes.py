"""Learn the recipe pack that comes with the library: ``python -m benchmarks.learn.recipes [OUT.json.gz]``.

How far the promises hold is measured on
packages that the pack does not know: one is learned from all but one part of the packages, and the drafter replays
the edits of that part with it. Drafts from recipes are accepted less often than the counts promise, as they are
chosen where nothing else is likely; the calibration says by how much. It changes what is chosen, so the replay is
repeated with it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.corpus.build import DEFAULT_CACHE
from benchmarks.corpus.files import Fetch, download
from benchmarks.corpus.kinds import MODEL, QUALITIES
from benchmarks.corpus.packages import package_texts
from benchmarks.processes import pool
from benchmarks.quality.runs import Entry, cached_corpus, make_corpora, read_entries
from benchmarks.tables import command
from gpu_align import RecipePack, Source
from gpu_align.files import NUM_BINS
from gpu_align.ops.layout import Request, as_arrays
from gpu_align.ops.recipes import ALL_PACKS
from gpu_align.ops.recipes.reference import find_recipe
from gpu_align.ops.recipes.table import RecipeTable
from gpu_align.predictors import PredictorLoop
from gpu_align.recipes import learn as learn_pack
from gpu_align.recipes.pack import SHIPPED
from gpu_align.simulate import Record, load_tokenizer
from gpu_align.tools.simulate.policies import our_drafter
from gpu_align.tools.simulate.replay import follow

#: Parts of the split, by package, of which each is replayed with what the others taught.
NUM_PARTS = 6
NUM_DRAFT_TOKENS = 64
NUM_ROUNDS = 6
#: The sets whose edits are replayed.
SPLITS = ("tune", "kinds-tune")
#: Offsets are drawn towards none by so many drafts.
PRIOR = 30


#: ``(package, text)`` of each text.
Texts = Sequence[tuple[str, str]]


def is_replayed(entry: Entry) -> bool:
    """Whether a record is a real edit, not a wrong draft or an output like a model's."""
    return entry.tokens == "tekken" and not (entry.kind == MODEL or entry.kind in QUALITIES[1:])


def learnable_texts(cache: Path, fetch: Fetch = download) -> list[tuple[str, str]]:
    """``(package, text)`` of the tuning splits, without the texts that a package of the test splits has, too."""
    reported = {text for _, text in package_texts("test", cache, fetch, everything=True)}
    return [(package, text) for package, text in package_texts("tune", cache, fetch) if text not in reported]


def without(texts: Texts, packages: Collection[str]) -> list[tuple[str, str]]:
    """The texts that none of these packages has."""
    theirs = {text for package, text in texts if package in packages}
    return [(package, text) for package, text in texts if text not in theirs]


def parts_of(texts: Texts, entries: Sequence[Entry]) -> Iterator[tuple[list[tuple[str, str]], list[Record]]]:
    """``(learned from, replayed)``, by package."""
    packages = sorted({entry.package for entry in entries})
    for part in range(NUM_PARTS):
        held_out = set(packages[part::NUM_PARTS])
        yield without(texts, held_out), [entry.record for entry in entries if entry.package in held_out]


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
            request = Request(
                tokens, total, len(record.prompt), None, None, ALL_PACKS, None, None, None, None
            )
            recipe = find_recipe(counted, request).row
            for k in range(min(step.accepted + 1, len(step.draft))):
                p = float(counted.confidence[recipe, k])
                counts[:, min(int(p * NUM_BINS), NUM_BINS - 1)] += 1, p, k < step.accepted
    return counts


def _encode(texts: list[str]) -> list[list[int]]:
    return [load_tokenizer("tekken").encode(text) for text in texts]


def main() -> None:
    parser = command("benchmarks.learn.recipes", __doc__)
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED, help="default: the shipped pack")
    said = "take this pack's instead of measuring one (many minutes)"
    parser.add_argument("--calibration", type=Path, metavar="PACK", help=said)
    args = parser.parse_args()
    texts = learnable_texts(DEFAULT_CACHE)
    pack = learn(texts)
    print(f"{len(texts):,} texts, {sum(len(text) for _, text in texts):,} characters: {pack!r}", flush=True)
    if args.calibration:
        _save(replace(pack, calibration=RecipePack.load(args.calibration).calibration), args.out)
        return
    corpora = {name: cached_corpus(name) for name in SPLITS}
    if code := make_corpora(corpora):
        raise SystemExit(code)
    entries = [entry for path in corpora.values() for entry in read_entries(path) if is_replayed(entry)]
    parts = list(parts_of(texts, entries))
    calibration = [0.0] * NUM_BINS
    with pool(os.cpu_count() or 1) as workers:
        packs = workers.map(learn, [known for known, _ in parts], chunksize=1)
        for number in range(NUM_ROUNDS):
            tasks = [
                (replace(p, calibration=tuple(calibration)), part)
                for p, (_, part) in zip(packs, parts, strict=True)
            ]
            drafts, promised, accepted = np.sum(workers.map(observe, tasks, chunksize=1), axis=0)
            # Half of the way: what is chosen depends on it, and would go to and fro.
            offsets = (accepted - promised) / (drafts + PRIOR)
            calibration = rising(offsets if not number else (offsets + calibration) / 2)
            print(f"round {number}: {drafts.sum():,.0f} drafts, {accepted.sum():,.0f} accepted", flush=True)
    print(f"{'counted':>10} {'drafts':>8} {'offset':>8}")
    for i, (number, offset) in enumerate(zip(drafts, calibration, strict=True)):
        print(f"{i / NUM_BINS:5.2f}-{(i + 1) / NUM_BINS:.2f} {number:8.0f} {offset:+8.3f}")
    _save(replace(pack, calibration=tuple(calibration)), args.out)


def rising(offsets: npt.NDArray[np.float64]) -> list[float]:
    """[N]: offsets of N bins of equal width, with which what is promised rises with what was counted."""
    middles = (np.arange(len(offsets)) + 0.5) / len(offsets)
    promised = np.maximum.accumulate(middles + offsets + np.arange(len(offsets)) * 1e-4)
    return [round(float(offset), 4) for offset in promised - middles]


def _save(pack: RecipePack, path: Path) -> None:
    pack.save(path)
    print(f"wrote {path}: {len(pack.words):,} words, {len(pack.recipes):,} recipes")


if __name__ == "__main__":
    main()
