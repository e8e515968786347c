"""Usage and metrics of a running server are what its engine verified, token for token."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner
from usage_harness import (
    DETAILS,
    Answer,
    ask_all,
    chat,
    moved,
    question,
    read_logs,
    replay,
    scrape,
    variants,
)
from vllm_harness import K, Server

from gpu_align.tools.cli import app

pytestmark = pytest.mark.vllm

N = 24
SEEDS = range(1000, 1030)


@pytest.fixture(scope="module")
def plain(server: Server) -> dict[int, str]:
    """The answers without a prediction."""
    answers = ask_all(server.url, [chat(seed, N) for seed in SEEDS])
    for answer in answers:
        assert not (answer.usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
    return {seed: answer.texts[0] for seed, answer in zip(SEEDS, answers, strict=True)}


def bodies_for(seed: int, text: str) -> list[dict[str, Any]]:
    """Every prediction, streamed and not; ends by a stop string, in all modes."""
    hints = variants(text, seed)
    bodies = [chat(seed, N, hint) for hint in hints.values()]
    bodies += [chat(seed, N, hints[name], stream=True) for name in ("verbatim", "edited")]
    bodies.append(chat(seed, N, hints["long"], stream=True, stream_options={"continuous_usage_stats": True}))
    stop = text.split()[-4]
    bodies += [chat(seed, N, hints[name], stop=stop) for name in ("verbatim", "edited")]
    bodies.append(chat(seed, N, hints["long"], stop=[stop], stream=True))
    return bodies


def settled_logs(server: Server, answers: list[Answer]) -> dict[str, list[dict[str, Any]]]:
    """The logs of all; they are written with the engine's next step."""
    deadline = time.monotonic() + 60
    want = sum(len(answer.texts) for answer in answers)
    while True:
        logs = read_logs(server.logs, [answer.id for answer in answers])
        if sum(map(len, logs.values())) >= want or time.monotonic() > deadline:
            return logs
        time.sleep(0.5)
        ask_all(server.url, [chat(0, 2)])


@pytest.fixture(scope="module")
def traffic(
    server: Server, plain: dict[int, str]
) -> tuple[list[Answer], dict[str, float], dict[str, list[dict[str, Any]]]]:
    """390 requests with predictions, what the metrics did meanwhile, and the step logs."""
    bodies = [body for seed in SEEDS for body in bodies_for(seed, plain[seed])]
    several = [
        chat(seed, N, variants(plain[seed], seed)["edited"], n=2 + seed % 2, stream=seed % 3 == 0)
        for seed in SEEDS
    ]
    before = scrape(server.url)
    answers = ask_all(server.url, bodies) + ask_all(server.url, several)
    after = scrape(server.url)
    assert len(answers) >= 300
    return answers, moved(before, after), settled_logs(server, answers)


def seed_of(answer: Answer) -> int:
    return next(seed for seed in SEEDS if answer.body["messages"] == chat(seed, N)["messages"])


def test_the_text_is_the_same_with_and_without_a_prediction(traffic: Any, plain: dict[int, str]) -> None:
    for answer in traffic[0]:
        if "n" in answer.body:  # drawn at a temperature
            continue
        expected = plain[seed_of(answer)]
        if "stop" in answer.body:
            stop = answer.body["stop"]
            expected = expected[: expected.index(stop if isinstance(stop, str) else stop[0])]
        assert answer.texts == [expected], answer.body


def test_usage_is_a_replay_of_the_step_log(traffic: Any) -> None:
    answers, _, logs = traffic
    sources: Counter[str] = Counter()
    for answer in answers:
        choices = answer.body.get("n", 1)
        assert len(logs[answer.id]) == choices, answer.id
        tokens = answer.usage["completion_tokens"] // choices  # no choice ends early
        replays = [replay(log["steps"], tokens) for log in logs[answer.id]]
        accepted = sum(r.prediction[0] for r in replays)
        rejected = sum(r.prediction[1] for r in replays)
        assert answer.accepted_rejected == (accepted, rejected), answer.body
        assert accepted + rejected <= sum(r.verified for r in replays)
        assert accepted <= answer.usage["completion_tokens"]
        assert (
            answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]
        )
        for r in replays:
            sources.update({name: sum(counts) for name, counts in r.by_source.items()})
    # All of this would hold if nothing were counted.
    assert sources["prediction"] > 5000
    assert sources["context"] > 0
    assert sum(answer.accepted_rejected[1] for answer in answers) > 500


def test_a_stream_tells_what_a_response_tells(traffic: Any) -> None:
    by_hint: dict[Any, list[Answer]] = {}
    for answer in traffic[0]:
        body = answer.body
        if "n" not in body and "stop" not in body:
            by_hint.setdefault((seed_of(answer), body["prediction"]["content"]), []).append(answer)
    pairs = [group for group in by_hint.values() if len(group) == 2]
    assert len(pairs) == 3 * len(SEEDS)
    for one, other in pairs:
        assert one.usage["completion_tokens_details"] == other.usage["completion_tokens_details"]
        assert one.usage["completion_tokens"] == other.usage["completion_tokens"]


def test_metrics_moved_by_exactly_the_summed_usage(traffic: Any) -> None:
    answers, deltas, logs = traffic
    accepted = sum(answer.accepted_rejected[0] for answer in answers)
    rejected = sum(answer.accepted_rejected[1] for answer in answers)
    assert deltas['gpu_align_prediction_tokens_total{verdict="accepted"}'] == accepted
    assert deltas['gpu_align_prediction_tokens_total{verdict="rejected"}'] == rejected
    assert deltas["gpu_align_requests_total"] == len(answers)
    assert deltas["gpu_align_prediction_length_tokens_count"] == len(answers)
    replays = [
        replay(log["steps"], answer.usage["completion_tokens"] // answer.body.get("n", 1))
        for answer in answers
        for log in logs[answer.id]
    ]
    for source in ("prediction", "context"):
        for index, verdict in enumerate(("accepted", "rejected")):
            sample = f'gpu_align_draft_tokens_total{{source="{source}",verdict="{verdict}"}}'
            assert deltas.get(sample, 0) == sum(r.by_source.get(source, (0, 0))[index] for r in replays)
    assert deltas["gpu_align_accepted_length_tokens_count"] == sum(len(r.lengths) for r in replays)
    assert deltas["gpu_align_accepted_length_tokens_sum"] == sum(sum(r.lengths) for r in replays)
    verifying = sum(1 for r in replays if r.by_source.get("prediction"))
    assert deltas["gpu_align_acceptance_ratio_count"] == verifying
    lost = sum(value for name, value in deltas.items() if name.startswith("gpu_align_steps_lost_total"))
    drafts = sum(value for name, value in deltas.items() if name.startswith("gpu_align_drafts_total"))
    assert lost + drafts + len(replays) == deltas["gpu_align_steps_total"]
    assert deltas["gpu_align_realignments_total"] > 0


def test_the_log_tells_texts_cursors_and_why(traffic: Any) -> None:
    answers, _, logs = traffic
    candidates = 0
    for answer in answers:
        if "n" in answer.body or "stop" in answer.body:
            continue
        (log,) = logs[answer.id]
        steps = log["steps"]
        assert "".join(s["accepted_text"] + s["own_text"] for s in steps).strip() == answer.texts[0].strip()
        assert [s["cursor_before"] for s in steps[1:]] == [s["cursor_after"] for s in steps[:-1]]
        assert all(s["cursor_after"] <= log["prediction_tokens"] for s in steps)
        for s in steps:
            assert (s["candidate"] is None) == (not s["proposed"])
            if s["candidate"]:
                candidates += 1
                assert s["candidate"]["source"] == s["source"]
                words = [f"w{token - 4}" if token > 3 else "<assistant>" for token in s["proposed"]]
                assert s["proposed_text"].split() == words
    assert candidates > 500


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["w5 w6 w7", "w8 w9"], "max_tokens": N},
    "/v1/responses": {"input": question(7), "max_output_tokens": N},
    "/v1/chat/completions/batch": {"messages": [question(7), question(8)], "max_tokens": N},
}


def post(server: Server, path: str, **more: Any) -> tuple[str, list[str], dict[str, Any], dict[str, Any]]:
    """id, texts, usage and its details of a greedy request to an endpoint, streamed where `more` says so."""
    body = {"model": "tiny", "temperature": 0, **ENDPOINTS[path], **more}
    if path == "/v1/completions" and body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    response = httpx.post(server.url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        if "output" in answer:
            texts = [answer["output"][0]["content"][0]["text"]]
        else:
            texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
        req_id, usage = answer["id"], answer["usage"]
    else:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        if path == "/v1/responses":
            texts = ["".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")]
            final = events[-1]["response"]
            assert texts == [final["output"][0]["content"][0]["text"]]
        else:
            texts = ["", ""]
            for choice in (choice for event in events for choice in event["choices"]):
                texts[choice["index"]] += choice["text"]
            final = events[-1]
        req_id, usage = final["id"], final["usage"]
    details = usage.get("output_tokens_details", usage.get("completion_tokens_details")) or {}
    return req_id, texts, usage, details


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_endpoint_tells_the_same(server: Server, path: str) -> None:
    """The text is the one without a prediction, the usage a replay of the step logs, streamed or not."""
    _, plain, _, details = post(server, path)
    assert "accepted_prediction_tokens" not in details
    for content in variants(plain[0], 7).values():
        found = []
        for stream in (False, True)[: 1 if path.endswith("batch") else 2]:  # batches have no streams
            hint = {"type": "content", "content": content}
            req_id, texts, usage, details = post(server, path, prediction=hint, stream=stream)
            assert texts == plain
            ask_all(server.url, [chat(0, 2)])  # one more step writes the logs
            logs = sorted(server.logs.glob(f"*{req_id}*"))
            assert len(logs) == len(plain)
            replays = [replay(yaml.safe_load(log.read_text())["steps"], N).prediction for log in logs]
            worth = tuple(details[name] for name in DETAILS)
            assert worth == tuple(map(sum, zip(*replays, strict=True)))
            written = usage.get("output_tokens", usage.get("completion_tokens"))
            assert written == N * len(plain)
            found.append((worth, written, usage["total_tokens"]))
        assert len(set(found)) == 1
        if content == plain[0]:
            assert found[0][0][0] >= N - 3  # three steps, and each adds a token of its own


def test_what_is_refused_or_cut_is_counted(server: Server) -> None:
    before = scrape(server.url)
    body = {**chat(7, 4), "prediction": {"type": "content", "content": 7}}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 400
    ask_all(server.url, [chat(7, 4, "w1 " * 600)])  # the context is 512 tokens
    name = "gpu_align_predictions_refused_total"
    refused = {sample: by for sample, by in moved(before, scrape(server.url)).items() if name in sample}
    assert refused == {
        f'{name}{{action="refused",reason="malformed"}}': 1,
        f'{name}{{action="truncated",reason="tokens"}}': 1,
    }


def test_the_server_says_what_it_is_and_the_status_counts_as_the_metrics_do(server: Server) -> None:
    """After the other tests' requests; none is on its way."""
    (line,) = [line for line in server.output.read_text().splitlines() if " drafts on vLLM " in line]
    endpoints = ["chat/completions", "chat/completions/batch", "completions", "responses", "messages"]
    assert " INFO " in line
    assert f"V1 model runner, K={K}; `prediction` on " in line
    assert "".join(f"/v1/{name}, " for name in endpoints)[:-2] + "; recipes: off; no response memory" in line
    found = httpx.get(f"{server.url}/gpu_align/status", timeout=60).json()
    assert (found["on"], found["runner"], found["num_draft_tokens"]) == (True, "V1", K)
    assert found["endpoints"] == [f"/v1/{name}" for name in endpoints]
    assert found["settings"]["GPU_ALIGN_DEBUG_LIVE"] is True
    samples = scrape(server.url)
    (info,) = [name for name in samples if name.startswith("gpu_align_info{")]
    assert samples[info] == 1
    for part in (f'vllm="{found["vllm"]}"', f'version="{found["version"]}"', 'runner="V1"', 'recipes=""'):
        assert part in info
    counters = found["counters"]
    assert counters["requests"] == samples["gpu_align_requests_total"]
    assert counters["steps"] == samples["gpu_align_steps_total"]
    for verdict, count in counters["prediction_tokens"].items():
        assert count == samples[f'gpu_align_prediction_tokens_total{{verdict="{verdict}"}}']
    for source, verdicts in counters["draft_tokens"].items():
        for verdict, count in verdicts.items():
            name = f'gpu_align_draft_tokens_total{{source="{source}",verdict="{verdict}"}}'
            assert count == samples[name]


def test_a_line_for_each_request_has_the_counts_of_its_usage(server: Server, plain: dict[int, str]) -> None:
    seed = SEEDS[0]
    (answer,) = ask_all(server.url, [chat(seed, N, variants(plain[seed], seed)["edited"])])
    accepted, rejected = answer.accepted_rejected
    (log,) = settled_logs(server, [answer])[answer.id]
    lines = [
        line for line in server.output.read_text().splitlines() if f"gpu_align: request {answer.id}-" in line
    ]
    (line,) = lines
    words = f"ended: {N} tokens in {log['usage']['steps']} steps, "
    assert words in line
    assert f"; prediction of {log['prediction_tokens']} tokens; draft tokens accepted of verified: " in line
    assert f"prediction {accepted} of {accepted + rejected}" in line


def test_a_real_log_has_its_lines(traffic: Any) -> None:
    """The tiny model's words have no newlines: one line, which is not complete."""
    answers, _, logs = traffic
    checked = 0
    for answer in answers[:50]:
        for log in logs[answer.id]:
            (line,) = log["prediction_lines"]
            assert len(line["tokens"]) == log["prediction_tokens"]
            if "n" not in answer.body and "stop" not in answer.body:
                checked += 1
                written = [token for step in log["steps"] for token in step["new"]]
                assert log["steps"][-1]["prefix"]["tokens"] == written
                assert log["steps"][-1]["prefix"]["text"].strip() == answer.texts[0].strip()
            assert all(step["new_lines"] == [] for step in log["steps"])
            assert "live" not in log
    assert checked > 20


def test_a_real_log_becomes_a_page(server: Server, traffic: Any, tmp_path: Path) -> None:
    answer = traffic[0][1]
    (file,) = server.logs.glob(f"{answer.id}-*.yaml")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(file), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert answer.id in result.output
    shown = re.findall(r'<pre class="tokens">\n(.*?)</pre>', page.read_text(), re.DOTALL)[0]
    assert re.sub(r"<[^>]*>", "", shown).strip() == answer.texts[0].strip()


def test_nothing_was_lost_on_the_way(server: Server, traffic: Any) -> None:
    log = server.output.read_text()
    assert "gpu_align is off" not in log
    assert "gpu_align counts no usage" not in log
    assert "gpu_align did not count" not in log
