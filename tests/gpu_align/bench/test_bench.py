"""``gpu-align bench``: figures of a small server with known counts, its parts, and servers that it starts."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from gpu_align.tools.bench import measure, servers
from gpu_align.tools.bench.client import Counts
from gpu_align.tools.bench.data import Pair, edited, make_predictions, read_pairs, resemblance, shipped_pairs
from gpu_align.tools.bench.measure import ASKED_FOR, MODES, turns
from gpu_align.tools.inputs import EditError
from tests.gpu_align.bench import fake_openai
from tests.gpu_align.bench.fake_openai import PAIRS, WASTED, WORDS, Fake, alive, wait_until
from tests.modules import command


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A file of pairs."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return path


def run(*arguments: object) -> Any:
    return command("bench", *arguments, env={"OPENAI_API_KEY": None, "COLUMNS": "160"})


def bench(fake: Fake, dataset: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    out = dataset.with_suffix(".json")
    done = run("--base-url", fake.url, dataset, "--json", out, *arguments)
    assert done.exit_code == code, done.output
    return {**json.loads(out.read_text()), "printed": done.stdout, "told": done.stderr}


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
    assert runs["unrelated", 1]["by_source"] == {"context": {"accepted": 0, "rejected": WASTED * tokens}}
    # What /metrics counted besides is the first run and the warm-ups, which are not in the figures.
    assert sum(run["output_tokens"] for run in found["runs"]) < fake.counts["tokens"]
    assert [body for body in fake.bodies[:3] if "prediction" in body] == []
    server = {"modes": list(MODES[:3]), "url": fake.url, "vllm": "0.32.0"}
    assert found["servers"] == [{**server, "plugin": {"version": "0.1.0", "k": "3"}}]
    assert (found["complete"], found["model"], found["tokenizer"]) == (True, "tiny", "/models/tiny")
    assert found["settings"] == {
        "concurrency": [1, 4], "modes": list(MODES[:3]), "rounds": 2, "max_tokens": 1024, "requests": 6,
        "prediction": "auto", "timeout_s": 600, "fresh_prefix": True,
    }  # fmt: skip
    assert "Each prediction is the text before the edit" in " ".join(found["notes"])
    for words in ("speed-up", "prediction", "TTFT", "identical", "At 4 at a time: predictions"):
        assert words in found["printed"]


def test_the_modes_of_a_round_follow_each_other_in_changing_order() -> None:
    order = [(turn.round, turn.concurrency, turn.mode) for turn in turns(("a", "b", "c"), (1, 8), 3)]
    assert len(set(order)) == len(order) == 18
    assert [mode for number, streams, mode in order if streams == 1] == list("abcbcacab")
    assert [mode for number, streams, mode in order if streams == 8] == list("bcacababc")
    assert [streams for _, streams, _ in order] == [1, 1, 1, 8, 8, 8] * 3


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
    xargs = [body["vllm_xargs"] for body in fake.bodies if "vllm_xargs" in body]
    assert xargs[-6:] == [asked[0]] * 3 + [asked[1]] * 3
    assert len(other.bodies) > 3
    assert not any("vllm_xargs" in body for body in other.bodies)


#: What the server does, options; then of the run with predictions, and words that are printed.
ROUNDS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "a difference": (
        {"twist": "W5"}, "", {"identical": "no", "different": 4}, "differ from the first run: prediction at 2 (4)"
    ),
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
    assert words in found["printed"]
    plan = re.search(
        r"(\d+) requests, .* about (\d+) tokens, .* in the first run: at most \d+ s", found["told"]
    )
    assert plan is not None
    assert 30 <= int(plan[2]) / int(plan[1]) <= 32
    # Each request is prefilled anew, where the server knows how.
    salts = {body.get("cache_salt") for body in fake.bodies} - {None}
    assert len(salts) == (len(fake.bodies) if fake.vllm else 0)


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


GOOD = {"id": "a", "instruction": "rename x", "before": "x = 1\n", "after": "y = 1\n"}


def test_pairs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(gzip.compress(line() + b"\n\n" + line(after=None, id=7, more=1)))
    first, second = read_pairs(path)
    assert (first.id, first.instruction, first.before, first.after) == tuple(GOOD.values())
    assert (second.id, second.after) == ("7", None)
    assert first.messages()[0]["content"].startswith("rename x\n\n")
    assert first.messages()[0]["content"].endswith("\n\nx = 1\n")
    path.write_text(json.dumps({**GOOD, "prompt": "Now!"}))
    assert read_pairs(path)[0].messages() == [{"role": "user", "content": "Now!"}]


def line(**changed: object) -> bytes:
    """A good line, with these fields; None: without the field."""
    return json.dumps(
        {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    ).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "line 3: expected one JSON object"),
        (line(id=None), "line 3: id: "),
        (line(before=" \n"), "line 3: before: "),
        (b'{"id": 3, "prediction_text": "x", "output_text": "y"}', "line 3: instruction: "),
        (b'{"id": 3, "prediction_text": [1], "prompt_text": "y"}', "line 3: before: "),
        (b'{"id": 3, "predictions_text": ["x", ""], "prompt_text": "y"}', "line 3: alternatives[0]: "),
        (line(), "line 3: \"id\": 'a' is also that of line 1"),
        (None, "expected at least one pair, found none"),
    ],
)
def test_a_bad_line_or_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"" if content is None else line() + b"\n\n" + content)
    with pytest.raises(EditError) as error:
        read_pairs(path)
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_the_shipped_pairs_are_edits() -> None:
    pairs = shipped_pairs()
    assert len({pair.id for pair in pairs}) == len(pairs) >= 8
    for pair in pairs:
        assert pair.after is not None
        assert pair.after != pair.before
        assert resemblance(pair.after, pair.before) > 0.6, pair.id


LINES = [f"line {i} of the answer\n" for i in range(40)]
OUTPUT = "".join(LINES)


def test_the_diff_of_the_pair_is_undone_in_the_output() -> None:
    after = [f"{i}\n" for i in range(20)]
    before = [*after[:5], "five\n", *after[6:15], *after[16:]]
    changed = edited(OUTPUT, Pair("a", "i", "".join(before), "".join(after))).splitlines(keepends=True)
    assert changed == [*LINES[:10], "five\n", *LINES[11:30], *LINES[31:]]


def test_an_output_that_the_model_really_edited_is_predicted_by_the_text_before() -> None:
    pair = shipped_pairs()[0]
    assert pair.after is not None
    found = make_predictions([pair, pair], [pair.after, OUTPUT], "auto")
    assert found.sources == ["before", "output"]
    assert found.texts["prediction"][0] == pair.before
    assert "1 of 2 predictions are the text before the edit. 1 are the output" in found.sentence()
    assert make_predictions([pair], [OUTPUT], "before").sources == ["before"]
    assert make_predictions([pair], [pair.after], "output").sources == ["output"]


@pytest.mark.parametrize(
    "fields",
    [
        {"before": "x", "alternatives": ["y", "z"], "prompt": "Now!"},
        {"predictions_text": ["x", "y", "z"], "prompt_text": "Now!"},
    ],
)
def test_alternatives_go_with_the_text_before_the_edit(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"id": "a", **fields}))
    pairs = read_pairs(tmp_path / "pairs.jsonl")
    sent = {"type": "content", "content": "x", "alternatives": ("y", "z")}
    assert make_predictions(pairs, [OUTPUT], "before").texts["prediction"] == [sent]
    assert isinstance(make_predictions(pairs, [OUTPUT], "output").texts["prediction"][0], str)


@pytest.mark.parametrize(
    ("accepted", "requests", "pieces", "steps"),
    [(80, 2, 0, 40), (80, 2, 41, 41), (120, 2, 0, 32)],  # the last ones accept beyond the end
)
def test_steps_with_drafts_of_vllm_are_the_largest_of_three_bounds(
    accepted: int, requests: int, pieces: int, steps: int
) -> None:
    numbers = {"generated": 120, "vllm_drafts": 30, "vllm_accepted": accepted, "requests": requests}
    assert Counts(Counter(numbers)).steps(pieces) == steps
    assert [*map(Counts.read, ("", "<html>", "a 1\n", "vllm:generation_tokens_total x\n"))] == [None] * 4


class Started:
    """Starts fake servers where vLLM would be started, and knows their children."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.commands: list[list[str]] = []
        self.processes = folder / "children"
        command_line = servers.command_line

        def fake(*arguments: Any, **more: Any) -> list[str]:
            command = command_line(*arguments, **more)
            self.commands.append(command)
            after = command.index("vllm.entrypoints.openai.api_server")
            flags = [word for word in command[after + 1 :] if word != "--enforce-eager"]
            return [sys.executable, "-I", fake_openai.__file__, *flags]

        patch.setattr(servers, "command_line", fake)
        patch.setattr(servers, "has_gpu", lambda: False)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("FAKE_CHILDREN", str(self.processes))

    def children(self) -> list[int]:
        return [*map(int, self.processes.read_text().split())] if self.processes.exists() else []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, tmp_path)


def serve(dataset: Path, *arguments: object) -> tuple[Any, dict[str, Any]]:
    out = dataset.with_suffix(".json")
    flags = ("--serve", "tiny", dataset, "--json", out, "--concurrency", 2, "--rounds", 1)
    done = command("bench", *flags, *arguments)
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize("together", [False, True])
def test_three_servers(
    dataset: Path, started: Started, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, or at once and such that do not end when they are asked to."""
    options = ["--seed", "3", *(["--stubborn", "1"] if together else [])]
    if together:
        monkeypatch.setattr(servers, "STOP_GRACE_S", 0.2)
    done, found = serve(dataset, "-k", 9, "--vllm-args", " ".join(options), *["--together"] * together)
    assert done.exit_code == 0, done.output
    assert found["serve"] == {"num_draft_tokens": 9, "arguments": options, "together": together}
    modes = [["none"], ["ngram"], ["prediction", "unrelated"]]
    assert [server["modes"] for server in found["servers"]] == modes
    assert {mode for mode, _ in by_key(found)} == set(MODES) - set(ASKED_FOR)
    assert by_key(found)["prediction", 2]["steps"] < by_key(found)["ngram", 2]["steps"] < 93
    assert ("one after another" in " ".join(found["notes"])) == (not together)
    configs = [
        json.loads(command[command.index("--speculative-config") + 1])
        for command in started.commands
        if "--speculative-config" in command
    ]
    assert [config["method"] for config in configs] == ["ngram", "custom_class"]
    assert [config["num_speculative_tokens"] for config in configs] == [9, 9]
    assert all(command[-len(options) :] == options for command in started.commands)
    children = started.children()
    assert len(children) == 3
    assert wait_until(lambda: not any(map(alive, children)))
    assert not list(dataset.parent.glob("gpu-align-bench-*"))


def test_ctrl_c_leaves_no_process_and_writes_what_it_has(dataset: Path, started: Started) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(started.children()) == 2)  # the second server is being started
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done, found = serve(dataset)
    thread.join()
    assert done.exit_code == 130, done.output
    assert "no process is left" in done.stderr
    assert found["complete"] is False
    assert list(by_key(found)) == [("none", 2)]
    assert not list(dataset.parent.glob("gpu-align-bench-*"))
    assert wait_until(lambda: not any(map(alive, started.children())))


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(dataset: Path, started: Started) -> None:
    done, found = serve(dataset, "--vllm-args", "--port x")
    assert done.exit_code == 1
    first, *log = done.stderr.splitlines()[1:]
    assert first.startswith("error: the server ended with exit code 1 before it was ready; the end of ")
    assert log[-1] == "ValueError: invalid literal for int() with base 10: 'x'"
    assert len(log) <= 25
    assert len(list(dataset.parent.glob("gpu-align-bench-*"))) == 1  # the message names the log
    assert found["runs"] == []
    assert wait_until(lambda: not any(map(alive, started.children())))
