"""Text beside that of the engine without the plugin, whatever is predicted and whatever is asked for: greedy, and
sampled with a seed on V2, where drafts are verified by the draw that is made without them.

engine without plugin    prompts alone ──▶ probes ──▶ cases (a feature, a prompt) ──▶ their answers
engine with plugin, K    case + kind of prediction, made from that answer ──▶ the same answer?

A greedy answer may part from the other's where the likeliest tokens nearly tie, as an engine without the plugin
tells.
`slot_audit` compares the drafter's slots with the requests that hold them, after each step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.campaign.slot_audit import AUDIT
from tests.vllm.engines import BLOCK_SIZE, Request, V2Engine, vllm_version
from tests.vllm.tiny_llama import build_bytes

pytestmark = pytest.mark.vllm

Tokens = list[int]
Answer = dict[str, Any]
#: Ids of the model's vocabulary that are no special tokens.
WORDS = range(4, 700)
MAX_MODEL_LEN = 256
#: A stop token stands about here in the output.
_PLACE = 9
#: `n` > 1 is refused at temperature 0. At the lowest one the likeliest token is drawn, if it leads by this much:
#: the others have a probability of exp(-25) each.
COLD, LEAD = 0.01, 0.25
#: Up to this lead of the likeliest token rounding may change which one is the likeliest.
NEAR_TIE = 1e-4
#: Log probabilities of the same token, by batches of different shapes.
ROUNDING = 1e-3

# --- what is asked for, and what is predicted ---

_SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["xy", "zw"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["ok", "kind", "list"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Probe:
    """A prompt and what the engine without the plugin makes of it.

    leads: by how much each token's log probability exceeds the next one's. sampling: temperature and seed.
    """

    prompt: Tokens
    output: Tokens
    text: str
    leads: list[float]
    sampling: dict[str, Any]

    @property
    def calm(self) -> int:
        """So many tokens lead by `LEAD`, up to the first that does not."""
        return next((i for i, lead in enumerate(self.leads) if lead < LEAD), len(self.leads))


def prompt_of(draw: random.Random) -> Tokens:
    """Short ones, and some that are prefilled in two or three chunks; some repeat themselves."""
    length = draw.choice((5, 20, 33, 60, 100, 150))
    words = [draw.choice(WORDS) for _ in range(length)]
    return words if draw.random() < 0.7 else (words[: length // 3 + 1] * 3)[:length]


def _stop_token(probe: Probe) -> tuple[int, int]:
    """A token of the output and where it comes for the first time."""
    firsts = [i for i, token in enumerate(probe.output) if token not in probe.output[:i]]
    place = min(firsts, key=lambda i: abs(i - _PLACE))
    return probe.output[place], place


def _stop_text(probe: Probe, share: float) -> str:
    """Three characters of the text, most likely of two tokens, about there; whole ones."""
    begin = int(len(probe.text) * share)
    return next(
        (
            probe.text[i : i + 3]
            for i in range(begin, len(probe.text) - 3)
            if "\ufffd" not in probe.text[i : i + 3]
        ),
        "aaa",
    )


def _min_tokens(probe: Probe, beyond: int) -> dict[str, Any]:
    """The stop token comes just before, at or just after `min_tokens`."""
    token, place = _stop_token(probe)
    return {"stop_token_ids": [token], "min_tokens": max(0, place + beyond)}


_JSON = {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False, "max_tokens": 48}
_REGEX = {"structured_outputs": {"regex": "(a[0-9]{1,2}[02468]){6}"}, "ignore_eos": False, "max_tokens": 32}

#: Feature → sampling parameters beside those of `Probe.sampling`.
FEATURES: dict[str, Callable[[Probe], dict[str, Any]]] = {
    "nothing": lambda probe: {},
    "stop string": lambda probe: {"stop": [_stop_text(probe, 0.5)]},
    "two stop strings, kept": lambda probe: {
        "stop": [_stop_text(probe, 0.6), _stop_text(probe, 0.3)],
        "include_stop_str_in_output": True,
    },
    "stop token": lambda probe: {"stop_token_ids": [_stop_token(probe)[0]]},
    "min_tokens before the stop token": lambda probe: _min_tokens(probe, -1),
    "min_tokens beyond the stop token": lambda probe: _min_tokens(probe, 2),
    "min_tokens and a stop string": lambda probe: {"stop": [_stop_text(probe, 0.3)], "min_tokens": 12},
    "logprobs": lambda probe: {"logprobs": 2},
    "prompt_logprobs": lambda probe: {"logprobs": 0, "prompt_logprobs": 1},
    "presence_penalty": lambda probe: {"presence_penalty": 1.7},
    "frequency_penalty": lambda probe: {"frequency_penalty": 1.7},
    "repetition_penalty": lambda probe: {"repetition_penalty": 2.0},
    "all penalties, logprobs": lambda probe: {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logprobs": 1,
    },
    "JSON schema": lambda probe: dict(_JSON),
    "regular expression": lambda probe: dict(_REGEX),
    "n = 2": lambda probe: {"n": 2, "temperature": COLD, "max_tokens": max(1, probe.calm)},
    "min_p": lambda probe: {"min_p": 0.1},
    "logit_bias": lambda probe: {"logit_bias": {probe.output[2]: -100.0, 40: 2.0}},
    "max_tokens 1 to 5": lambda probe: {"max_tokens": 1 + len(probe.prompt) % 5},
    "bad words, allowed tokens": lambda probe: {"allowed_token_ids": list(range(60, 400))},
}


#: More for sampled answers.
SAMPLED: dict[str, Callable[[Probe], dict[str, Any]]] = {
    "n = 2": lambda probe: {"n": 4},
    "top_k": lambda probe: {"top_k": 7},
    "top_p": lambda probe: {"top_p": 0.8},
    "top_k, top_p, all penalties, min_p, logprobs": lambda probe: {
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logprobs": 1,
    },
    "bad words": lambda probe: {"bad_words": ["a", " th", "in"]},
}
TEMPERATURES = 0.5, 1.0, 1.5

#: Those that vLLM refuses on V1 beside any drafter.
ON_V2 = ("min_p", "logit_bias")


def _middle(output: Tokens, draw: random.Random) -> int:
    return draw.randrange(len(output) // 4, max(len(output) // 4 + 1, 3 * len(output) // 4))


def _others(draw: random.Random, count: int) -> Tokens:
    return [draw.choice(WORDS) for _ in range(count)]


def _spliced(gone: int, new: int) -> Callable[[Tokens, Tokens, random.Random], Tokens]:
    """The output with `gone` tokens in the middle replaced by `new` others."""

    def splice(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
        i = _middle(output, draw)
        return output[:i] + _others(draw, new) + output[i + gone :]

    return splice


def _block_moved(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    i = _middle(output, draw)
    rest = output[:i] + output[i + 6 :]
    return rest[: i // 2] + output[i : i + 6] + rest[i // 2 :]


def _out_of_order(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    lines = [output[i : i + 5] for i in range(0, len(output), 5)]
    draw.shuffle(lines)
    return [token for line in lines for token in line]


def _periodic(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    """Begins like the output again and again, and goes on differently each time: many places look right."""
    head = output[:3] or _others(draw, 3)
    return [token for _ in range(40) for token in (*head, draw.choice(WORDS))]


#: Kind of prediction → the prediction, from prompt and the output that will come.
KINDS: dict[str, Callable[[Tokens, Tokens, random.Random], Tokens | None]] = {
    "none": lambda prompt, output, draw: None,
    "empty": lambda prompt, output, draw: [],
    "verbatim": lambda prompt, output, draw: output,
    "verbatim, longer": lambda prompt, output, draw: output + _others(draw, 30),
    "prefix only": lambda prompt, output, draw: output[: len(output) // 2],
    "one token replaced": _spliced(1, 1),
    "one token inserted": _spliced(0, 1),
    "one token deleted": _spliced(1, 0),
    "block deleted": _spliced(6, 0),
    "block inserted": _spliced(0, 12),
    "block moved": _block_moved,
    "unrelated": lambda prompt, output, draw: _others(draw, 60),
    "repeated tokens": lambda prompt, output, draw: output[:1] * 80,
    "prompt copied": lambda prompt, output, draw: prompt,
    "hostile periodic": _periodic,
    "lines out of order": _out_of_order,
    "very long": lambda prompt, output, draw: _others(draw, 100) + output + _others(draw, 2 * MAX_MODEL_LEN),
}


# --- the engines ---

_ROOMY = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 96,
    "max_num_batched_tokens": 1100,
    "enable_prefix_caching": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
#: Prompts of more than 64 tokens are prefilled in chunks, beside the drafts of the others. V2 needs room for 1 +
#: K, to which it pads a request whose prompt is cached but for one token.
_CACHED = {**_ROOMY, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
_WIDE = {**_CACHED, "max_num_batched_tokens": 136}
#: Eight requests want more blocks than there are: some are preempted.
_TIGHT = {**_CACHED, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 10}
#: What is drafted from besides predictions; "defaults": as a server that nobody set up.
MIX = {
    "recipes, earlier answers": {"GPU_ALIGN_RECIPES": "base", "GPU_ALIGN_MEMORY_TOKENS": "2000"},
    "defaults": {"GPU_ALIGN_RECIPES": "base"},
    "predictions alone": {"GPU_ALIGN_RECIPES": "off"},
}


@dataclass(frozen=True)
class Stage:
    """An engine with the plugin, and one without it of the same settings. requests: of it in `make test`."""

    runner: str
    num_draft_tokens: int
    settings: dict[str, Any]
    mix: str = "recipes, earlier answers"
    requests: int = 120
    sampled: bool = False

    @property
    def not_cached(self) -> int:
        """At most so many tokens of an answer's end: before 0.33 vLLM does not cache its last step of drafts."""
        blocks = 0 if vllm_version() >= "0.33" else -(-self.num_draft_tokens // BLOCK_SIZE)
        return BLOCK_SIZE * blocks

    def engine(self, model: Path, directory: Path, *, ours: bool, **changed: Any) -> V2Engine:
        settings = {**self.settings, **changed}
        if ours:
            settings |= {"environment": MIX[self.mix], "after": AUDIT}
        else:
            settings |= {"speculative_config": None, "environment": {"VLLM_PLUGINS": ""}}
            settings.pop("delay_counts", None)
        runner = settings.pop("runner", self.runner)
        return V2Engine(
            model, directory, runner=runner, num_draft_tokens=self.num_draft_tokens if ours else 0, **settings
        )


LATE = {"asynchronous": True, "delay_counts": True}
#: Those of `make test`, and those that `--campaign-count` adds.
STAGES = [
    Stage("V1", 16, _TIGHT),
    Stage("V2", 7, _TIGHT, requests=34),
    Stage("V2", 7, {**_TIGHT, **LATE, "kernels": vllm_version() < "0.33"}, requests=34, sampled=True),
]
MORE_STAGES = [
    *(Stage("V1", k, _ROOMY, mix) for k, mix in zip((1, 64, 128), MIX, strict=True)),
    *(Stage("V1", k, _CACHED, mix) for k, mix in zip((7, 16, 128), MIX, strict=True)),
    Stage("V1", 64, _TIGHT, "defaults"),
    *(Stage("V2", k, _ROOMY, mix, 34) for k, mix in zip((1, 64, 128), MIX, strict=True)),
    *(Stage("V2", k, _WIDE, mix, 34) for k, mix in zip((7, 16, 128), MIX, strict=True)),
    *(Stage("V2", k, {**_WIDE, **LATE}, "defaults", 34) for k in (7, 64)),
    *(Stage("V2", k, {**_WIDE, **LATE}, mix, 34, True) for k, mix in zip((16, 64, 1), MIX, strict=True)),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = MORE_STAGES if metafunc.config.getoption("--campaign-count") > 1 else []
    stages = {
        f"{each.runner}{', sampled' * each.sampled}, K {each.num_draft_tokens}, {n}": each
        for n, each in enumerate([*STAGES, *more])
    }
    metafunc.parametrize("stage", stages.values(), ids=stages)


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


def cases_of(probes: Sequence[Probe], num_tokens: int, stage: Stage) -> list[Case]:
    """Each feature with each prompt; two greedy choices only where one token leads by far."""
    calmest = max(probes, key=lambda probe: probe.calm)
    cases = []
    for feature, params_of in {**FEATURES, **(SAMPLED if stage.sampled else {})}.items():
        if stage.runner == "V1" and feature in ON_V2:
            continue
        for probe in [calmest] if feature == "n = 2" and not stage.sampled else probes:
            params = {**probe.sampling, **params_of(probe)}
            length = int(params.pop("max_tokens", num_tokens))
            cases.append(Case(feature, Request(probe.prompt, None, length, params=params)))
    return cases


def pairs_of(cases: Sequence[Case], count: int, draw: random.Random) -> list[tuple[str, Case]]:
    """So many kinds, each with a case; as many in a row as there are kinds and features are all pairs of these."""
    kinds, features = list(KINDS), list(dict.fromkeys(case.feature for case in cases))
    begin, pairs = draw.randrange(len(kinds) * len(features)), []
    for number in range(begin, begin + count):
        feature = features[number % len(features)]
        case = draw.choice([case for case in cases if case.feature == feature])
        pairs.append((kinds[number % len(kinds)], case))
    return pairs


def asked_of(pairs: Sequence[tuple[str, Case]], draw: random.Random) -> list[Asked]:
    asked = []
    for kind, case in pairs:
        prediction = KINDS[kind](case.request.prompt, case.answer["token_ids"], draw)
        chosen: Any = draw.choice(({}, {}, {"memory": False}, {"recipes": []}))
        salt = draw.choice((None, "one", "other"))
        asked.append(Asked(kind, case, replace(case.request, prediction=prediction, salt=salt, extra=chosen)))
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


@dataclass
class Expected:
    """Answers of the engine without the plugin, and the tokens that its prefix cache found in conversations.

    pairs: kinds of predictions, and what will be asked with them.
    """

    pairs: list[tuple[str, Case]]
    talk: list[tuple[Request, Tokens, tuple[int, int]]]


def without_plugin(stage: Stage, model: Path, directory: Path, count: int, draw: random.Random) -> Expected:
    """Only what will be asked is answered: V2 is slow here."""
    num_tokens = 30 if stage.settings["num_gpu_blocks_override"] == 10 else 20
    with stage.engine(model, directory, ours=False) as engine:
        assert "PredictedOutputs" not in str(engine.facts)
        talk = list(conversations(engine, draw, stage.requests // 3))
        alone = [
            Request(prompt_of(draw), None, num_tokens, params={**sampling_of(stage, draw), "logprobs": 2})
            for _ in range(5)
        ]
        probes = []
        for request, answer in zip(alone, engine.run(alone).answers, strict=True):
            pairs = (list(p.values())[:2] for p in answer["logprobs"])
            leads = [abs(first - second) for first, second in pairs]
            sampling = {key: value for key, value in request.params.items() if key != "logprobs"}
            probes.append(Probe(request.prompt, answer["token_ids"], answer["text"], leads, sampling))
        pairs = pairs_of(cases_of(probes, num_tokens, stage), count, draw)
        cases = list({id(case): case for _, case in pairs}.values())
        run = engine.run(arriving([case.request for case in cases], draw), 600)
        for case, answer in zip(cases, run.answers, strict=True):
            case.answer = answer
    return Expected(pairs, talk)


def sampling_of(stage: Stage, draw: random.Random) -> dict[str, Any]:
    if not stage.sampled:
        return {}
    return {"temperature": draw.choice(TEMPERATURES), "seed": draw.getrandbits(40)}


def looked_up(engine: V2Engine, request: Request) -> tuple[Tokens, tuple[int, int]]:
    """The output of one request alone; tokens that it looked up in the prefix cache, and those found."""
    before = engine.ask("prefix_cache")
    (output,) = engine.run([request]).outputs
    after = engine.ask("prefix_cache")
    return output, (after["queries"] - before["queries"], after["hits"] - before["hits"])


def conversations(
    engine: V2Engine, draw: random.Random, count: int
) -> Iterator[tuple[Request, Tokens, tuple[int, int]]]:
    """One request at a time: prompts share beginnings, and each continues an answer."""
    systems = [[draw.choice(WORDS) for _ in range(length)] for length in (32, 50, 80)]
    prompt: Tokens = []
    for number in range(count):
        if number % 3 == 0:
            prompt = draw.choice(systems) + [draw.choice(WORDS) for _ in range(draw.randrange(1, 20))]
        request = Request(prompt, None, draw.choice((5, 20, 34)))
        output, found = looked_up(engine, request)
        yield request, output, found
        prompt = prompt + output + [draw.choice(WORDS) for _ in range(3)]


def leads_where_they_part(
    stage: Stage, model: Path, directory: Path, parted: Sequence[tuple[Asked, Answer]]
) -> list[float]:
    """By how much the token that was written without the plugin leads, as the sampler sees it, where the first
    tokens differ: by an engine without the plugin whose log probabilities are the sampler's logits."""
    how: dict[str, Any] = {"logprobs_mode": "processed_logits", "asynchronous": False, "runner": "V1"}
    with stage.engine(model, directory, ours=False, **how) as judge:
        return [lead_of(judge, asked, ours) for asked, ours in parted]


def lead_of(judge: V2Engine, asked: Asked, ours: Answer) -> float:
    params, theirs = {**asked.case.request.params, "logprobs": 2}, asked.case.answer
    params.pop("prompt_logprobs", None)
    (answer,) = judge.run([replace(asked.case.request, params=params)]).answers
    pairs = zip(ours["token_ids"], theirs["token_ids"], strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None or answer["token_ids"][:place] != theirs["token_ids"][:place]:
        return float("inf")
    first, second = sorted(answer["logprobs"][place].values(), reverse=True)[:2]
    return float(first - second)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bytes(tmp_path_factory.mktemp("bytes"))


def test_answers_are_those_of_the_engine_without_the_plugin(
    stage: Stage, model: Path, tmp_path: Path, count: Callable[[int], int], rng: random.Random
) -> None:
    """And so is what each request finds in the prefix cache, but for vLLM 0.32's last step; each slot holds its
    request's text alone."""
    requests = max(stage.requests, count(stage.requests) // len(MORE_STAGES))
    expected = without_plugin(stage, model, tmp_path / "without", requests, rng)
    with stage.engine(model, tmp_path / "with", ours=True) as engine:
        assert "PredictedOutputs" in engine.facts["scheduler"]
        for index, (request, output, found) in enumerate(expected.talk):
            prediction = (output, output[::-1], None)[index % 3]
            ours, hits = looked_up(engine, replace(request, prediction=prediction))
            assert (ours, hits[0]) == (output, found[0]), request
            assert 0 <= found[1] - hits[1] <= stage.not_cached, request
        asked = asked_of(expected.pairs, rng)
        run = engine.run([each.request for each in asked], 600)
        audited = engine.ask("audited")
    both = zip(asked, run.answers, strict=True)
    if parted := [(one, ours) for one, ours in both if difference(ours, one.case.answer)]:
        assert not stage.sampled, (difference(parted[0][1], parted[0][0].case.answer), parted[0])
        leads = leads_where_they_part(stage, model, tmp_path / "judge", parted[:5])
        assert max(leads) <= NEAR_TIE, parted[leads.index(max(leads))]
    assert len(parted) <= len(asked) // 20, "many near ties"
    assert run.accepted > len(asked)
    assert stage.settings["num_gpu_blocks_override"] > 10 or run.preemptions
    assert audited["wrong"] == []
    assert audited["slots"] > len(asked)
    if "MEMORY" in str(MIX[stage.mix]):
        assert audited["kinds"]["texts of earlier answers"]
    sources = Counter(source for each in run.answers for source in (each["usage"] or {}).get("by_source", {}))
    assert {"prediction", "context"} <= set(sources)
