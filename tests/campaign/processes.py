"""Several processes: two servers on one log directory, engine cores forked or spawned, tensor-parallel ranks."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from request_server import serve
from tiny_llama import build, greedy_by_transformers
from v2_harness import SHORT, Request, V2Engine, edited, prompt_of

from tests.campaign.campaign import Campaign, Row, Tally, main
from tests.campaign.questions import Question, ask, chat, is_whole, text_of

K, NUM_TOKENS = 4, 12
#: Different questions; each is asked many times, of each server.
NUM_QUESTIONS = 24
#: Steps of the V2 runner, which the interpreter runs; the others are of V1.
V2_STEPS = 400
#: The words of this model are none of the recipes.
DRAFTED_FROM = {"GPU_ALIGN_RECIPES": "off", "GPU_ALIGN_MEMORY_TOKENS": "2000"}
SIZES = ("--max-num-seqs", "16", "--max-model-len", "256")
Greedy = Callable[[list[int], int], list[int]]


def run(c: Campaign) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model")
        greedy = greedy_by_transformers(model)
        if not c.quick:
            yield from _servers(c, Path(folder), model, greedy)
        yield _ranks(c, Path(folder), model, greedy)


def _servers(c: Campaign, folder: Path, model: Path, greedy: Greedy) -> Iterator[Row]:
    """One server is started as a user does, which spawns its engine core; the other one forks it."""
    questions = [ask(greedy, prompt_of(c.rng.randrange(10**6)), NUM_TOKENS) for _ in range(NUM_QUESTIONS)]
    logs = folder / "steps"
    answers = c.tally("engine cores forked (V1, V2) and spawned (V1): answers, accepted tokens", 700, 20)
    files = c.tally("two servers on one log directory: a whole log of each request", 600, 20)
    with ExitStack() as stack:
        made = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(3)]
        shared = {"GPU_ALIGN_DEBUG_DIR": str(logs), "GPU_ALIGN_STRICT": "0", **DRAFTED_FROM}
        forked = stack.enter_context(serve(model, made[0], *SIZES, environment=shared, runner="V1"))
        spawned = stack.enter_context(serve(model, made[1], *SIZES, environment=shared))
        answers.check(forked.forks() and not spawned.forks(), case="forked or spawned", count=0)
        with ThreadPoolExecutor(8) as pool:
            while files.goes_on():
                _ask_both(answers, files, pool, questions, (forked.url, spawned.url), logs)
        lines = forked.output.read_text() + spawned.output.read_text()
    _check_lines(answers, lines)
    with (
        serve(model, made[2], *SIZES, environment={**shared, **SHORT}, runner="V2") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        answers.check(server.forks(), case="V2 was not forked", count=0)
        while answers.goes_on():
            got = pool.map(lambda q: chat(server.url, q.predicted(q.token_ids)), questions)
            for question, (status, answer) in zip(questions, got, strict=True):
                _check_answer(answers, question, status, answer)
        lines = server.output.read_text()
    _check_lines(answers, lines)
    yield answers.row("three servers; texts are those of transformers")
    yield files.row(f"same request ids on both, {len(list(logs.iterdir()))} files")


def _ask_both(
    answers: Tally, files: Tally, pool: ThreadPoolExecutor, questions: list[Question], urls: tuple[str, str],
    logs: Path,
) -> None:  # fmt: skip
    """Both servers at once get requests of the same ids; what is asked under an id differs."""
    begun = files.count
    asked = [
        (f"r{begun}-{index}", url, questions[(index + shift) % len(questions)])
        for index in range(len(questions))
        for shift, url in enumerate(urls)
    ]
    got = pool.map(lambda a: chat(a[1], a[2].predicted(a[2].token_ids), a[0]), asked)
    for (_, _, question), (status, answer) in zip(asked, got, strict=True):
        _check_answer(answers, question, status, answer)
    for url in urls:  # a worker hears with its engine's next step that a request has ended
        for _ in range(2):
            chat(url, questions[0].body)
    for http_id in dict.fromkeys(name for name, _, _ in asked):
        texts = [question.text for name, _, question in asked if name == http_id]
        found = sorted(logs.glob(f"chatcmpl-{http_id}-*"))
        whole = [sum(is_whole(path, text) for path in found) for text in texts]
        case = {"id": http_id, "files": [path.name for path in found], "whole": whole}
        files.check(len(found) == len(texts) and whole == [1] * len(texts), case, count=len(texts))


def _check_answer(tally: Tally, question: Question, status: int, answer: dict[str, Any]) -> None:
    case = {"asked": question.body, "expected": question.text, "status": status, "answer": answer}
    usage = answer["usage"]["completion_tokens_details"] if status == 200 else {}
    accepted = usage.get("accepted_prediction_tokens", 0)
    tally.check(text_of(status, answer) == question.text and accepted > 0, case)


def _check_lines(tally: Tally, output: str) -> None:
    """No line of ours from WARNING up, but that a step log is written."""
    lines = [
        line
        for line in output.splitlines()
        if "gpu_align" in line and (" ERROR " in line or " WARNING " in line) and "DEBUG_DIR" not in line
    ]
    tally.check(not lines, case=lines, count=0)


def _ranks(c: Campaign, folder: Path, model: Path, greedy: Greedy) -> Row:
    tally = c.tally("two tensor-parallel ranks: steps with equal drafts", 5_000, 100)
    told: Counter[str] = Counter()
    for runner, steps in (("V2", c.size(V2_STEPS, 20)), ("V1", tally.at_least)):
        directory = Path(tempfile.mkdtemp(dir=folder))
        environment = {"GPU_ALIGN_MAX_PREDICTION_TOKENS": "64", **DRAFTED_FROM}
        with V2Engine(
            model, directory, num_draft_tokens=K, environment=environment, runner=runner,
            before=f"record_drafts({str(directory)!r})", tensor_parallel_size=2,
            distributed_executor_backend="mp",
        ) as engine:  # fmt: skip
            for _ in range(steps):  # if nothing were drafted it would never end
                if told[f"{runner} steps"] >= steps or not tally.goes_on():
                    break
                _serve(c, tally, engine, greedy, told)
                _compare(tally, directory, told, runner)
            tally.check(_have_written_as_much(directory), case=runner, count=0)
            _compare(tally, directory, told, runner)
            tally.check(not engine.warnings(), case=engine.warnings(), count=0)
    return tally.row(", ".join(f"{count:,} {name}" for name, count in told.items()))


def _serve(c: Campaign, tally: Tally, engine: V2Engine, greedy: Greedy, told: Counter[str]) -> None:
    """A batch of requests with predictions of several kinds, which arrive and are aborted at random."""
    n, requests, texts = 40, [], []
    for index in range(8):
        seed = c.rng.randrange(24)  # of few prompts, whose answers are known then
        text = greedy(prompt_of(seed), n)
        edits = [edited(text, 100 * index + version) for version in range(3)]  # the most steps with drafts
        prediction = c.rng.choice([text, *edits, prompt_of(seed + 1, n), text[::-1], None])
        aborted = c.rng.randrange(5, 20) if c.rng.random() < 0.1 else None
        requests.append(Request(prompt_of(seed), prediction, n, arrives=c.rng.randrange(4), aborted=aborted))
        texts.append(text)
    run = engine.run(requests)
    ended = zip(run.outputs, texts, run.answers, strict=True)
    same = all(output == text or answer["end"] == "aborted" for output, text, answer in ended)
    tally.check(same, lambda: {"requests": [r.as_json() for r in requests], "outputs": run.outputs}, count=0)
    told["requests"] += len(requests)


def _drafts_of(directory: Path) -> list[list[str]]:
    """What each rank has written so far, one line a step."""
    texts = [(directory / f"rank-{rank}").read_text() for rank in (0, 1)]
    return [text.rpartition("\n")[0].splitlines() for text in texts]


def _have_written_as_much(directory: Path) -> bool:
    """Whether both ranks have written as many steps, in the end: one may be a step behind the other."""
    for _ in range(100):
        first, second = _drafts_of(directory)
        if len(first) == len(second):
            return True
        time.sleep(0.1)
    return False


def _compare(tally: Tally, directory: Path, told: Counter[str], runner: str) -> None:
    """Compare what both ranks have written and was not compared yet; a step counts where it drafts."""
    first, second = _drafts_of(directory)
    both = list(zip(first, second, strict=False))
    for left, right in both[told[f"{runner} steps in all"] :]:
        if any(any(drafts) for drafts in json.loads(left)[1]):
            told[f"{runner} steps"] += 1
            tally.check(left == right, case={"runner": runner, "rank 0": left, "rank 1": right})
    told[f"{runner} steps in all"] = len(both)


if __name__ == "__main__":
    main(run)
