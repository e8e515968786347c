"""Slots that go from request to request, with canary tokens: nothing of one request is in what another one gets.

Each request's prompt, prediction and output are token ids that no other request has, unless both bring the same
prediction, the other one has answered the same tenant, or both use a pack of recipes. No other token may be in a
draft (its padding included), a step log or its texts. Equal predictions lie in one place of memory exactly where
their tenants are equal. Usage is what a recount says.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_align.step_log import SOURCES, read_step_log
from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.slot_audit import AUDIT
from tests.campaign.slot_turnovers import in_v1

torch.set_num_threads(1)

#: Turnovers of one drafter, before another one takes its place.
ONE_DRAFTER = 200


def in_process(c: Campaign) -> Row:
    tally = c.tally(
        "slot turnovers with canary tokens: nothing foreign in drafts, logs, usage",
        at_least=20_000,
        quick=200,
    )
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as logs:
        while tally.goes_on():
            seed = c.rng.randrange(2**32)
            most = min(tally.at_least - tally.count, c.size(ONE_DRAFTER, 50))
            found += in_v1(seed, tally, most, Path(logs) / str(seed))
    kinds = "preempted", "aborted", "drafts", "logs", "refused", "evicted", "shared"
    sources = ", ".join(f"{found[source]:,} {source}" for source in SOURCES[1:])
    return tally.row(f"{', '.join(f'{found[kind]:,} {kind}' for kind in kinds)}; drafts of {sources}")


def in_v2(c: Campaign, tally: Tally, folder: Path) -> Row:
    """A real engine, whose model may write any token: a draft's tokens are those of the request before it."""
    from tiny_llama import build
    from v2_harness import VOCABULARY, Request, V2Engine, edited

    found: Counter[str] = Counter()
    answered: list[tuple[list[int], list[int]]] = []
    # A KV cache that three long requests overflow, so that they preempt each other; chunked prefills.
    tight = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    how: dict[str, Any] = {
        "num_draft_tokens": 8,
        "asynchronous": True,
        "delay_counts": 1,
        "step_log": True,
        **tight,
    }
    how |= {"after": AUDIT, "environment": {"GPU_ALIGN_MEMORY_TOKENS": "500"}}
    with V2Engine(build(folder / "model"), folder, **how) as engine:
        while tally.goes_on():
            rng = random.Random(c.rng.randrange(2**32))
            requests: list[Any] = []
            for number in range(24):
                prompt, output = rng.choice(answered) if answered else (None, None)
                if prompt is None or rng.random() < 0.2:
                    words = rng.sample(VOCABULARY, 8)
                    prompt, output = rng.choices(words, k=rng.choice([3, 20, 60])), rng.choices(words, k=40)
                prediction = edited(output, number) if rng.random() < 0.85 else None
                if requests and rng.random() < 0.2:
                    prediction = requests[-1].prediction
                aborted = number + rng.randint(1, 12) if rng.random() < 0.2 else None
                salt = rng.choice([None, "one", "other"])
                requests.append(Request(prompt, prediction, rng.choice([8, 30]), number, aborted, salt=salt))
            run = engine.run(requests)
            answered += [
                (r.prompt, out) for r, out in zip(requests, run.outputs, strict=True) if len(out) == 30
            ]
            found["preempted"] += run.preemptions
            found["aborted"] += sum(r.aborted is not None for r in requests)
            logs = {path.stem.rsplit("-", 1)[0]: path for path in engine.steps.glob("*.yaml")}
            for number, (request, answer) in enumerate(zip(requests, run.answers, strict=True)):
                wrong = audit_v2(request, answer, logs.pop(str(number), None), run.of(number), found)
                tally.check(not wrong, {"request": request.as_json(), "answer": answer, "wrong": wrong})
            tally.check(not logs, {"logs of others": list(logs)}, count=0)
            left = {k: v for k, v in engine.state().items() if v}
            audited = engine.audited()
            case = {"left of requests that have ended": left, "wrong": audited["wrong"]}
            tally.check(not left and not audited["wrong"], case, count=0)
            found.update(audited["kinds"])
    counts = ("preempted", "aborted", "logs", "drafts", "texts of earlier answers")
    return tally.row(", ".join(f"{found[name]:,} {name}" for name in counts))


def audit_v2(request: Any, answer: Any, path: Path | None, steps: Any, found: Counter[str]) -> str:
    """What is wrong with the log and the usage of a request of a real engine, if it was drafted for."""
    if path is None:
        return "" if request.aborted is not None else "no log"
    log = read_step_log(path)
    path.unlink()
    found["logs"] += 1
    known = {*request.prompt, *(request.prediction or ())}
    output: list[int] = []
    for step in log.steps:
        found["drafts"] += bool(step.proposed)
        foreign = set(step.proposed) - known - set(output)
        if foreign and request.prediction is not None:  # else `slot_audit` knows which answers it was given
            return f"foreign tokens {sorted(foreign)} in a draft"
        output += step.new
    if request.aborted is not None:
        return ""
    given = log.prediction_tokens if request.prediction is None else len(request.prediction)
    if output != answer["token_ids"] or log.prediction_tokens != given:
        return "its log is of another request"
    if sum(sampled for _, _, sampled in steps) < len(output):
        return "its log has more tokens than its steps"
    usage, logged = answer["usage"], log.usage()
    return "" if usage == logged else f"its log counts {logged}, its usage {usage}"


def run(c: Campaign) -> Iterator[Row]:
    yield in_process(c)
    what = "the same through a V2 engine"
    if c.quick:  # an engine takes longer to start than all of the above
        yield c.not_run(what, 200, "on small counts")
        return
    try:
        import vllm  # noqa: F401
    except ImportError:
        yield c.not_run(what, 200, "no vLLM")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield in_v2(c, c.tally(what, at_least=200, quick=0), Path(folder))


if __name__ == "__main__":
    main(run)
