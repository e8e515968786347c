"""Rollouts of a policy that changes: ``python -m benchmarks.real_model.rollouts [--samples] [--write]``.

SmolLM2-135M-Instruct answers 16 prompts eight times each, with noise that is a function of seed and position,
as vLLM's V2 sampler has it. Then its weights change, and it answers again with the same seeds; the last samples
are predictions. `--samples`: earlier samples of the same policy, with other noise.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import tables
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.replays import bound, deciles
from benchmarks.quality.runs import CachedSuffixDecoding, Counts, EarlierResponses
from benchmarks.real_model import model
from benchmarks.real_model.__main__ import replayed
from benchmarks.real_model.model import CACHE, FOLDER, K
from benchmarks.serving.machines import H200, SMALL, Roofline
from gpu_align import DrafterConfig, predictors
from gpu_align.ops.files import write_at_once
from gpu_align.texts.several import joined
from gpu_align.tools.simulate.replay import PairResult, Record

#: Temperature and change of the weights, each by so much of its tensor's standard deviation.
TEMPERATURES = 0.5, 0.7, 1.0
CELLS = [f"{t},{change}" for t in TEMPERATURES for change in (0.001, 0.002, 0.01)]
N, MAX_NEW, DEPTH = 8, 64, 64
#: Samples of a prompt without a common noise, of which `N` are predictions of another one; the prompts whose
#: samples teach, and those that tell how well.
SAMPLES = 12
HALVES = {"learned": slice(0, None, 2), "unseen": slice(1, None, 2)}
#: Fewest drafts of a tenth of confidences; settings of suffix decoding and of ours, compared at equal rejections.
IN_TENTH = 200
FACTORS, FLOORS = (1, 4), (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, DrafterConfig().min_survival, 0.03)
PROMPTS = (
    *(f"A box holds {n} pencils. Tom has {n + 1} boxes and gives {n + 7} pencils to Ann. How many are left? "
      "Think step by step." for n in (6, 9, 12, 15)),
    *(f"Write a Python function `{name}` with a docstring."
      for name in ("is_even(n)", "reverse_words(text)", "median(values)", "count_lines(path)")),
    *(f"Explain in three sentences why {what}."
      for what in ("the sky is blue", "iron rusts", "ships float", "leaves turn red")),
    *(f"List five {what}, each with one short reason." for what in
      ("healthy breakfast foods", "hobbies for winter", "places to see in Rome", "ways to save energy")),
)  # fmt: skip
#: Drafters, verified by the own draw and by a coin.
ROWS = (
    "own draw",
    "then the others, own draw",
    "suffix decoding, own draw",
    "coin",
    "suffix decoding, coin",
    "no prediction",
    "at most",
)
Samples = list[list[list[int]]]


def noise_of(seeds: Sequence[int], position: int, size: int) -> torch.Tensor:
    """[B, V] of the Gumbel distribution."""
    rows = torch.empty(len(seeds), size)
    for row, seed in zip(rows, seeds, strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed * 65_536 + position))
    return rows.log_().neg_()


@torch.inference_mode()
def sample(
    policy: Any, ids: Any, temperature: float, end: int, old: Samples | None, number: int = N
) -> dict[str, Any]:
    """So many samples of each prompt; beside `old` ones, the positions up to the first other token, in how many of
    them the old token was drawn, and the sum of the probabilities that it had."""
    mask: torch.Tensor = ids["attention_mask"]
    out = policy(**ids, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(number, 0)
    cache.batch_repeat_interleave(number)
    mask = mask.repeat_interleave(number, 0)
    texts: list[list[int]] = [[] for _ in range(len(mask))]
    before = None if old is None else [tokens for group in old for tokens in group]
    follows, found = [before is not None] * len(texts), {"positions": 0, "agree": 0, "coin": 0.0}
    for position in range(MAX_NEW):
        scores = logits / temperature
        drawn = (scores + noise_of(range(len(texts)), position, scores.shape[1])).argmax(-1)
        probs = scores.softmax(-1) if any(follows) else None
        for row, token in enumerate(drawn.tolist()):
            if texts[row][-1:] == [end]:
                continue
            texts[row].append(token)
            if before is not None and probs is not None and follows[row]:
                expected = before[row][position]
                found["positions"] += 1
                found["agree"] += token == expected
                found["coin"] += float(probs[row, expected])
                follows[row] = token == expected and token != end
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        places = mask.sum(1, keepdim=True) - 1
        given = {"attention_mask": mask, "position_ids": places, "past_key_values": cache, "use_cache": True}
        logits = policy(drawn[:, None], **given).logits[:, -1]
    return {"samples": [texts[i : i + number] for i in range(0, len(texts), number)], **found}


def policy_of(change: float) -> Any:
    policy = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for weight in policy.parameters() if change else ():
        if weight.numel() > 1:
            weight.data.add_(torch.randn_like(weight) * weight.std() * change)
    return policy


def rollouts(cells: Sequence[str], number: int = N) -> tuple[list[list[int]], int, dict[str, Any]]:
    """Prompts, the end token, and the samples of cells and of their unchanged policies; kept in a file."""
    tokenizer = AutoTokenizer.from_pretrained(model.model_folder(), padding_side="left")
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
    ids = tokenizer.apply_chat_template([[{"role": "user", "content": text}] for text in PROMPTS], **how)
    path = CACHE / ("rollouts.json" if number == N else f"rollouts-{number}.json")
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in (each for cell in cells for each in (unchanged(cell), cell)):
        if name not in known:
            t, change = map(float, name.split(","))
            old = known[unchanged(name)]["samples"] if change else None
            known[name] = sample(policy_of(change), ids, t, tokenizer.eos_token_id, old, number)
            write_at_once(path, [json.dumps(known).encode()])
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*ids.values(), strict=True)]
    return prompts, tokenizer.eos_token_id, known


def unchanged(cell: str | float) -> str:
    return f"{str(cell).partition(',')[0]},0.0"


def replays_of(
    prompts: Sequence[list[int]], samples: Samples, half: str, draws: int = 1
) -> Iterator[tuple[Record, list[list[int]]]]:
    """Each sample of a half of the prompts with `N` of the other samples of its prompt, so often."""
    for n, draw in itertools.product(range(len(prompts))[HALVES[half]], range(draws)):
        for i, output in enumerate(samples[n]):
            earlier = random.Random(f"{n} {i} {draw}").sample(samples[n][:i] + samples[n][i + 1 :], N)
            yield Record(f"{n} {i} {draw}", prompts[n], joined(earlier), output, str(FOLDER)), earlier


def measure_samples() -> dict[str, Any]:
    """By temperature: counts of drafters that are given samples with other noise, on prompts that none has learned
    from, and how far our confidences hold."""
    prompts, end, known = rollouts([unchanged(t) for t in TEMPERATURES], SAMPLES)
    found: dict[str, Any] = {}
    for t in TEMPERATURES:
        given = [*replays_of(prompts, known[unchanged(t)]["samples"], "unseen")]
        peers: dict[int, list[PairResult]] = {factor: [] for factor in FACTORS}
        for (factor, pairs), (record, texts) in itertools.product(peers.items(), given):
            peer = CachedSuffixDecoding(factor, EarlierResponses(texts, DEPTH))
            pairs += replayed(peer, [replace(record, prediction=[])], end, t)
        records = [record for record, _ in given]
        drafters = (
            predictors.PredictedOutputTokenPredictor(config=DrafterConfig(min_survival=p)) for p in FLOORS
        )
        ours = [Counts.of(replayed(each, records, end, t)) for each in drafters]
        tenths = deciles(ours[FLOORS.index(DrafterConfig().min_survival)].by_tenth)
        found[str(t)] = {
            "gpu_align": [each.as_json() for each in ours],
            "suffix decoding": [Counts.of(pairs).as_json() for pairs in peers.values()],
            "confidence": [[d["confidence"], d["accepted"]] for d in tenths if d["drafts"] >= IN_TENTH],
        }
    return {"num_draft_tokens": K, "max_tokens": MAX_NEW, "min_survival": FLOORS, "temperatures": found}


def samples_block(found: dict[str, Any]) -> str:
    """A row a temperature: ours, suffix decoding, and our lead at the rejections of each of its settings."""
    default, rows = found["min_survival"].index(DrafterConfig().min_survival), []
    for t, each in found["temperatures"].items():
        ours, peers = each["gpu_align"], each["suffix decoding"]
        points = sorted((x["rejected"] / x["accepted"], x["output_tokens"] / x["steps"]) for x in ours)
        lines = np.array(points).T
        leads = []
        for x in peers:
            at = float(np.interp(x["rejected"] / x["accepted"], *lines))
            leads.append(f"{at * x['steps'] / x['output_tokens'] - 1:+.1%}")
        gaps = [abs(promised - accepted) for promised, accepted in each["confidence"]]
        off = f"{sum(gaps) / len(gaps):.3f} ({max(gaps):.3f})"
        rows.append([t, *map(tables.at, (ours[default], *peers)), " / ".join(leads), off])
    names = (f"suffix decoding, factor {factor}" for factor in FACTORS)
    heads = (
        "temperature",
        "gpu_align",
        *names,
        "our lead at equal rejections",
        "tenths of confidence off (most)",
    )
    return tables.table(heads, rows)


def measure(cells: Sequence[str]) -> dict[str, Any]:
    """By temperature and change: how much is drawn again, and the counts of drafters replayed on the new samples.

    A coin accepts a draft token as often as a sample with other noise has it: with the model's probability. So the
    counts by the coin are those of earlier samples with other seeds.
    """
    prompts, end, known = rollouts(cells)
    found: dict[str, Any] = {}
    for cell in cells:
        counts, old, t = known[cell], known[unchanged(cell)]["samples"], float(cell.partition(",")[0])
        runs: dict[str, list[PairResult]] = {name: [] for name in ROWS}
        whole, ours = 0, predictors.PredictedOutputTokenPredictor()
        for n, i in itertools.product(range(len(prompts)), range(N)):
            new, same, others = counts["samples"][n][i], old[n][i], old[n][:i] + old[n][i + 1 :]
            whole += new == same
            drafters: Sequence[tuple[Any, list[int]]] = (
                (ours, same),
                (ours, joined([same, *others])),
                (CachedSuffixDecoding(4, EarlierResponses(old[n], DEPTH)), []),
                (ours, joined(others)),
                (CachedSuffixDecoding(4, EarlierResponses(others, DEPTH)), []),
                (ours, []),
            )
            record = Record(f"{n} {i}", prompts[n], joined(old[n]), new, str(FOLDER))
            runs[ROWS[-1]].append(bound(record, K))
            for name, (drafter, given) in zip(ROWS[:-1], drafters, strict=True):
                runs[name] += replayed(drafter, [replace(record, prediction=given)], end, t)
        found[cell] = {
            "tokens": counts["positions"], "agree": counts["agree"], "coin": round(counts["coin"], 2),
            "samples": len(prompts) * N, "whole": whole,
            "runs": {name: Counts.of(each).as_json() for name, each in runs.items()},
        }  # fmt: skip
    return {"num_draft_tokens": K, "max_tokens": MAX_NEW, "cells": found}


def block(found: dict[str, Any]) -> str:
    """A row a temperature and change: tokens drawn again, accepted by a coin, whole samples, drafters, `gain`."""
    rows = []
    for cell, each in found["cells"].items():
        t, change = cell.split(",")
        again = "{:.3f} ({:.2f})".format(*(each[name] / each["tokens"] for name in ("agree", "coin")))
        gains = " / ".join(f"{gain(each['runs'][ROWS[0]], batch):.2f}" for batch in (256, 1024))
        head = f"{t}, {float(change):.1%}", again, f"{each['whole'] / each['samples']:.0%}"
        rows.append([*head, *map(tables.at, each["runs"].values()), gains])
    heads = "temperature, change", "drawn again (coin)", "whole", *ROWS, "batch 256 / 1,024"
    return tables.table(heads, rows)


def gain(counts: dict[str, int], batch: int) -> float:
    """On paper: decode steps of an 8B (bf16, H200) that verify all these drafts, beside those without any."""
    step = Roofline(H200, SMALL, "bf16", 500)
    verified = 1 + (counts["accepted"] + counts["rejected"]) / counts["steps"]
    slower = float(step.ms(batch, batch * verified) / step.ms(batch, batch))
    return counts["output_tokens"] / counts["steps"] / slower


def main() -> None:
    parser = tables.command("benchmarks.real_model.rollouts", __doc__)
    parser.add_argument(
        "--cell", action="append", metavar="T,CHANGE", help="only these, of " + " ".join(CELLS)
    )
    parser.add_argument("--samples", action="store_true", help="instead: earlier samples with other noise")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/vllm.md")
    options = parser.parse_args()
    add_to_path()  # suffix decoding
    name, show = ("samples", samples_block) if options.samples else ("rollouts", block)
    with model.locked():
        found = measure_samples() if options.samples else measure(options.cell or CELLS)
    print(show(found))
    if options.write:
        tables.write_json(tables.RESULTS / f"{name}.json", found, 4)
        tables.fill_file(tables.DOCS / "vllm.md", {name: show}, found)


if __name__ == "__main__":
    main()
