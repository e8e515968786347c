"""Replays of a task's outputs without predictions, and what they counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from benchmarks.quality.earlier import CachedSuffixDecoding, EarlierResponses
from benchmarks.quality.replays import replay_batched
from benchmarks.quality.runs import Counts as QualityCounts
from benchmarks.recipes.groups import Output, Task
from gpu_align import DrafterConfig, RecipePack, Recipes, Source
from gpu_align.policies import PromptLookup, SuffixDecoding
from gpu_align.predictors import TokenPredictor
from gpu_align.recipes import merge, report
from gpu_align.recipes.misses import Misses
from gpu_align.simulate import Record, load_tokenizer, replay
from gpu_align.tools.recipes.merge import Key
from gpu_align.tools.recipes.report import TaskReport
from gpu_align.tools.simulate.replay import PairResult


def merged(pack: RecipePack, outputs: Sequence[Output]) -> dict[str, Any]:
    """What a pack drafts alone: as learned, and merged with its misses.

    Each half of the outputs is replayed with the misses of the other half, none with its own.
    """
    halves, misses = (outputs[::2], outputs[1::2]), (Misses(pack.tokenizer), Misses(pack.tokenizer))
    learned = [_replayed(pack, half, counted) for half, counted in zip(halves, misses, strict=True)]
    packs = [merge([pack, counted]) for counted in misses]
    after = [_replayed(better, half) for better, half in zip(packs, reversed(halves), strict=True)]
    return {
        "learned": _figures(learned),
        "merged": _figures(after),
        "entries": [len(pack.observed), *(len(better.observed) for better in packs)],
        "removed": [len(_keys(pack) - _keys(better)) for better in packs],
    }


def _replayed(pack: RecipePack, outputs: Sequence[Output], misses: Misses | None = None) -> TaskReport:
    [found] = report(pack, outputs, encode, token_texts, K, misses=misses).tasks.values()
    return found


def _figures(parts: Sequence[TaskReport]) -> dict[str, Any]:
    """Those of all parts together."""
    names = [field.name for field in fields(TaskReport)]
    total = TaskReport(**{name: sum(getattr(part, name) for part in parts) for name in names})
    return {**total.as_json(), "steps": total.steps, "rejected": total.drafted - total.accepted}


def _keys(pack: RecipePack) -> set[Key]:
    return {(entry.is_shape, entry.context) for entry in pack.observed}


#: Draft tokens a step.
K = 16
#: Depth of the suffix trees: Arctic's own.
DEPTH = 64
TOKENIZER = "tekken"
BATCH_SIZE = 16


def encode(texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text."""
    tokenizer = load_tokenizer(TOKENIZER)
    return [tokenizer.encode(text) for text in texts]


def token_texts(ids: Iterable[int]) -> list[str]:
    """The text of each token id."""
    return [_text(int(token)) for token in ids]


@lru_cache(maxsize=200_000)
def _text(token: int) -> str:
    return load_tokenizer(TOKENIZER).token_bytes(token).decode("utf-8", errors="replace")


@lru_cache(maxsize=1)
def base_recipes() -> Recipes:
    """The shipped pack in the tokens of the tasks."""
    return RecipePack.load().tokenize(encode)


def records_of(outputs: Sequence[Output]) -> list[Record]:
    """The outputs as records without predictions."""
    pairs = zip(encode([o.prompt for o in outputs]), encode([o.output for o in outputs]), strict=True)
    return [
        Record(str(number), prompt, [], output, TOKENIZER) for number, (prompt, output) in enumerate(pairs)
    ]


def counts_of(pairs: Iterable[PairResult]) -> dict[str, Any]:
    """Whole numbers: the sums over these results, accepted and rejected also by their source."""
    found = QualityCounts.of(pairs := list(pairs)).as_json()
    del found["rejected_from_prediction"]
    accepted = {
        source: sum(int((pair.origins == source).sum()) for pair in pairs) for source in Source if source
    }
    rejected = {source: sum(pair.rejected_from.get(source, 0) for pair in pairs) for source in Source}
    for name, by_source in (("accepted_from", accepted), ("rejected_from", rejected)):
        named = sorted((source.name.lower(), count) for source, count in by_source.items() if count)
        found[name] = dict(named)
    return found


#: Replays the records with one drafter.
Replay = Callable[[Sequence[Record]], list[PairResult]]


def ours(recipes: Recipes | None, alone: bool = False) -> Replay:
    """A replay with our drafter; `alone`: it drafts from recipes and from nothing else."""
    config = DrafterConfig(use_context=not alone)
    return lambda records: replay_batched(records, K, config, recipes=recipes, batch_size=BATCH_SIZE)


def peer(policy: TokenPredictor) -> Replay:
    """The same with another drafter."""
    return lambda records: [replay(policy, record, K) for record in records]


def drafters(base: Recipes, pack: Recipes, task: Task) -> dict[str, Replay]:
    """Ours with and without the pack, and the peers; one of these knows the samples as earlier responses."""
    earlier = EarlierResponses((t for g in task.groups for t in encode(g.samples)), DEPTH)
    return {
        "pack_alone": ours(pack, alone=True),
        "drafter_with_pack": ours(pack),
        "drafter_with_both": ours(Recipes.join({"task": pack, "base": base})),
        "drafter_without_pack": ours(base),
        "suffix_decoding_4": peer(SuffixDecoding(4, DEPTH)),
        "suffix_decoding_4_samples": peer(CachedSuffixDecoding(4, earlier)),
        "prompt_lookup": peer(PromptLookup()),
    }
