"""Greedy text beside that of the engine without the plugin, whatever is predicted and whatever is asked for.

stage:  engine without plugin   prompts alone ──▶ probes ──▶ cases (a feature, a prompt) ──▶ their answers
        engine with plugin, K   case + kind of prediction, made from that answer ──▶ the same answer?
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_llama import build_bytes
from v2_harness import Request, Run, V2Engine

from tests.campaign.campaign import Campaign, Row, main
from tests.campaign.greedy_cases import WORDS, Probe, prompt_of
from tests.campaign.greedy_stages import (
    MIX,
    NEAR_TIE,
    Asked,
    Case,
    Stage,
    arriving,
    asked_of,
    cases_of,
    difference,
    lead_where_they_part,
    serve,
    stages,
)

#: Differences of one engine that are looked into.
_MOST_JUDGED = 5
#: What was looked up in the prefix cache by one request, and what was found.
Lookup = tuple[int, int]


class Runner:
    """The rows of one model runner."""

    def __init__(self, c: Campaign, name: str, *at_least: tuple[int, int]) -> None:
        """at_least: requests, preemptions, look-ups, slots, of a whole run and a quick one."""
        whats = (
            "greedy text equals the engine's without plugin", "preemptions met while the text stayed the same",
            "prefix-cache hits of a request with the plugin against without",
            "slots while they draft: prompt length, text and its kind, whose it is",
        )  # fmt: skip
        self.texts, self.preempted, self.lookups, self.slots = (
            c.tally(f"{what}, {name}", *sizes) for what, sizes in zip(whats, at_least, strict=True)
        )
        self.kinds: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.draft_tokens: set[int] = set()
        self.engines = self.accepted = self.near_ties = self.without = 0
        self.queries = self.hits = 0
        self.sources: Counter[str] = Counter()
        self.audited: Counter[str] = Counter()

    def rows(self) -> Iterator[Row]:
        ks = ", ".join(map(str, sorted(self.draft_tokens)))
        yield self.texts.row(
            f"K {ks}; engines: {self.engines}; {len(self.kinds)} kinds of predictions, {len(self.features)} "
            f"features; {self.accepted:,} drafts accepted, of {_told(self.sources)}; {self.near_ties} near ties"
        )
        yield self.preempted.row(f"{self.without:,} in the engines without plugin")
        share = self.hits / max(1, self.queries)
        yield self.lookups.row(f"{self.hits:,} of {self.queries:,} tokens found with it ({share:.0%})")
        self.slots.check(bool(self.audited["texts of earlier answers"]), "no earlier answers", count=0)
        yield self.slots.row(_told(self.audited))


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


class StageRun:
    """One stage: what the engine without the plugin answers, then each engine with it."""

    def __init__(self, stage: Stage, runner: Runner, model: Path, directory: Path, seed: int) -> None:
        self.stage, self.runner, self.model, self.directory = stage, runner, model, directory
        self.draw = random.Random(f"{stage.name} {seed}")
        self.cases: list[Case] = []
        self.talk: list[Request] = []
        self.said: list[list[int]] = []
        self.expected: list[Lookup] = []

    def without_plugin(self) -> None:
        stage, draw = self.stage, self.draw
        with self.stage.engine(self.model, self.directory, None) as engine:
            if "PredictedOutputs" in str(engine.facts):
                raise RuntimeError(f"the plugin is on in {engine.facts}")
            if stage.cached:
                self._talk(engine)
            alone = [
                Request(prompt_of(draw), None, stage.num_tokens, params={"logprobs": 2})
                for _ in range(stage.num_probes)
            ]
            probes = []
            for request, answer in zip(alone, serve(engine, alone).answers, strict=True):
                pairs = (list(p.values())[:2] for p in answer["logprobs"])
                leads = [abs(first - second) for first, second in pairs]
                probes.append(Probe(request.prompt, answer["token_ids"], answer["text"], leads))
            self.cases = cases_of(probes, stage.num_tokens)
            run = serve(engine, arriving([case.request for case in self.cases], draw))
            for case, answer in zip(self.cases, run.answers, strict=True):
                case.answer = answer
            self.runner.without += run.preemptions

    def with_plugin(self, number: int, num_draft_tokens: int) -> None:
        runner, stage = self.runner, self.stage
        mix = list(MIX)[number % len(MIX)]
        with stage.engine(self.model, self.directory, num_draft_tokens, mix=mix) as engine:
            if "PredictedOutputs" not in engine.facts["scheduler"]:
                raise RuntimeError(f"the plugin is off in {engine.facts}")
            if stage.cached:
                self._compare_lookups(engine, num_draft_tokens)
            asked = asked_of(self.cases, number * stage.per_engine, stage.per_engine, self.draw)
            run = serve(engine, [a.request for a in asked])
            parted = self._compare(asked, run, engine, num_draft_tokens)
            audited = engine.audited()
            case = {"stage": stage.name, "mix": mix, "wrong": audited["wrong"], "log": engine.warnings()[:9]}
            runner.slots.check(not audited["wrong"], case, audited["slots"])
            runner.audited.update(audited["kinds"])
        for answer in run.answers:
            by_source = (answer["usage"] or {}).get("by_source", {})
            runner.sources.update({source: each["accepted"] for source, each in by_source.items()})
        runner.engines += 1
        runner.accepted += run.accepted
        runner.draft_tokens.add(num_draft_tokens)
        runner.preempted.check(not (run.preemptions and parted), {"stage": stage.name}, run.preemptions)

    def _compare(self, asked: Sequence[Asked], run: Run, engine: V2Engine, k: int) -> int:
        """How many answers differ."""
        tally = self.runner.texts
        told = {"stage": self.stage.name, "K": k, "settings": self.stage.settings}
        tally.check(run.accepted > len(asked), {**told, "accepted": run.accepted}, count=0)
        parted: list[tuple[Asked, dict[str, Any]]] = []
        for one, ours in zip(asked, run.answers, strict=True):
            self.runner.kinds[one.kind] += 1
            self.runner.features[one.case.feature] += 1
            if differs := difference(ours, one.case.answer):
                parted.append((one, {"differs": differs, "ours": ours, "theirs": one.case.answer}))
            else:
                tally.check(True)
        self._look_into(parted[:_MOST_JUDGED], engine)
        near = [found for _, found in parted if found.get("lead", 1.0) <= NEAR_TIE]
        for one, found in parted:
            tally.check(found in near, {**told, **one.told(), **found})
        self.runner.near_ties += len(near)
        return len(parted) - len(near)

    def _look_into(self, parted: Sequence[tuple[Asked, dict[str, Any]]], engine: V2Engine) -> None:
        """Whether each differs without others beside it, too, and by how much the likeliest token led."""
        if not parted:
            return
        for one, found in parted:
            (again,) = serve(engine, [replace(one.request, arrives=0)]).answers
            found["differs, alone"] = difference(again, one.case.answer)
        how: dict[str, Any] = {"logprobs_mode": "processed_logits", "asynchronous": False}
        with self.stage.engine(self.model, self.directory, None, "V1", **how) as judge:
            for one, found in parted:
                found["lead"] = lead_where_they_part(judge, one, found["ours"], one.case.answer)

    def _talk(self, engine: V2Engine) -> None:
        """Conversations, one request at a time: prompts share beginnings, and each continues an answer."""
        draw = self.draw
        systems = [[draw.choice(WORDS) for _ in range(length)] for length in (32, 50, 80)]
        count = self.stage.per_engine // 3
        while len(self.talk) < count:
            prompt = draw.choice(systems) + [draw.choice(WORDS) for _ in range(draw.randrange(1, 20))]
            for _ in range(draw.choice((1, 2, 3))):
                request = Request(prompt, None, draw.choice((5, 20, 34)))
                before = engine.prefix_cache()
                (output,) = serve(engine, [request]).outputs
                self.talk.append(request)
                self.said.append(output)
                self.expected.append(_since(before, engine.prefix_cache()))
                prompt = prompt + output + [draw.choice(WORDS) for _ in range(3)]

    def _compare_lookups(self, engine: V2Engine, k: int) -> None:
        """Every third answer is predicted well, every third badly, the others not at all."""
        for index, (request, expected) in enumerate(zip(self.talk, self.expected, strict=True)):
            output = self.said[index]
            prediction = (output, output[::-1], None)[index % 3]
            before = engine.prefix_cache()
            run = serve(engine, [replace(request, prediction=prediction)])
            found = _since(before, engine.prefix_cache())
            self.runner.queries += found[0]
            self.runner.hits += found[1]
            self.runner.lookups.check(
                found == expected and run.outputs == [output],
                {"stage": self.stage.name, "K": k, "number": index, "ours": found, "theirs": expected},
            )


def _since(before: dict[str, int], after: dict[str, int]) -> Lookup:
    return after["queries"] - before["queries"], after["hits"] - before["hits"]


def run_stage(stage: Stage, runner: Runner, model: Path, directory: Path, seed: int) -> None:
    """An engine that ends costs its own requests, and counts as a failure."""
    run = StageRun(stage, runner, model, directory, seed)
    try:
        run.without_plugin()
        for number, k in enumerate(stage.draft_tokens):
            print(f"  {stage.name}, K {k}: {runner.texts.count:,} so far", file=sys.stderr, flush=True)
            try:
                run.with_plugin(number, k)
            except RuntimeError as error:
                _ended(runner, stage, k, error)
    except RuntimeError as error:
        _ended(runner, stage, None, error)


def _ended(runner: Runner, stage: Stage, k: int | None, error: RuntimeError) -> None:
    runner.texts.check(False, {"stage": stage.name, "K": k, "error": str(error)[-4000:]}, count=0)


def run(c: Campaign) -> Iterator[Row]:
    sizes = {
        "V1": ((2400, 100), (100, 5), (300, 20), (20_000, 300)),
        "V2": ((600, 30), (20, 1), (100, 10), (5_000, 100)),
    }
    with tempfile.TemporaryDirectory(prefix="greedy-") as made:
        directory = Path(made)
        model = build_bytes(directory / "model")
        for name, at_least in sizes.items():
            runner = Runner(c, name, *at_least)
            for stage in stages(c):
                if stage.runner == name:
                    run_stage(stage, runner, model, directory, c.seed)
            yield from runner.rows()


if __name__ == "__main__":
    main(run)
