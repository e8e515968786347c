"""`python -m vllm_integration.demo`: the model comes from `--model` or from the variable MODEL."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_integration.demo import run_demo


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the demo, return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_integration.demo",
        description="Predicted outputs in a real vLLM server: one edit, four predictions, one table and one page.",
    )
    parser.add_argument(
        "--model",
        default=os.environ.get("MODEL") or None,
        help="a Hugging Face name or folder (default: $MODEL, else a tiny model that is made here)",
    )
    parser.add_argument("--out-dir", type=Path, default=Path("demo_out"), help="default: %(default)s")
    parser.add_argument(
        "--no-ngram", action="store_true", help="leave out the second server, with vLLM's n-gram drafter"
    )
    options = parser.parse_args(argv)
    return run_demo(options.model, options.out_dir, not options.no_ngram)


if __name__ == "__main__":
    sys.exit(main())
