"""Replays of the corpus by every drafter, spread over processes, and what they counted."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.corpus import build as corpus
from benchmarks.corpus.build import DEFAULT_CACHE
from benchmarks.corpus.files import FIVE
from benchmarks.corpus.mix import ByteTokenizer, trained_bpe
from benchmarks.processes import pool
from benchmarks.quality import build_suffix_peer
from benchmarks.quality.earlier import CachedSuffixDecoding, EarlierResponses
from benchmarks.quality.replays import OurPair, Reliability, bound, everywhere, replay_batched
from benchmarks.tables import command
from gpu_align import DrafterConfig, RecipePack, Recipes, Source
from gpu_align.policies import RECIPE_POLICIES
from gpu_align.predictors import TokenPredictor
from gpu_align.simulate import NO_PACK, SWEEP, Record, load_tokenizer, replay
from gpu_align.tools.simulate.policies import OURS, make_policies, setting_name
from gpu_align.tools.simulate.replay import PairResult


def cached_corpus(name: str) -> Path:
    """The file of a set of the corpus."""
    return Path(f".cache/corpus-{name}.jsonl.gz")


def quality_command(module: str, doc: str | None, corpus: str, out: str) -> argparse.ArgumentParser:
    """The options of all measurements: a set of the corpus, the results, how many records and processes."""
    parser, made = command(module, doc), "made if not there"
    parser.add_argument("--corpus", type=Path, default=cached_corpus(corpus), help=made)
    said = f"what is learned or known beforehand; {made}"
    parser.add_argument("--tune", type=Path, default=cached_corpus("tune"), help=said)
    parser.add_argument("--json", type=Path, default=Path(f".cache/{out}.json"), help="the results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="every Nth record: a quick look")
    return parser


def make_ready(corpora: Mapping[str, Path]) -> int:
    """Build Arctic's suffix tree, and make the corpora (set → file) that are not there; returns an exit code."""
    try:
        build_suffix_peer.build()
    except RuntimeError as error:
        print(f"error: suffix decoding cannot be built to compare with: {error}", file=sys.stderr)
        return 1
    build_suffix_peer.add_to_path()
    return make_corpora(corpora)


def make_corpora(corpora: Mapping[str, Path]) -> int:
    """Make the corpora that are not there: the second half of `make_ready`."""
    for name, path in corpora.items():
        if not path.is_file() and (code := corpus.main([str(path), "--set", name])):
            return code
    return 0


class Encodes(Protocol):
    """A tokenizer of the corpus."""

    def encode(self, text: str) -> list[int]: ...


def knowledge(tune: Path, tokens: Sequence[str], jobs: int = 1) -> dict[str, Knowledge]:
    """Of the names of tokens that are asked for, what there is to know in them from the tuning split."""
    with pool(min(jobs, len(tokens)) or 1) as workers:
        found = workers.starmap(_knowledge, [(tune, name) for name in tokens], chunksize=1)
    return dict(zip(tokens, found, strict=True))


def tokenizer_of(tokens: str, texts: Sequence[str], cache: Path = DEFAULT_CACHE) -> Encodes:
    """The tokenizer behind the corpus's name for its tokens; `texts` are those that its own BPE is trained on."""
    if tokens == "bytes":
        return ByteTokenizer()
    return trained_bpe(texts, cache) if tokens == "bpe" else load_tokenizer(tokens)


def texts_of(entries: Sequence[Entry]) -> list[str]:
    """The new texts of the real files of these entries, in their order."""
    tokenizer = load_tokenizer("tekken")
    outputs = (e.record.output for e in entries if e.tokens == "tekken" and e.kind == e.text)
    return [b"".join(map(tokenizer.token_bytes, output)).decode() for output in outputs]


def _knowledge(tune: Path, tokens: str) -> Knowledge:
    # The BPE is trained on just these texts, so that its cached file is found by their hash.
    texts = texts_of(_entries(tune))
    encode = tokenizer_of(tokens, texts).encode
    recipes = RecipePack.load().tokenize(lambda words: [encode(word) for word in words])
    return Knowledge(recipes, [encode(text) for text in texts])


@lru_cache(maxsize=1)
def _entries(tune: Path) -> list[Entry]:
    return read_entries(tune)


#: The bound's policy name.
CLAIRVOYANT = "clairvoyant"
#: Suffix decoding that knows the outputs of the tuning split as earlier responses -> its spec factor.
CACHED = {"suffix_decoding_deep_cached": 1, "suffix_decoding_4_deep_cached": 4}
#: As deep as suffix decoding can use at K = 64.
CACHED_DEPTH = 128
#: Most output tokens that one task of a worker replays: small enough to keep all workers busy to the end.
SHARD_TOKENS = 120_000


@dataclass(frozen=True)
class Entry:
    """A record of the corpus and its labels."""

    record: Record
    kind: str
    text: str
    package: str
    split: str
    tokens: str

    @property
    def in_five(self) -> bool:
        """Whether it is one of the records of ``--set five``."""
        names = {package.name for package in FIVE}
        return self.kind == "python" and self.tokens == "tekken" and self.package in names


def read_entries(path: Path) -> list[Entry]:
    """The corpus, in its order."""
    entries = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            f = json.loads(line)
            record = Record(
                f["id"], [], f["prediction"], f["output"], "tekken" if f["tokens"] == "tekken" else None
            )
            entries.append(Entry(record, f["kind"], f["text"], f["package"], f["split"], f["tokens"]))
    return entries


@dataclass(frozen=True)
class Knowledge:
    """The knowledge of a drafter in one kind of tokens: the shipped pack, and outputs of the tuning split."""

    recipes: Recipes | None = None
    earlier: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Run:
    """One drafter with one setting at one K; a setting of ours may say ``recipes="off"`` and a smaller K, too."""

    policy: str
    num_draft_tokens: int
    setting: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return setting_name(dict(self.setting)) if self.policy == OURS else self.policy

    @property
    def without_recipes(self) -> bool:
        """Whether it is our drafter with something taken away that it has otherwise."""
        return ("recipes", NO_PACK) in self.setting


#: Ours without recipes: for comparison, and no setting of the curve.
WITHOUT_RECIPES = (("recipes", NO_PACK),)
#: Settings with shorter drafts: sixteenths of K, `length_factor` and `min_survival`. Where few rejections are
#: wanted, a limit for all drafts costs less than to ask for a higher survival. Chosen on `kinds-tune`.
_SHORTER = (
    (8, 2, 0.2),
    (8, 1, 0.2),
    (6, 2, 0.3),
    (6, 1, 0.3),
    (6, 1, 0.5),
    (6, 0.5, 0.5),
    (6, 0.5, 0.8),
    (6, 0.5, 0.95),
    (3, 4, 0.95),
)


def our_settings(num_draft_tokens: int) -> list[dict[str, Any]]:
    """The settings of the curve of our drafter: the default, those of `SWEEP`, and some with a smaller K."""
    shorter = [
        {
            "length_factor": factor,
            "min_survival": survival,
            "min_survival_recipe": max(survival, 0.4),
            "num_draft_tokens": num_draft_tokens * sixteenths // 16,
        }
        for sixteenths, factor, survival in _SHORTER
    ]
    return [{}, *SWEEP, *shorter]


@dataclass
class Counts:
    """Sums over records."""

    records: int = 0
    output_tokens: int = 0
    steps: int = 0
    accepted: int = 0
    rejected: int = 0
    rejected_from_prediction: int = 0
    reliability: Reliability = field(default_factory=Reliability, repr=False)

    @classmethod
    def of(cls, pairs: Iterable[PairResult]) -> Counts:
        counts = cls()
        for pair in pairs:
            counts.records += 1
            counts.output_tokens += pair.output_tokens
            counts.steps += pair.steps
            counts.accepted += pair.accepted
            counts.rejected += pair.rejected
            counts.rejected_from_prediction += pair.rejected_from.get(Source.PREDICTION, 0)
            if isinstance(pair, OurPair):
                counts.reliability.take(pair.reliability)
        return counts

    @property
    def tokens_per_step(self) -> float:
        return self.output_tokens / self.steps

    @property
    def rejected_per_accepted(self) -> float:
        """Infinite where drafts were made and none was accepted."""
        return self.rejected / self.accepted if self.accepted else float("inf") if self.rejected else 0.0

    def as_json(self) -> dict[str, int]:
        names = ["records", "output_tokens", "steps", "accepted", "rejected", "rejected_from_prediction"]
        return {name: getattr(self, name) for name in names}


def run_records(run: Run, records: Sequence[Record], known: Knowledge | None = None) -> list[PairResult]:
    """Replay `records` with one drafter; results in their order, without times."""
    k = run.num_draft_tokens
    known = known or Knowledge()
    if run.policy == CLAIRVOYANT:
        return [bound(record, k, everywhere) for record in records]
    if run.policy == OURS:
        setting = {name: value for name, value in run.setting if name != "recipes"}
        k = setting.pop("num_draft_tokens", k)
        config = DrafterConfig(**setting)
        recipes = None if run.without_recipes else known.recipes
        pairs = replay_batched(records, k, config, recipes=recipes)
    else:
        policy = policy_of(run, records, known)
        pairs = [replay(policy, record, k) for record in records]
    for pair in pairs:
        pair.propose_ns = []  # not needed, and long
    return pairs


def policy_of(run: Run, records: Sequence[Record], known: Knowledge) -> TokenPredictor:
    """A peer."""
    if run.policy in RECIPE_POLICIES:
        if known.recipes is None:
            raise ValueError(f"{run.policy}: expected recipes in the tokens of the records, found none")
        return RECIPE_POLICIES[run.policy](known.recipes)
    if run.policy in CACHED:
        return CachedSuffixDecoding(CACHED[run.policy], _earlier_responses(known))
    [policy] = make_policies([run.policy], records, run.num_draft_tokens)
    return policy


#: The tree that was used last, and of what it is: it takes seconds to fill, and the runs of one K share it.
_TREE: list[tuple[Knowledge, EarlierResponses]] = []


def _earlier_responses(known: Knowledge) -> EarlierResponses:
    if not _TREE or _TREE[0][0] is not known:
        _TREE[:] = [(known, EarlierResponses(known.earlier, CACHED_DEPTH))]
    return _TREE[0][1]


def run_all(
    runs: Sequence[Run],
    entries: Sequence[Entry],
    jobs: int,
    chosen: Callable[[Run, Entry], bool] = lambda run, entry: True,
    known: Mapping[str, Knowledge] | None = None,
) -> dict[Run, dict[int, PairResult]]:
    """Every run over the entries that it is `chosen` for: run → index of the entry → result.

    Args:
        runs: what to run.
        entries: the corpus.
        jobs: processes.
        chosen: which entries a run replays; all by default.
        known: by the name of an entry's tokens, what drafters may know in them; nothing by default.
    """
    tasks = []
    for run in runs:
        # Policies of one call may share one tokenizer, so a task holds records of one.
        by_tokens: dict[str, list[int]] = defaultdict(list)
        for index, entry in enumerate(entries):
            if chosen(run, entry):
                by_tokens[entry.tokens].append(index)
        for indices in by_tokens.values():
            tasks += [(run, shard) for shard in _shards(indices, entries)]
    # What takes long goes first: the bound, whose steps are long, and ours. What shares a tree of earlier
    # responses stays together, so that no worker fills it twice.
    tasks.sort(key=lambda task: (*_when(task[0]), entries[task[1][0]].tokens, task[0].num_draft_tokens))
    results: dict[Run, dict[int, PairResult]] = {run: {} for run in runs}
    with pool(jobs, partial(_know, entries, known or {})) as workers:
        for number, (run, indices, pairs) in enumerate(workers.imap_unordered(_work, tasks), 1):
            results[run].update(zip(indices, pairs, strict=True))
            if sys.stderr.isatty():
                print(f"{number:,} of {len(tasks):,} parts, {run.name}", end="\r", file=sys.stderr)
    return results


def _when(run: Run) -> tuple[bool, bool, bool]:
    return run.policy != CLAIRVOYANT, run.policy != OURS, run.policy not in CACHED


_ENTRIES: Sequence[Entry] = ()
_KNOWN: Mapping[str, Knowledge] = {}


def _know(entries: Sequence[Entry], known: Mapping[str, Knowledge]) -> None:
    """In a worker, whose tasks are indices of the entries."""
    global _ENTRIES, _KNOWN
    _ENTRIES, _KNOWN = entries, known


def _work(task: tuple[Run, list[int]]) -> tuple[Run, list[int], list[PairResult]]:
    run, indices = task
    known = _KNOWN.get(_ENTRIES[indices[0]].tokens)
    pairs = run_records(run, [_ENTRIES[index].record for index in indices], known)
    for pair in pairs:
        # Which step gave which token is not asked for here; it would be most of what travels.
        pair.origins, pair.step_of = pair.origins[:0], pair.step_of[:0]
    return run, indices, pairs


def _shards(indices: Sequence[int], entries: Sequence[Entry]) -> list[list[int]]:
    """Parts of `indices` with about equal numbers of tokens, none with many more than `SHARD_TOKENS`."""
    sizes = {index: len(entries[index].record.output) for index in indices}
    count = max(1, -(-sum(sizes.values()) // SHARD_TOKENS))
    shards: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(indices, key=lambda index: -sizes[index]):
        least = totals.index(min(totals))
        shards[least].append(index)
        totals[least] += sizes[index]
    return shards


def total(
    results: Mapping[int, PairResult],
    entries: Sequence[Entry],
    keep: Callable[[Entry], bool] = lambda e: True,
) -> Counts:
    """The sums over the entries that `keep` says yes to."""
    return Counts.of(pair for index, pair in results.items() if keep(entries[index]))
