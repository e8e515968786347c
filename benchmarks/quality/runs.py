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
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.corpus import build as corpus
from benchmarks.corpus.build import KIND_SETS, Entry
from benchmarks.corpus.files import SETS
from benchmarks.corpus.mix import encoder_of
from benchmarks.quality import build_suffix_peer
from benchmarks.quality.replays import OurPair, bound, replay_batched
from benchmarks.tables import command
from gpu_align import DrafterConfig, RecipePack, Recipes, Source
from gpu_align.predictors import TokenPredictor
from gpu_align.tools.policies import RECIPE_POLICIES, REQUEST, SuffixDecoding, suffix_tree
from gpu_align.tools.simulate.policies import OURS, make_policies
from gpu_align.tools.simulate.replay import NO_PACK, SWEEP, PairResult, Record, load_tokenizer, replay

#: Set of the corpus → its file.
CORPORA = {name: Path(f".cache/corpus-{name}.jsonl.gz") for name in (*SETS, *KIND_SETS)}
#: Processes.
JOBS = os.cpu_count() or 1


def pool(jobs: int, begin: Callable[[], None] | None = None) -> Any:
    """Processes with one thread of torch each; each calls `begin` first.

    Spawned, not forked: torch's threads do not survive a fork.
    """
    return get_context("spawn").Pool(jobs, _begin, [begin])


def _begin(begin: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    build_suffix_peer.add_to_path()
    if begin is not None:
        begin()


def quality_command(module: str, doc: str | None, out: str) -> argparse.ArgumentParser:
    """The options of all measurements: the results, how many records."""
    parser = command(module, doc)
    parser.add_argument("--json", type=Path, default=Path(f".cache/{out}.json"), help="the results")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="every Nth record: a quick look")
    return parser


def make_corpora(*names: str) -> None:
    """Make the corpora that are not there."""
    for name in names:
        if not CORPORA[name].is_file():
            corpus.main([str(CORPORA[name]), "--set", name])


def knowledge(tokens: Sequence[str]) -> dict[str, Knowledge]:
    """Of the names of tokens that are asked for, what there is to know in them from the tuning split."""
    with pool(min(JOBS, len(tokens)) or 1) as workers:
        found = workers.map(_knowledge, tokens, chunksize=1)
    return dict(zip(tokens, found, strict=True))


def _knowledge(tokens: str) -> Knowledge:
    token_bytes = load_tokenizer("tekken").token_bytes
    outputs = (e.output for e in read_entries("tune") if e.is_real)
    texts = [b"".join(map(token_bytes, output)).decode() for output in outputs]
    encode = encoder_of(tokens, texts)
    recipes = RecipePack.load().tokenize(lambda words: [encode(word) for word in words])
    return Knowledge(recipes, [encode(text) for text in texts])


class EarlierResponses:
    """Arctic's tree of earlier responses, filled once; any number of policies may share it."""

    def __init__(self, responses: Iterable[Sequence[int]], max_tree_depth: int) -> None:
        self.max_tree_depth = max_tree_depth
        self.cache = suffix_tree(max_tree_depth, max_cached_requests=-1)
        for number, tokens in enumerate(responses, start=REQUEST + 1):
            self.cache.start_request(number, [])
            self.cache.add_active_response(number, list(tokens))
            self.cache.stop_request(number)
        # Whoever asks does so in the name of a request; this one has neither a prompt nor a response.
        self.cache.start_request(REQUEST, [])


class CachedSuffixDecoding(SuffixDecoding):
    """The draft of higher score, of the request's own tree or that of earlier responses; if equal its own."""

    def __init__(self, max_spec_factor: float, earlier: EarlierResponses) -> None:
        super().__init__(max_spec_factor, earlier.max_tree_depth)
        self._trees.append(earlier.cache)


#: The bound's policy name.
CLAIRVOYANT = "clairvoyant"
#: Suffix decoding that knows the outputs of the tuning split as earlier responses -> its spec factor.
CACHED = {"suffix_decoding_deep_cached": 1, "suffix_decoding_4_deep_cached": 4}
#: As deep as suffix decoding can use at K = 64.
CACHED_DEPTH = 128
#: Most output tokens that one task of a worker replays: small enough to keep all workers busy to the end.
SHARD_TOKENS = 120_000


@lru_cache(maxsize=1)
def read_entries(name: str) -> list[Entry]:
    """A set of the corpus, in its order."""
    with gzip.open(CORPORA[name], "rt", encoding="utf-8") as lines:
        return [Entry(**json.loads(line)) for line in lines]


class Knowledge(NamedTuple):
    """The knowledge of a drafter in one kind of tokens: the shipped pack, and outputs of the tuning split."""

    recipes: Recipes | None = None
    earlier: Sequence[Sequence[int]] = ()


class Run(NamedTuple):
    """One drafter with one setting at one K; a setting of ours may say ``recipes="off"`` and a smaller K, too."""

    policy: str
    num_draft_tokens: int
    setting: tuple[tuple[str, Any], ...] = ()

    @property
    def without_recipes(self) -> bool:
        """Whether it is our drafter with something taken away that it has otherwise."""
        return ("recipes", NO_PACK) in self.setting


#: Ours without recipes: for comparison, and no setting of the curve.
WITHOUT_RECIPES = (("recipes", NO_PACK),)
#: Settings with shorter drafts: sixteenths of K, `length_factor` and `min_survival`. Where few rejections are
#: wanted, a limit for all drafts costs less than to ask for a higher survival. Chosen on `kinds-tune`.
_SHORTER = (
    (8, 2, 0.2), (8, 1, 0.2), (6, 2, 0.3), (6, 1, 0.3), (6, 1, 0.5), (6, 0.5, 0.5), (6, 0.5, 0.8), (6, 0.5, 0.95),
    (3, 4, 0.95),
)  # fmt: skip


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
    by_tenth: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 10)), repr=False)

    @classmethod
    def of(cls, pairs: Iterable[PairResult]) -> Counts:
        counts = cls()
        for pair in pairs:
            counts.records += 1
            for name in ("output_tokens", "steps", "accepted", "rejected"):
                setattr(counts, name, getattr(counts, name) + getattr(pair, name))
            counts.rejected_from_prediction += pair.rejected_from.get(Source.PREDICTION, 0)
            if isinstance(pair, OurPair):
                counts.by_tenth += pair.by_tenth
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
        return [bound(record, k) for record in records]
    if run.policy == OURS:
        setting = {name: value for name, value in run.setting if name != "recipes"}
        k = setting.pop("num_draft_tokens", k)
        recipes = None if run.without_recipes else known.recipes
        return replay_batched(records, k, DrafterConfig(**setting), recipes)
    policy: TokenPredictor
    if run.policy in RECIPE_POLICIES:
        policy = RECIPE_POLICIES[run.policy](known.recipes)
    elif run.policy in CACHED:
        # A tree takes seconds to fill, and the runs of one K share it.
        if not _TREE or _TREE[0][0] is not known:
            _TREE[:] = [(known, EarlierResponses(known.earlier, CACHED_DEPTH))]
        policy = CachedSuffixDecoding(CACHED[run.policy], _TREE[0][1])
    else:
        [policy] = make_policies([run.policy], records, k)
    return [replay(policy, record, k) for record in records]


#: The tree that was used last, and of what it is.
_TREE: list[tuple[Knowledge, EarlierResponses]] = []


def run_all(
    runs: Sequence[Run],
    entries: Sequence[Entry],
    chosen: Callable[[Run, Entry], bool] = lambda run, entry: True,
    known: Mapping[str, Knowledge] | None = None,
) -> dict[Run, dict[int, PairResult]]:
    """Every run over the entries that it is `chosen` for: run → index of the entry → result.

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

    def when(task: tuple[Run, list[int]]) -> tuple[Any, ...]:
        """Begin with the long ones, the bound and ours. Runs that share a tree of earlier responses stay together,
        so that no worker fills it twice."""
        (name, k), tokens = (task[0].policy, task[0].num_draft_tokens), entries[task[1][0]].tokens
        return name != CLAIRVOYANT, name != OURS, name not in CACHED, tokens, k

    tasks.sort(key=when)
    results: dict[Run, dict[int, PairResult]] = {run: {} for run in runs}
    with pool(JOBS, partial(_know, entries, known or {})) as workers:
        for number, (run, indices, pairs) in enumerate(workers.imap_unordered(_work, tasks), 1):
            results[run].update(zip(indices, pairs, strict=True))
            if sys.stderr.isatty():
                print(f"{number:,} of {len(tasks):,} parts, {run.policy}", end="\r", file=sys.stderr)
    return results


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
        # Times, and which step gave which token: not asked for here, and most of what would travel.
        pair.propose_ns, pair.origins, pair.step_of = [], pair.origins[:0], pair.step_of[:0]
    return run, indices, pairs


def _shards(indices: Sequence[int], entries: Sequence[Entry]) -> list[list[int]]:
    """Parts of `indices` with about equal numbers of tokens, none with many more than `SHARD_TOKENS`."""
    sizes = {index: len(entries[index].output) for index in indices}
    shards: list[list[int]] = [[] for _ in range(max(1, -(-sum(sizes.values()) // SHARD_TOKENS)))]
    for index in sorted(indices, key=lambda index: -sizes[index]):
        min(shards, key=lambda shard: sum(map(sizes.__getitem__, shard))).append(index)
    return shards


def total(
    results: Mapping[int, PairResult],
    entries: Sequence[Entry],
    keep: Callable[[Entry], bool] = lambda e: True,
) -> Counts:
    """The sums over the entries that `keep` says yes to."""
    return Counts.of(pair for index, pair in results.items() if keep(entries[index]))
