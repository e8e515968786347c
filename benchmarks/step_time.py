"""Time of one drafting step: ``python -m benchmarks.step_time [--json OUT.json]``.

On a GPU: the median of a CUDA graph's replays (device time) and of eager calls as the host sees them (launch
cost), for batches and prediction lengths as in serving. Without one: the reference on the CPU, small sizes only,
and the table says so.

aligned: every request follows its prediction. lost: every request has just written a token that its prediction
does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_align

NUM_DRAFT_TOKENS = 16
#: Tokens that each step adds to every request: what an accepted draft of this length brings.
STEP_TOKENS = 8


def make_step(
    batch: int, num_text: int, state: str, device: str
) -> tuple[gpu_align.Drafter, tuple[Any, ...]]:
    """A drafter with a full batch in the given state, and the arguments of `propose`."""
    num_context = num_text + 64
    rng = np.random.default_rng(batch * 31 + num_text)
    drafter = gpu_align.Drafter(
        max_slots=batch, max_context_len=num_context, max_prediction_len=num_text,
        num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=50_000, device=device,
    )  # fmt: skip
    token_ids = torch.zeros((batch, num_context), dtype=torch.int32)
    done = num_text // 2
    for slot in range(batch):
        # Source code repeats itself: half of the tokens are drawn from a few.
        text = np.where(
            rng.random(num_text) < 0.5, rng.integers(0, 50, num_text), rng.integers(50, 40_000, num_text)
        )
        drafter.add(slot, text, 0)
        token_ids[slot, :done] = torch.from_numpy(text[:done].astype(np.int32))
        if state == "lost":
            token_ids[slot, done - 1] = 45_000
    args = (
        token_ids.to(device),
        torch.full((batch,), done, dtype=torch.int32, device=device),
        torch.arange(batch, device=device),
        torch.ones(batch, dtype=torch.int32, device=device),
    )
    drafter.propose(*args)  # compiles, and folds the first half in
    return drafter, args


def rewind(drafter: gpu_align.Drafter) -> None:
    """Let the next call fold the last `STEP_TOKENS` tokens again, as after a step that brought them."""
    drafter._row_len -= STEP_TOKENS


def time_graph(drafter: gpu_align.Drafter, args: tuple[Any, ...], repeats: int = 200) -> list[float]:
    """Device microseconds of a captured step that folds `STEP_TOKENS` new tokens, once each repeat."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            rewind(drafter)
            drafter.propose(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafter.propose(*args)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rewind(drafter)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[repeats // 10 :]


def time_host(call: Callable[[], object], repeats: int) -> list[float]:
    """Host microseconds of a call, the device left to run behind."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def measure(device: str, batches: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for num_text in lengths:
        for batch in batches:
            for state in ("aligned", "lost"):
                drafter, args = make_step(batch, num_text, state, device)
                row = {"batch": batch, "prediction_len": num_text, "state": state, "device": device}
                times = time_graph(drafter, args) if device == "cuda" else []
                if times:
                    quartiles = statistics.quantiles(times, n=4)
                    row |= {"graph_us": statistics.median(times), "graph_iqr_us": quartiles[2] - quartiles[0]}

                def step(drafter: gpu_align.Drafter = drafter, args: tuple[Any, ...] = args) -> None:
                    rewind(drafter)
                    drafter.propose(*args)

                step()
                row["host_us"] = statistics.median(time_host(step, 30 if device == "cuda" else 5))
                rows.append(row)
                del drafter, args
    return rows


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    import triton

    found = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu_align": gpu_align.__version__,
        "cpu": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args()
    if torch.cuda.is_available():
        rows = measure("cuda", [1, 64, 256, 1024], [1024, 4096, 32768])
    else:
        print("SKIPPED: GPU times (no GPU). The reference on the CPU, host microseconds:")
        rows = measure("cpu", [1, 16], [1024, 4096])
    print(f"{'batch':>6} {'prediction':>10} {'state':>8} {'graph µs':>9} {'± IQR':>7} {'host µs':>9}")
    for r in rows:
        graph = f"{r['graph_us']:9.1f} {r['graph_iqr_us']:7.1f}" if "graph_us" in r else f"{'-':>9} {'-':>7}"
        print(f"{r['batch']:6} {r['prediction_len']:10} {r['state']:>8} {graph} {r['host_us']:9.1f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
