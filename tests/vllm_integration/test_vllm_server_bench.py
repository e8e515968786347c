"""`gpu-align bench` against a real server: its figures are those of `/metrics`, and all answers are the same."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner
from vllm_harness import K, Server

from gpu_align.bench.metrics import Counts, parse
from gpu_align.cli.app import app

pytestmark = pytest.mark.vllm

MAX_TOKENS = 40


def counts(server: Server) -> Counts:
    return parse(httpx.get(f"{server.url}/metrics").text)


def test_the_figures_of_a_real_server(server: Server, tmp_path: Path) -> None:
    texts = [[f"w{(start + 7 * i) % 400}" for i in range(60)] for start in (3, 50)]
    pairs = [
        {
            "id": n,
            "instruction": "w9",
            "before": " ".join(words),
            "after": " ".join([*words[:9], "w1", *words[10:]]),
        }
        for n, words in enumerate(texts)
    ]
    data, out, page = (tmp_path / name for name in ("pairs.jsonl", "bench.json", "bench.html"))
    data.write_text("\n".join(map(json.dumps, pairs)))
    before = counts(server)
    flags = [
        "--base-url",
        f"{server.url}/v1",
        "--model",
        "tiny",
        "--dataset",
        data,
        "--json",
        out,
        "--html",
        page,
    ]
    flags += ["--concurrency", "1,4", "--rounds", 1, "--max-tokens", MAX_TOKENS]
    done = CliRunner().invoke(app, ["bench", *map(str, flags)], env={"OPENAI_API_KEY": None})
    assert done.exit_code == 0, done.output
    counted = counts(server).since(before)

    found = json.loads(out.read_text())
    runs = {(run["mode"], run["concurrency"]): run for run in found["runs"]}
    assert [run["requests"] for run in found["runs"]] == [2, 2, 2, 8, 8, 8]
    for (mode, _), run in runs.items():
        assert run["output_tokens"] == run["requests"] * MAX_TOKENS  # this model writes no end token
        assert run["steps"] + run["accepted"] == run["output_tokens"]
        assert run["identical"] in ("yes", "near-tie"), mode
        assert (run["accepted"], run["rejected"]) == (0, 0) or mode != "none"
    for streams in (1, 4):
        # The prediction is the first run's answer with an edit.
        assert runs["prediction", streams]["accepted"] > runs["prediction", streams]["output_tokens"] / 2
        assert runs["prediction", streams]["steps"] < runs["unrelated", streams]["steps"]
    assert found["predictions"] == {"pairs": 2, "before": 0, "output": 2}
    assert not any("also served others" in note for note in found["notes"])
    # The rest of what the server counted are the first run and the warm-ups.
    drafted = [sum(run[verdict] for run in found["runs"]) for verdict in ("accepted", "rejected")]
    assert counted.accepted >= drafted[0] > 0
    assert drafted[1] <= counted.rejected <= drafted[1] + 16 * K * MAX_TOKENS
    warm_up = 3 * 8 * min(32, MAX_TOKENS)
    assert counted.generated == sum(run["output_tokens"] for run in found["runs"]) + 2 * MAX_TOKENS + warm_up
    assert "<figure>" in page.read_text()
