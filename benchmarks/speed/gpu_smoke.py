"""A few steps of a small batch on the GPU: what compute-sanitizer and sync debugging watch.

``python -m benchmarks.speed.gpu_smoke [--sync-error]``. Drafts are compared with the reference; with
``--sync-error`` PyTorch raises where an eager step waits for the device, and a captured one gives the same bits.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.speed.workload import Steps, make_texts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.gpu_smoke", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--sync-error", action="store_true", help="a step that waits for the device is an error"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU")
        return 1
    # 1,000 is a multiple of 8 and of no block: the last of every block is masked.
    steps = Steps(make_texts(5, 1000, "mixed"), "cuda")
    for _ in range(3):
        steps.advance()
        steps.check()
    if options.sync_error:
        eager = [t.clone() for t in steps.propose()]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.propose()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # Not around the capture itself, which waits for the device before it begins.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft = steps.propose()
        graph.replay()
        torch.cuda.synchronize()
        for name, before, after in zip(draft._fields, eager, draft, strict=True):
            if not torch.equal(before, after):
                print(f"{name}: the graph gave something else than the eager step")
                return 1
    print(f"{torch.cuda.get_device_name()}: drafts are the reference's")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
