"""``gpu-align bench`` against a small server with known counts: figures, order, identity, notes, wrong uses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
from typer.testing import CliRunner

from gpu_align import tools as cli
from gpu_align.tools.bench.measure import MODES, turns
from gpu_align.tools.cli import app
from tests.gpu_align.bench.fake_openai import WASTED, WORDS, Fake


def run(*arguments: object) -> Any:
    return CliRunner().invoke(
        app, ["bench", *map(str, arguments)], env={"OPENAI_API_KEY": None, "COLUMNS": "160"}
    )


def bench(fake: Fake, dataset: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    out = dataset.with_suffix(".json")
    done = run("--base-url", fake.url, "--dataset", dataset, "--json", out, *arguments)
    assert done.exit_code == code, done.output
    return {**json.loads(out.read_text()), "printed": done.stdout}


def by_key(found: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["mode"], run["concurrency"]): run for run in found["runs"]}


def test_figures_are_those_of_the_server(dataset: Path) -> None:
    with Fake() as fake:
        found = bench(fake, dataset, "--concurrency", "1,4", "--rounds", 2, "--requests", 6)
        metrics = fake.counts
        kinds = fake.kinds
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
    assert sum(run["output_tokens"] for run in found["runs"]) < metrics["tokens"]
    assert kinds[:3] == ["none"] * 3
    assert set(kinds[3 : 3 + 24]) == {"none", "prediction", "unrelated"}
    assert found["complete"] is True
    assert found["model"] == "tiny"
    assert found["tokenizer"] == "/models/tiny"
    assert found["servers"] == [
        {
            "modes": list(MODES[:3]),
            "url": fake.url,
            "vllm": "0.32.0",
            "plugin": {"version": "0.1.0", "k": "3"},
        }
    ]
    assert found["settings"]["rounds"] == 2
    assert "Each prediction is the text before the edit" in " ".join(found["notes"])
    for words in ("speed-up", "prediction", "TTFT", "identical", "At 4 at a time: predictions"):
        assert words in found["printed"]


def test_the_modes_of_a_round_follow_each_other_in_changing_order(dataset: Path) -> None:
    order = [(turn.round, turn.concurrency, turn.mode) for turn in turns(("a", "b", "c"), (1, 8), 3)]
    assert len(set(order)) == len(order) == 18
    assert [mode for number, streams, mode in order if streams == 1] == list("abcbcacab")
    assert [streams for _, streams, _ in order] == [1, 1, 1, 8, 8, 8] * 3
    with Fake() as fake:
        bench(fake, dataset, "--concurrency", "1", "--rounds", 2, "--requests", 1)
    assert fake.kinds[-6:] == ["none", "prediction", "unrelated", "prediction", "unrelated", "none"]


def test_faster_steps_are_a_speed_up(dataset: Path) -> None:
    with Fake(pause_s=0.004) as fake:
        run = by_key(bench(fake, dataset, "--concurrency", "1", "--rounds", 2))["prediction", 1]
    assert run["speed_up"]["min"] <= run["speed_up"]["median"] <= run["speed_up"]["max"]
    assert run["speed_up"]["median"] > 1.5  # 4 times fewer steps, each of the same time
    assert run["itl_ms"]["p50"] < run["piece_ms"]["p50"] / 2  # a piece holds K + 1 tokens


@pytest.mark.parametrize(("gap", "verdict"), [(0.1, "near-tie"), (0.4, "no")])
def test_answers_are_compared(dataset: Path, gap: float, verdict: str) -> None:
    with Fake(twist=("W5", gap)) as fake:
        found = bench(fake, dataset, "--concurrency", "2", "--rounds", 1)
        runs = by_key(found)
    assert [runs[mode, 2]["identical"] for mode in MODES[:3]] == ["yes", verdict, verdict]
    assert runs["prediction", 2]["different"] == 4
    assert ("beyond near ties" in found["printed"]) == (verdict == "no")


def test_a_second_server_for_ngram(dataset: Path) -> None:
    with Fake() as fake, Fake(plugin=False, ngram=True) as other:
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 1, "--compare-url", other.url)
        run = by_key(found)["ngram", 1]
    assert (run["output_tokens"], run["steps"], run["accepted"], run["rejected"]) == (93, 47, 46, 47)
    assert found["servers"][1]["modes"] == ["ngram"]


def test_outputs_that_were_not_known_are_predicted_by_the_first_run(dataset: Path) -> None:
    with Fake() as fake:
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 1, "--prediction", "output")
    assert found["predictions"] == {"pairs": 3, "before": 0, "output": 3}
    assert "output of the first run with the edits of its pair" in found["printed"]
    assert by_key(found)["prediction", 1]["accepted"] > 0


def test_what_a_reader_must_know_is_noted(dataset: Path) -> None:
    with Fake(others=5, refuse=WORDS[31]) as fake:
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 1, "--modes", "none")
    notes = " ".join(found["notes"])
    assert "1 of 3 pairs are left out: pair 2" in notes
    assert "the prompt is too long" in notes
    assert "also served others: /metrics counted" in notes


def test_a_server_that_is_not_vllm(dataset: Path) -> None:
    """Usage comes at the end only, and there is no /metrics."""
    with Fake(vllm=False, metrics=False) as fake:
        found = bench(fake, dataset, "--concurrency", 1, "--rounds", 1)
    run = by_key(found)["prediction", 1]
    assert (run["steps"], run["output_tokens"], run["accepted"], run["rejected"]) == (None, 93, 93 - 24, 0)
    assert "no /metrics of vLLM" in " ".join(found["notes"])
    assert fake.salts == [None] * len(fake.salts)


def test_each_request_is_prefilled_anew(dataset: Path) -> None:
    with Fake() as fake:
        bench(fake, dataset, "--concurrency", 2, "--rounds", 1, "--modes", "none")
        assert None not in fake.salts
        assert len(set(fake.salts)) == len(fake.salts)
        fake.salts.clear()
        bench(fake, dataset, "--concurrency", 2, "--rounds", 1, "--modes", "none", "--prefix-cache")
        assert set(fake.salts) == {None}


def test_the_page_holds_all_and_loads_nothing(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with Fake(models=("<b>&",)) as fake:
        found = bench(fake, dataset, "--concurrency", "1,2", "--rounds", 2, "--html", page)
    text = page.read_text()
    assert text.count("<figure>") == 6
    assert text.count('<rect class="m-prediction"') == 2 * 6 + 1  # and the legend
    assert "default-src 'none'" in text
    assert not any(
        word in text for word in ("http://www", "src=", "<script", "<b>", "@import", ">None<", '"prose"')
    )
    assert "<summary>Settings and servers" in text
    assert "&lt;b&gt;&amp;" in text
    assert f"{by_key(found)['prediction', 1]['speed_up']['median']:.2f}×" in text


def test_an_interrupted_run_writes_what_it_has(dataset: Path) -> None:
    with Fake(pause_s=0.005) as fake:

        def interrupt() -> None:
            while len(fake.kinds) < 3 + 6 + 9:  # first run, warm-ups, three turns
                time.sleep(0.01)
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
        done = run("--base-url", fake.url, "--dataset", dataset, "--json", out, "--concurrency", 1)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "pair" in done.stderr
    assert "HTTP 500: engine core died" in done.stderr
    assert [len(run["rounds"]) for run in json.loads(out.read_text())["runs"]] == [1, 1, 1]


def test_the_key_is_sent_and_never_written(dataset: Path, tmp_path: Path) -> None:
    with Fake(key="sesame") as fake:
        page = tmp_path / "page.html"
        found = bench(fake, dataset, "--rounds", 1, "--concurrency", 1, "--api-key", "sesame", "--html", page)
        refused = run("--base-url", fake.url, "--dataset", dataset, "--api-key", "open")
    assert "sesame" not in json.dumps(found) + page.read_text()
    assert refused.exit_code == 1
    assert "HTTP 401: the API key is refused (--api-key or OPENAI_API_KEY)" in refused.stderr


HERE = "http://127.0.0.1:9/v1"
#: arguments → exit code and words of the one line
WRONG: list[tuple[str, int, str]] = [
    ("", 2, "expected --base-url URL or --serve MODEL, found neither"),
    (f"--base-url {HERE} --serve m", 2, "found both"),
    ("--base-url http://localhost:8000", 2, "expected a URL that ends in /v1"),
    ("--base-url localhost/v1", 2, "found 'localhost/v1'"),
    (f"--base-url {HERE}", 1, "no answer"),
    (
        f"--base-url {HERE} --concurrency 0",
        2,
        "--concurrency: expected numbers from 1 to 4096 as in 1,8,32, found '0'",
    ),
    (f"--base-url {HERE} --concurrency 1,x", 2, "found '1,x'"),
    (
        f"--base-url {HERE} --modes none,fast",
        2,
        "expected some of none,prediction,unrelated,ngram, found 'fast'",
    ),
    (f"--base-url {HERE} --modes ,", 2, "--modes: expected some of"),
    (f"--base-url {HERE} --modes ngram", 2, "ngram needs --compare-url"),
    (f"--base-url {HERE} --compare-url {HERE} --modes none", 2, "is for the mode ngram"),
    (f"--base-url {HERE} --compare-url http://x", 2, "--compare-url: expected a URL that ends in /v1"),
    (f"--base-url {HERE} --dataset missing.jsonl", 2, "--dataset: missing.jsonl: No such file"),
    (f"--base-url {HERE} --dataset a --before b", 2, "found --dataset and --before"),
    (f"--base-url {HERE} --after b", 2, "--after: b needs --before"),
    (f"--base-url {HERE} --before b", 2, "--before: b: No such file"),
    (f"--base-url {HERE} --from-git missing HEAD", 2, "--from-git: cannot change to 'missing'"),
    (
        f"--base-url {HERE} --prediction best",
        2,
        "--prediction: expected auto, before or output, found 'best'",
    ),
    (f"--base-url {HERE} --json missing/out.json", 2, "--json: the folder missing does not exist"),
    (f"--base-url {HERE} --json a --html a", 2, "--html: a is also the file of --json"),
    (f"--base-url {HERE} --vllm-args x", 2, "--vllm-args: 'x' is for --serve"),
    (f"--base-url {HERE} --together", 2, "--together is for --serve"),
    (f"--serve m --compare-url {HERE}", 2, "--compare-url: "),
    ('--serve m --vllm-args "\'"', 2, "--vllm-args: No closing quotation"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_wrong_use_is_one_line(arguments: str, code: int, words: str) -> None:
    started = time.monotonic()
    done = run(*shlex.split(arguments))
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - started < 10
    assert isinstance(done.exception, SystemExit)


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
            done = run("--base-url", fake.url, "--dataset", dataset, *more)
            assert done.exit_code in (1, 2), words
            assert words in done.stderr
            assert done.stderr.count("\n") == 1


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("gpu_align.tools.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.setattr(sys, "argv", ["gpu-align", "bench", "--serve", "m"])
    assert cli.main() == 1
    assert capsys.readouterr().err == 'error: gpu-align bench needs httpx: pip install "gpu-align[cli]"\n'
