"""The engines that are started, the requests that each serves, and how two answers are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from v2_harness import Request, Run, V2Engine

from tests.campaign.campaign import Campaign
from tests.campaign.greedy_cases import FEATURES, KINDS, MAX_MODEL_LEN, Probe
from tests.campaign.slot_audit import AUDIT

Answer = dict[str, Any]
#: Up to this lead of the likeliest token rounding may change which one is the likeliest.
NEAR_TIE = 1e-4
#: Log probabilities of the same token, by batches of different shapes.
ROUNDING = 1e-3

_ROOMY = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 96,
    "max_num_batched_tokens": 1100,
    "enable_prefix_caching": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
#: Prompts of more than 64 tokens are prefilled in chunks, beside the drafts of the others.
_CACHED = {**_ROOMY, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
#: Eight requests want more blocks than there are: some are preempted.
_TIGHT = {**_ROOMY, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 10}


@dataclass(frozen=True)
class Stage:
    """Engines with the same settings: one without the plugin, and one for each K.

    per_engine: requests that each engine with the plugin serves.
    """

    name: str
    runner: str
    draft_tokens: Sequence[int]
    settings: dict[str, Any]
    num_probes: int
    per_engine: int
    #: Output tokens, unless a feature says otherwise.
    num_tokens: int = 20

    @property
    def cached(self) -> bool:
        return bool(self.settings["enable_prefix_caching"])

    def engine(
        self, model: Path, directory: Path, num_draft_tokens: int | None, runner: str = "", mix: str = "",
        **changed: Any,
    ) -> V2Engine:  # fmt: skip
        """Use as a context manager. num_draft_tokens: None for the engine without the plugin. mix: of `MIX`."""
        settings = {**self.settings, **changed}
        if num_draft_tokens is None:
            settings |= {"speculative_config": None, "environment": {"VLLM_PLUGINS": ""}}
            settings.pop("delay_counts", None)
        else:
            settings |= {"environment": MIX[mix], "after": AUDIT}
        return V2Engine(
            model, directory / f"{self.name}-{num_draft_tokens}{runner}", runner=runner or self.runner,
            num_draft_tokens=num_draft_tokens or 0, **settings,
        )  # fmt: skip


ALL = (1, 7, 16, 64, 128)
#: What is drafted from besides predictions, engine by engine in turn; "defaults": as a server that nobody set up.
MIX = {
    "recipes, earlier answers": {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"},
    "defaults": {"GPU_ALIGN_RECIPES": "base"},
    "predictions alone": {"GPU_ALIGN_RECIPES": "off"},
}


def stages(c: Campaign) -> list[Stage]:
    # Room for 1 + K: V2 pads a request whose prompt is cached but for one token to so many.
    wide = {**_CACHED, "max_num_batched_tokens": 136}
    late = {**wide, "asynchronous": True, "delay_counts": 1}
    if c.quick:
        both = {**_TIGHT, "enable_prefix_caching": True}
        return [
            Stage("V1-quick", "V1", (16,), both, 5, 120, 30),
            Stage("V2-quick", "V2", (7,), both, 2, 34),
        ]
    pairs, half, fewer = c.count(340, 0), c.count(85, 0), c.count(68, 0)
    return [
        Stage("V1-roomy", "V1", ALL, _ROOMY, 12, pairs),
        Stage("V1-cached", "V1", ALL, _CACHED, 12, pairs),
        Stage("V1-tight", "V1", (7, 64), _TIGHT, 12, pairs, 40),
        Stage("V2-roomy", "V2", ALL, _ROOMY, 6, half),
        Stage("V2-cached", "V2", ALL, wide, 6, fewer),
        Stage("V2-asynchronous", "V2", (7, 64), late, 6, half),
        Stage("V2-tight", "V2", (7,), _TIGHT, 6, half, 40),
    ]


@dataclass
class Case:
    """A prompt and what is asked for; the answer without the plugin, and the one choice or the two of it."""

    feature: str
    request: Request
    answer: Answer = field(default_factory=dict)


class Asked(NamedTuple):
    """One request of an engine with the plugin."""

    kind: str
    case: Case
    request: Request

    def told(self) -> dict[str, Any]:
        return {"feature": self.case.feature, "prediction": self.kind, "request": self.request.as_json()}


def cases_of(probes: Sequence[Probe], num_tokens: int) -> list[Case]:
    """Each feature with each prompt; two choices only where one token leads by far."""
    calmest = max(probes, key=lambda probe: probe.calm)
    cases = []
    for feature, params_of in FEATURES.items():
        for probe in [calmest] if feature == "n = 2" else probes:
            params = params_of(probe)
            length = int(params.pop("max_tokens", num_tokens))
            cases.append(Case(feature, Request(probe.prompt, None, length, params=params)))
    return cases


def asked_of(cases: Sequence[Case], begin: int, count: int, draw: random.Random) -> list[Asked]:
    """`count` pairs of a feature and a kind, from number `begin` on; 340 in a row are all of them."""
    kinds, features = list(KINDS), list(FEATURES)
    asked = []
    for number in range(begin, begin + count):
        kind, feature = kinds[number % len(kinds)], features[number % len(features)]
        case = draw.choice([case for case in cases if case.feature == feature])
        prediction = KINDS[kind](case.request.prompt, case.answer["token_ids"], draw)
        chosen: Any = draw.choice(({}, {}, {"memory": False}, {"recipes": []}))
        salt = draw.choice((None, "one", "other"))
        request = replace(case.request, prediction=prediction, salt=salt, extra=chosen)
        asked.append(Asked(kind, case, request))
    draw.shuffle(asked)
    requests = arriving([a.request for a in asked], draw)
    return [a._replace(request=request) for a, request in zip(asked, requests, strict=True)]


def arriving(requests: Sequence[Request], draw: random.Random) -> list[Request]:
    """At random steps, so that batches of all sizes up to the engine's limit come up. Now and then nobody comes
    until most have left."""
    step, arrived = 0, []
    for index, request in enumerate(requests, 1):
        arrived.append(replace(request, arrives=step))
        step += 40 if index % 48 == 0 else draw.choice((0, 1, 2, 3))
    return arrived


def serve(engine: V2Engine, requests: Sequence[Request]) -> Run:
    return engine.run(requests, seconds=600)


def difference(ours: Answer, theirs: Answer) -> str:
    """What differs: tokens of all choices, text, end, log probabilities. Empty where nothing does."""
    for part in ("all", "text", "end", "stopped_by"):
        if ours.get(part) != theirs.get(part):
            return part
    for part in ("logprobs", "prompt"):
        mine, others = ours.get(part), theirs.get(part)
        if (mine is None) != (others is None) or len(mine or ()) != len(others or ()):
            return part
        if not all(_alike(m, o) for m, o in zip(mine or (), others or (), strict=True)):
            return part
    return ""


def _alike(mine: dict[str, float], others: dict[str, float]) -> bool:
    """Two tokens that are as likely may change places at the end of the list, so values are compared in order."""
    values = zip(sorted(mine.values()), sorted(others.values()), strict=False)
    common = ((mine[token], others[token]) for token in mine.keys() & others.keys())
    return len(mine) == len(others) and all(abs(a - b) < ROUNDING for a, b in (*values, *common))


def lead_where_they_part(judge: V2Engine, asked: Asked, ours: Answer, theirs: Answer) -> float:
    """By how much the token that was written without the plugin leads, as the sampler sees it, where the first
    tokens differ. judge: an engine without the plugin whose log probabilities are the sampler's logits."""
    params = {**asked.case.request.params, "logprobs": 2}
    params.pop("prompt_logprobs", None)
    (answer,) = judge.run([replace(asked.case.request, params=params)]).answers
    pairs = zip(ours["token_ids"], theirs["token_ids"], strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None or answer["token_ids"][:place] != theirs["token_ids"][:place]:
        return float("inf")
    first, second = sorted(answer["logprobs"][place].values(), reverse=True)[:2]
    return float(first - second)
