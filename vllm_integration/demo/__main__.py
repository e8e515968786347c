"""`python -m vllm_integration.demo`: the model comes from `--model` or from the variable MODEL."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from . import run_demo, wrong_use


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that argparse puts before it."""
        self.exit(2, f"demo: {' '.join(message.split())}; --help lists the options\n")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the demo, return its exit code."""
    parser = _Parser(
        prog="python -m vllm_integration.demo",
        description="Predicted outputs in a real vLLM server: one edit, four predictions, one table and one page.",
    )
    model = os.environ.get("MODEL") or None
    told = "a Hugging Face name or folder (default: $MODEL, else a tiny model that is made here)"
    parser.add_argument("--model", default=model, help=told)
    parser.add_argument("--out-dir", default="demo_out", metavar="DIR", help="default: %(default)s")
    told = "leave out the second server, with vLLM's n-gram drafter"
    parser.add_argument("--no-ngram", action="store_true", help=told)
    options = parser.parse_args(argv)
    if "" in (options.model, options.out_dir):  # as a path it would stand for the current folder
        parser.error("expected no empty text; is a shell variable unset?")
    out_dir = Path(options.out_dir)
    if found := wrong_use(options.model, out_dir):
        print(f"demo: {found}", file=sys.stderr)
        return 2
    return run_demo(options.model, out_dir, not options.no_ngram)


if __name__ == "__main__":
    sys.exit(main())
