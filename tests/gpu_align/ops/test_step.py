"""Whole steps of a batch against plain Python: what is drafted, how sure it is, and what is remembered."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_align import Drafter, DrafterConfig, Source
from gpu_align.ops.constants import MAX_EDITS, SURVIVAL_ONE
from gpu_align.ops.draft import SurvivalTables
from gpu_align.ops.recipe_lookup import Recipes
from tests.gpu_align.step_harness import (
    BACKENDS,
    INTERPRETED,
    POISON,
    Edit,
    Request,
    device_of,
    edited,
    flat_curves,
    indents_of,
    poison,
    random_curves,
    recipes_of,
    reindented,
    shapes_of,
    standing_of,
    use_tables,
)
from tests.gpu_align.step_oracle import Oracle

CAPACITY = 512
#: A kernel under the interpreter takes as long for one batch as the reference for all of them.
SEEDS = {"reference": range(100), "triton": range(4 if INTERPRETED else 100)}
CASES = [(backend, seed) for backend in BACKENDS for seed in SEEDS[backend]]


def settings_of(generator):
    return DrafterConfig(
        length_factor=generator.choice([0, 0.5, 8, 64]),
        min_survival=generator.choice([0, 0.05, 0.3]),
        min_survival_lost=generator.choice([0, 0.35]),
        min_survival_recipe=generator.choice([0, 0.2, 0.5]),
        min_match=generator.choice([1, 1, 2]),
        min_context_match=generator.choice([1, 1, 3]),
        use_context=generator.random() < 0.85,
    )


def tables_of(generator, K, config, device):
    """Shipped, at random, or all classes alike, so that many candidates tie."""
    kind = generator.random()
    if kind < 0.5:
        return SurvivalTables.load(
            K, device, None, config.min_survival, config.min_survival_lost
        )  # what the drafter loads
    curves = random_curves(generator.randrange(2**32), K) if kind < 0.8 else flat_curves(SURVIVAL_ONE // 2, K)
    return SurvivalTables.from_survival(
        curves.astype(np.int32), device, config.min_survival, config.min_survival_lost
    )


def request_of(generator, vocab, line_ends=(), runs=None):
    """``(prediction, prompt, output)``."""
    if line_ends and runs and generator.random() < 0.5:
        prediction, output = reindented(generator, vocab, line_ends, runs)
        return prediction, generator.choices(range(vocab), k=10), output
    prediction = generator.choices(
        range(vocab), k=generator.choice([0, 1, 2, 5, 60, 255, 256, 257, 300, 500])
    )
    if generator.random() < 0.3:
        prediction = (prediction[:20] * 40)[: len(prediction)]
    prompt = generator.choices(range(vocab), k=generator.randint(0, 60))
    if prediction and generator.random() < 0.3:
        prompt = (prediction * 60)[: len(prompt)]
    output = edited(generator, prediction, vocab, generator.randint(5, CAPACITY - len(prompt)))
    return prediction, prompt, output


@pytest.mark.parametrize(("backend", "seed"), CASES)
def test_a_batch_of_edits(backend, seed):
    generator = random.Random(seed)
    slots = generator.sample(range(5), generator.randint(1, 4))
    K, vocab = generator.choice([1, 4, 16, 64, 65]), generator.choice([3, 8, 40, 500])
    config, device = settings_of(generator), device_of(backend)
    lists = recipes_of(generator, vocab, generator.choice([0, 5, 200]))
    shapes, shape_of = shapes_of(generator, vocab, generator.choice([0, 0, 30]))
    packs = {"words": Recipes.from_lists(lists)} if lists else {}
    if shapes:
        packs["shapes"] = Recipes.from_lists(shapes, shape_of=shape_of)
    recipes = Recipes.join(packs) if packs else None
    indents, line_ends, runs = indents_of(generator, vocab)
    if generator.random() < 0.7:
        recipes = replace(recipes if recipes is not None else Recipes.from_lists([]), indents=indents)
    else:
        line_ends, runs = (), None
    drafter = Drafter(
        max_slots=5, max_context_len=CAPACITY, max_prediction_len=600, num_draft_tokens=K, vocab_size=vocab,
        device=device, config=config, backend=backend, recipes=recipes,
    )  # fmt: skip
    poison(drafter)
    tables = tables_of(generator, K, config, device)
    use_tables(drafter, tables, backend)
    token_ids = torch.full((5, CAPACITY), POISON, dtype=torch.int32, device=device)
    total_len = torch.zeros(5, dtype=torch.int32, device=device)
    running, done = {}, {}
    for slot in slots:
        prediction, prompt, output = request_of(generator, vocab, line_ends, runs)
        memory, related = generator.random() < 0.3, generator.random() < 0.5
        drafter.add(slot, prediction, len(prompt), memory=memory, related=related)
        oracle = Oracle(
            prediction, len(prompt), tables, K=K, quarters=int(4 * config.length_factor), vocab_size=vocab,
            capacity=CAPACITY, min_match=config.min_match, min_context_match=config.min_context_match,
            use_context=config.use_context, recipes=lists,
            recipe_floor=config.min_survival_recipe, shapes=shapes, shape_of=shape_of, line_ends=line_ends,
            runs=runs, memory=memory, related=memory and related,
        )  # fmt: skip
        tokens = [*prompt, *output]
        token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        running[slot] = tokens, oracle
        done[slot] = min(len(prompt) + generator.choice([0, 1, 1, 1, 30]), len(tokens))

    for _ in range(12 if backend == "triton" and INTERPRETED else 40):
        generator.shuffle(slots)
        sampled = [int(generator.random() < 0.9) for _ in slots]
        for slot in slots:
            total_len[slot] = done[slot]
        draft = drafter.propose(
            token_ids,
            total_len,
            torch.tensor(slots, dtype=torch.int64, device=device),
            torch.tensor(sampled, dtype=torch.int32, device=device),
        )
        for b, slot in enumerate(slots):
            tokens, oracle = running[slot]
            length = int(draft.length[b])
            if not sampled[b]:
                assert (length, int(draft.source[b])) == (0, 0)
                continue
            note = f"slot {slot} after {done[slot]} tokens"
            expected, class_id, source = oracle.step(tokens[: done[slot]])
            assert (draft.token_ids[b, :length].tolist(), int(draft.source[b])) == (expected, source), note
            if expected:
                promised = (drafter._recipes if source == 3 else tables).confidence
                assert torch.equal(draft.confidence[b, :length], promised[class_id, :length]), note
            check_state(drafter, slot, oracle, note)
            right = [a == b for a, b in zip(expected, tokens[done[slot] :], strict=False)]
            accepted = [*right, False].index(False)
            done[slot] = min(done[slot] + accepted + 1, len(tokens))


@pytest.mark.parametrize("num_prediction", [0, 1, 5, 90])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_is_not_all_there(backend, num_prediction):
    """Whatever was sampled: an output that has not begun, and is the beginning of every prediction."""
    prediction, prompt = list(range(100, 100 + num_prediction)), [7, 8, 100, 101, 7, 8, 100, 9, 7, 8]
    request = Request(backend, prediction, prompt, vocab=300, capacity=64)
    request.prompt = []  # `step` gets all tokens
    tokens = [*prompt, *range(100, 104), 7, 8]
    drafted, seen = {}, -1
    # From nothing to the first tokens of the output, and back into the prompt.
    for total in (0, 1, 3, 7, 9, 10, 11, 13, 16, 4, 12):
        if total < seen or seen < 0:
            tables = request.drafter._tables
            oracle = Oracle(prediction, 10, tables, K=8, quarters=32, vocab_size=300, capacity=64)
        seen = total
        found = request.step(tokens[:total])
        expected, class_id, source = oracle.step(tokens[:total])
        assert (found.tokens, found.source) == (expected, source), total
        promised = request.drafter._tables.confidence[class_id, : len(expected)].tolist()
        assert found.confidence == promised, total
        check_state(request.drafter, Request.SLOT, oracle, f"after {total} tokens")
        drafted[total] = found.tokens, found.source
    for total in (0, 1, 3, 7, 9, 10, 4):
        if prediction:
            assert drafted[total] == (prediction[:8], Source.PREDICTION)
    if not prediction:
        assert drafted[7] == ([101, 7, 8, 100], Source.CONTEXT)


def check_state(drafter, slot, oracle, note):
    if not oracle.text:
        return
    found = standing_of(drafter, slot)
    assert (found.in_sync, found.num_in_sync) == (oracle.in_sync, oracle.num_in_sync), note
    assert found.edits == [Edit(*e) for e in oracle.edits[-MAX_EDITS:] if e is not None], note
    if oracle.in_sync:
        assert found.cursor == oracle.cursor, note
    else:
        assert (found.anchor, found.diverged_at) == (oracle.anchor, oracle.diverged_at), note
        assert found.row == oracle.row[1:], note
