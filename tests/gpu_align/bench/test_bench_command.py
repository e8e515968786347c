"""``gpu-align bench`` against a small server with known counts: figures, order, identity, notes, wrong uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
from typer.testing import CliRunner

from gpu_align.tools.bench import measure, page
from gpu_align.tools.bench.client import Answer, Client
from gpu_align.tools.bench.measure import MODES, BenchSettings, Pace, fitted, is_loop, planned_s, turns
from gpu_align.tools.cli import app
from tests.gpu_align.bench.fake_openai import PAIRS, WASTED, WORDS, Fake, wait_until


def run(*arguments: object) -> Any:
    return CliRunner().invoke(
        app, ["bench", *map(str, arguments)], env={"OPENAI_API_KEY": None, "COLUMNS": "160"}
    )


def bench(fake: Fake, dataset: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    out = dataset.with_suffix(".json")
    done = run("--base-url", fake.url, dataset, "--json", out, *arguments)
    assert done.exit_code == code, done.output
    return {**json.loads(out.read_text()), "printed": done.stdout}


def by_key(found: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["mode"], run["concurrency"]): run for run in found["runs"]}


def test_figures_are_those_of_the_server(dataset: Path) -> None:
    with Fake() as fake:
        found = bench(fake, dataset, "--concurrency", "1,4", "--rounds", 2, "--requests", 6)
    runs = by_key(found)
    assert list(runs) == [(mode, streams) for streams in (1, 4) for mode in MODES[:3]]
    tokens = 2 * 2 * (30 + 31 + 32)  # each pair twice in each of two rounds
    for (mode, _), run in runs.items():
        steps = 2 * 2 * (8 + 8 + 8) if mode == "prediction" else tokens
        rejected = WASTED * tokens if mode == "unrelated" else 0
        assert (run["requests"], run["output_tokens"], run["steps"]) == (12, tokens, steps)
        assert (run["accepted"], run["rejected"]) == (tokens - steps, rejected)
        assert run["identical"] == "yes"
        assert list(run["ttft_ms"]) == list(run["itl_ms"]) == ["p50", "p90", "p99"]
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p90"] <= run["ttft_ms"]["p99"]
        seconds = sum(turn["seconds"] for turn in run["rounds"])
        assert run["tokens_per_s"] == pytest.approx(tokens / seconds, rel=0.01)
        assert (run["speed_up"] is None) == (mode == "none")
    assert runs["prediction", 1]["by_source"] == {"prediction": {"accepted": tokens - 96, "rejected": 0}}
    # What /metrics counted besides is the first run and the warm-ups, which are not in the figures.
    assert sum(run["output_tokens"] for run in found["runs"]) < fake.counts["tokens"]
    assert fake.kinds[:3] == ["none"] * 3
    assert set(fake.kinds[3 : 3 + 24]) == {"none", "prediction", "unrelated"}
    server = {"modes": list(MODES[:3]), "url": fake.url, "vllm": "0.32.0"}
    assert found["servers"] == [{**server, "plugin": {"version": "0.1.0", "k": "3"}}]
    assert (found["complete"], found["model"], found["tokenizer"]) == (True, "tiny", "/models/tiny")
    assert found["settings"] == {
        "concurrency": [1, 4], "modes": list(MODES[:3]), "rounds": 2, "max_tokens": 1024, "requests": 6,
        "prediction": "auto", "tie_margin": 0.25, "timeout_s": 600, "fresh_prefix": True,
    }  # fmt: skip
    assert "Each prediction is the text before the edit" in " ".join(found["notes"])
    for words in ("speed-up", "prediction", "TTFT", "identical", "At 4 at a time: predictions"):
        assert words in found["printed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("a" * 59, False),
        ("a" * 60, True),
        ("The end. " + "-" * 80, True),
        ("She said that again. " * 3, True),
        ("She said that again. " * 2, False),
        ("She said that again. " * 3 + "Then she left.", False),
        ("".join(f"| row {number} | 10 |\n" for number in range(9)), False),
    ],
)
def test_a_text_that_ends_in_a_loop_is_one(text: str, expected: bool) -> None:
    assert is_loop(text) is expected


def test_answers_that_end_in_a_loop_are_told(tmp_path: Path) -> None:
    dataset = tmp_path / "pairs.jsonl"
    loop = {"id": "loop", "instruction": "edit", "before": "on and on " * 20, "after": "x"}
    dataset.write_text("".join(json.dumps(pair) + "\n" for pair in (*PAIRS, loop)))
    with Fake() as fake:
        found = bench(fake, dataset, "--concurrency", "1", "--rounds", 1, "--modes", "none")
    assert "1 of 4 answers end in a loop, the first that of loop: " in " ".join(found["notes"])


def test_the_modes_of_a_round_follow_each_other_in_changing_order(dataset: Path) -> None:
    order = [(turn.round, turn.concurrency, turn.mode) for turn in turns(("a", "b", "c"), (1, 8), 3)]
    assert len(set(order)) == len(order) == 18
    assert [mode for number, streams, mode in order if streams == 1] == list("abcbcacab")
    assert [mode for number, streams, mode in order if streams == 8] == list("bcacababc")
    assert [streams for _, streams, _ in order] == [1, 1, 1, 8, 8, 8] * 3
    with Fake() as fake:
        bench(fake, dataset, "--concurrency", "1", "--rounds", 2, "--requests", 1)
    assert fake.kinds[-6:] == ["none", "prediction", "unrelated", "prediction", "unrelated", "none"]


def test_faster_steps_are_a_speed_up(dataset: Path) -> None:
    with Fake(pause_s=0.004) as fake:
        run = by_key(bench(fake, dataset, "--concurrency", "1", "--rounds", 1))["prediction", 1]
    assert run["speed_up"]["min"] <= run["speed_up"]["median"] <= run["speed_up"]["max"]
    assert run["speed_up"]["median"] > 1.5  # 4 times fewer steps, each of the same time
    assert run["itl_ms"]["p50"] < run["piece_ms"]["p50"] / 2  # a piece holds K + 1 tokens


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (1.1, 1.3, "1.20× (1.10–1.30)"),
        (1.0, 1.3, "1.20× (no difference beyond the spread)"),
        (0.8, 1.0, "1.20× (no difference beyond the spread)"),
        (0.8, 0.9, "1.20× (0.80–0.90)"),
    ],
)
def test_a_ratio_is_a_difference_beyond_its_spread(least: float, most: float, words: str) -> None:
    speed_up = {"median": 1.2, "min": least, "max": most}
    run = {"mode": "ngram", "concurrency": 8, "speed_up": speed_up, "identical": "yes"}
    assert page.verdict([run], {}) == [f"At 8 at a time: n-gram drafts {words}."]


def test_modes_that_send_no_prediction(dataset: Path) -> None:
    """Own context, conversation, and the same plain requests on two servers, in turn."""
    modes = "none,context,conversation,plain"
    with Fake() as fake, Fake(plugin=False) as other:
        found = bench(
            fake, dataset, "--modes", modes, "--compare-url", other.url, "--rounds", 1, "--concurrency", 1
        )
    assert list(by_key(found)) == [(mode, 1) for mode in modes.split(",")]
    assert [server["modes"] for server in found["servers"]] == [
        ["none", "context", "conversation"],
        ["plain"],
    ]
    asked = [{"gpu_align": "on"}, {"conversation": True}]
    assert [xargs for xargs in fake.xargs if xargs][-6:] == [asked[0]] * 3 + [asked[1]] * 3
    assert {None} == set(other.xargs)
    assert len(other.xargs) > 3


@pytest.mark.parametrize("burst", [1, 10])
def test_pieces_in_bursts_are_told(dataset: Path, burst: int) -> None:
    with Fake(pause_s=0.01 * burst, burst=burst) as fake:
        found = bench(fake, dataset, "--modes", "none", "--rounds", 1, "--concurrency", 1)
    assert any("come in bursts" in note for note in found["notes"]) == (burst > 1)


#: What the server does, options; then of the run with predictions, and words that are printed, or not (!).
ROUNDS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "a near tie": (
        {"twist": ("W5", 0.1)}, "", {"identical": "near-tie", "different": 4}, "!beyond near ties"
    ),
    "a difference": ({"twist": ("W5", 0.4)}, "", {"identical": "no", "different": 4}, "beyond near ties"),
    "outputs that were not known": (
        {}, "--prediction output", {"identical": "yes", "accepted": 91},
        "output of the first run with the edits of its pair",
    ),
    "other clients": ({"others": 5}, "", {"output_tokens": 123}, "also served others: /metrics counted"),
    "a pair that is refused": (
        {"refuse": WORDS[31]}, "", {"output_tokens": 122}, "1 of 3 pairs are left out: pair 2"
    ),
    "not vLLM": (  # usage comes at the end only
        {"vllm": False, "metrics": False}, "", {"steps": None, "accepted": 91, "rejected": 0},
        "no /metrics of vLLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_one_round(dataset: Path, name: str) -> None:
    does, options, expected, words = ROUNDS[name]
    with Fake(**does) as fake:
        found = bench(fake, dataset, "--concurrency", 2, "--rounds", 1, *options.split())
    run = by_key(found)["prediction", 2]
    assert {key: run[key] for key in expected} == expected
    assert by_key(found)["none", 2]["identical"] == "yes"
    assert (words.removeprefix("!") in found["printed"]) == (words[0] != "!")
    # Each request is prefilled anew, where the server knows how.
    assert len({*fake.salts} - {None}) == (len(fake.salts) if fake.vllm else 0)


def test_a_second_server_for_ngram(dataset: Path) -> None:
    with Fake() as fake, Fake(plugin=False, ngram=True) as other:
        compare = ("--compare-url", other.url, "--prefix-cache")
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 1, *compare)
    run = by_key(found)["ngram", 1]
    assert (run["output_tokens"], run["steps"], run["accepted"], run["rejected"]) == (93, 47, 46, 47)
    assert found["servers"][1]["modes"] == ["ngram"]
    assert {*fake.salts} == {None}


def test_tokens_that_are_counted_at_the_end_are_spread_over_the_pieces() -> None:
    async def answer(fake: Fake) -> Answer:
        client = Client(fake.url, None, 9.0)
        async with contextlib.aclosing(client):
            await client.choose_model(None)
            text = PAIRS[0]["before"]
            return await client.stream([{"role": "user", "content": f"edit\n\n{text}"}], 99, text)

    for vllm, tokens in ((False, [1, 4, 4, 4, 4, 4, 4, 5]), (True, [4] * 7 + [2])):
        with Fake(vllm=vllm) as fake:
            found = asyncio.run(answer(fake))
        assert ([tokens for _, tokens in found.pieces], found.output_tokens) == (tokens, 30)
        assert len(found.token_gaps_s()) == 29
        assert found.text.split() == WORDS[:30]
        assert (found.accepted, found.rejected) == (22, 0)


def test_the_page_holds_all_and_loads_nothing(dataset: Path, tmp_path: Path) -> None:
    written = tmp_path / "page.html"
    with Fake(models=("<b>&",), key="sesame") as fake:
        options = ("--concurrency", "1,2", "--rounds", 1, "--html", written, "--api-key", "sesame")
        found = bench(fake, dataset, *options)
        refused = run("--base-url", fake.url, dataset, "--api-key", "open")
    text = written.read_text()
    assert text.count("<figure>") == 6
    assert text.count('<rect class="m-prediction"') == 2 * 6
    assert "default-src 'none'" in text
    absent = ("http://www", "src=", "<script", "<b>", "@import", ">None<", '"prose"', "sesame")
    assert [word for word in absent if word in text] == []
    assert "<summary>Settings and servers" in text
    assert "&lt;b&gt;&amp;" in text
    assert f"{by_key(found)['prediction', 1]['speed_up']['median']:.2f}×" in text
    assert "sesame" not in json.dumps(found)
    assert refused.exit_code == 1
    assert "HTTP 401: the API key is refused (--api-key or OPENAI_API_KEY)" in refused.stderr


def test_an_interrupted_run_writes_what_it_has(dataset: Path) -> None:
    with Fake(pause_s=0.005) as fake:

        def interrupt() -> None:
            wait_until(lambda: len(fake.kinds) >= 3 + 6 + 9)  # first run, warm-ups, three turns
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 9, code=130)
        thread.join()
    assert found["complete"] is False
    assert 2 <= sum(len(run["rounds"]) for run in found["runs"]) < 9
    assert found["runs"][0]["output_tokens"] == 93 * len(found["runs"][0]["rounds"])


def test_a_server_that_fails_ends_the_run_and_keeps_what_was_measured(dataset: Path) -> None:
    with Fake(die_after=3 + 6 + 9) as fake:
        out = dataset.with_suffix(".json")
        done = run("--base-url", fake.url, dataset, "--json", out, "--concurrency", 1)
    assert done.exit_code == 1
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["plan:", "plan:", "error:"]
    assert "pair" in done.stderr
    assert "HTTP 500: engine core died" in done.stderr
    assert [len(run["rounds"]) for run in json.loads(out.read_text())["runs"]] == [1, 1, 1]


def test_a_server_that_cannot_do_it_is_refused_before_the_run(dataset: Path) -> None:
    with Fake(plugin=False, models=("a", "b")) as plain, Fake(models=("a",)) as ours:
        cases = {
            "serves a, b: name one": (plain, ()),
            "serves a, b, not 'c'": (plain, ("--model", "c")),
            "prediction needs a server that drafts from predictions": (plain, ("--model", "a")),
            "expected a server with vLLM's n-gram drafts, found the gpu-align plugin": (
                ours,
                ("--compare-url", ours.url),
            ),
            "found no draft tokens": (ours, ("--compare-url", plain.url)),
            "no OpenAI-compatible server": (
                Fake(port=ours.port),
                ("--base-url", f"http://127.0.0.1:{ours.port}/x/v1"),
            ),
        }
        for words, (fake, more) in cases.items():
            done = run("--base-url", fake.url, dataset, *more)
            assert done.exit_code in (1, 2), words
            assert words in done.stderr
            assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("requests", [0, 40])
@pytest.mark.parametrize("rate", [1e9, 500.0, 50.0, 1.0])
def test_what_nobody_asked_for_is_fitted_to_ten_minutes(rate: float, requests: int) -> None:
    """The highest concurrencies go first, then requests that nobody asked for; one of each mode is left."""
    asked = BenchSettings(concurrency=(1, 8, 32), modes=MODES[:3], rounds=3, requests=requests, max_tokens=9)
    pace = Pace(tokens=200.0, rate=rate, streams=8)
    settings = fitted(asked, 16, pace)
    assert settings.concurrency == asked.concurrency[: len(settings.concurrency)]
    seconds = planned_s(settings, 16, pace)
    assert seconds <= measure.MOST_S or settings.concurrency == (1,)
    assert settings.requests == requests or (seconds <= measure.MOST_S or settings.requests == 1)
    more = len(settings.concurrency) + 1
    wider = BenchSettings(**{**vars(asked), "concurrency": asked.concurrency[:more]})
    assert settings == asked or requests or settings.requests or planned_s(wider, 16, pace) > measure.MOST_S


def test_without_options_the_plan_fits_the_server(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most as many streams as it runs requests at once; told before the first request, and by its pace."""
    monkeypatch.setattr(measure, "MOST_S", 1e9)
    with Fake(max_num_seqs=4) as fake:
        found = bench(fake, dataset, "--rounds", 1)
        done = run("--base-url", fake.url, dataset, "--rounds", 1)
    assert sorted({streams for _, streams in by_key(found)}) == [1, 4]
    assert found["settings"]["concurrency"] == [1, 4]
    assert found["servers"][0]["plugin"]["drafter"] == "mtp, 3 tokens"
    assert any("(mtp, 3 tokens): there `none` is not without drafts" in note for note in found["notes"])
    first, second = (line for line in done.stderr.splitlines() if line.startswith("plan:"))
    assert re.fullmatch(r"plan: \d+ requests, 1, 4 at a time, at most [\d,]+ tokens", first)
    assert re.search(
        r"about [\d,]+ tokens, at [\d,]+ a second in the first run: at most \d+ (s|min)$", second
    )
