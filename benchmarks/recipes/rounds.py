"""Misses and merge: the same outputs again, after the pack has been told what was refuted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_align.recipes.misses import Misses
from gpu_align.recipes.shapes import shape_of_output

from benchmarks.recipes.runs import Counts, K, encode, ours, token_texts
from gpu_align import DrafterConfig, RecipePack, Recipes, Source
from gpu_align.ops.constants import MAX_CONTEXT
from gpu_align.simulate import Record
from gpu_align.simulate.drafter_policy import DrafterPolicy

NUM_ROUNDS = 5


def misses_of(recipes: Recipes, records: Sequence[Record]) -> Misses:
    """What the outputs refuted and accepted of the drafts of a pack that drafts alone."""
    misses = Misses.of(encode)
    policy = DrafterPolicy.for_records(records, K, DrafterConfig(use_context=False), recipes=recipes)
    for record in records:
        policy.start(record.prompt, [], K)
        done = 1
        policy.extend(record.output[:1])
        while done < len(record.output):
            draft = policy.propose()[: len(record.output) - done]
            accepted = 0
            for token in draft if policy.source == Source.RECIPE else ():
                before = record.output[: done + accepted]
                context = [*record.prompt, *before][-MAX_CONTEXT:]
                items = [] if recipes.shape_of is None else shape_of_output(before, recipes.shape_of)
                said = record.output[done + accepted]
                if token != said:
                    misses.refuted(context, items, token, said)
                    break
                misses.accepted(context, items, token)
                accepted += 1
            step = record.output[done : done + accepted + 1]
            policy.extend(step)
            done += len(step)
    return misses


def rounds(pack: RecipePack, records: Sequence[Record]) -> list[dict[str, Any]]:
    """What a pack drafts alone, as learned and after each of `NUM_ROUNDS` merges; and its entries."""
    found = []
    for number in range(NUM_ROUNDS + 1):
        recipes = pack.tokenize(encode, token_texts)
        counts = Counts.of(ours(recipes, alone=True)(records))
        found.append({**counts.as_json(), "entries": len(pack.observed)})
        if number < NUM_ROUNDS:
            pack = pack.merge(misses_of(recipes, records))
    return found
