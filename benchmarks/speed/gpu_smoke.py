"""A few steps of a small batch: what compute-sanitizer watches. ``python -m benchmarks.speed.gpu_smoke [--cpu]``.

Drafts are compared with the reference. Needs a GPU, or `--cpu`.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.speed.workload import Steps, make_texts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.gpu_smoke", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--cpu", action="store_true", help="the reference, without a GPU")
    options = parser.parse_args()
    if not (options.cpu or torch.cuda.is_available()):
        print("no GPU")
        return 1
    # 1,000 is a multiple of 8 and of no block: the last of every block is masked.
    steps = Steps(make_texts(5, 1000, "mixed"), "cpu" if options.cpu else "cuda")
    for _ in range(3):
        steps.advance()
        steps.check()
    print("drafts are the reference's")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
