"""Time of one drafting step: ``python -m benchmarks.speed.step_time [--json OUT.json]``.

On a GPU: the median of a CUDA graph's replays (device time) and of eager calls as the host sees them (launch
cost), for batches and prediction lengths as in serving. Without one: the reference on the CPU, small sizes only,
and the table says so. Needs nothing but the library. Correctness first: a size whose drafts differ from the
reference is reported as wrong and not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.workload import STATES, Steps, machine, make_texts, spread, time_graph


def time_host(steps: Steps, repeats: int) -> list[float]:
    """Host microseconds of an eager call, the device left to run behind."""
    times = []
    for _ in range(repeats):
        steps.advance()
        start = time.perf_counter_ns()
        steps.propose()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def measure(device: str, batch: int, num_text: int, state: str) -> dict[str, Any]:
    """One row of the table; ``"wrong"`` in place of times where the drafts are not the reference's."""
    row: dict[str, Any] = {"batch": batch, "prediction_len": num_text, "state": state, "device": device}
    steps = Steps(make_texts(batch, num_text, state), device)
    steps.advance()
    try:
        steps.check()
    except AssertionError as error:
        return row | {"wrong": str(error)}
    if device == "cuda":
        times = spread(time_graph(steps))
        row |= {"graph_us": times["median"], "graph_iqr_us": times["iqr"]}
    steps.advance()
    steps.propose()
    row["host_us"] = statistics.median(time_host(steps, 30 if device == "cuda" else 5))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # typer may not be installed here
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    json_path = parser.parse_args().json
    gpu = torch.cuda.is_available()
    if not gpu:
        print("SKIPPED: GPU times (no GPU). The reference on the CPU, host microseconds:")
    batches, lengths = ([1, 64, 256, 1024], [1024, 4096, 32_768]) if gpu else ([1, 16], [1024])
    print(f"{'batch':>6} {'prediction':>10} {'state':>8} {'graph µs':>9} {'± IQR':>7} {'host µs':>9}")
    rows = []
    for num_text in lengths:
        for batch in batches:
            for state in STATES:
                r = measure("cuda" if gpu else "cpu", batch, num_text, state)
                rows.append(r)
                head = f"{batch:6} {num_text:10} {state:>8}"
                if "wrong" in r:
                    print(f"{head} WRONG: {r['wrong']}", flush=True)
                    continue
                graph = f"{r['graph_us']:9.1f} {r['graph_iqr_us']:7.1f}" if gpu else f"{'-':>9} {'-':>7}"
                print(f"{head} {graph} {r['host_us']:9.1f}", flush=True)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
        print(f"wrote {json_path}")
    return int(any("wrong" in r for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
