"""`make demo`: predicted outputs in a real vLLM server, in one command.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from pathlib import Path

from .preflight import wrong_use

__all__ = ["run_demo", "wrong_use"]


def run_demo(model: str | None = None, out_dir: Path = Path("demo_out"), ngram: bool = True) -> int:
    """Serve a model with the plugin, send one edit with different predictions, and compare steps and time.

    Args:
        model: a Hugging Face name or folder; None: a tiny model of our own, made on the first run and kept
            under `.cache/demo-model/` in the current folder.
        out_dir: gets `demo.html`, `demo.json` (the table), the servers' logs, and `steps/` (the engine's step
            log of every request with a prediction).
        ngram: also start a second server, with vLLM's own n-gram drafter.

    Returns:
        The exit code: 0 when every output is identical and, with the tiny model, the verbatim prediction
        needs at least 4 times fewer verification steps and less wall time than no prediction; 1 when not;
        2 when something is missing or the server does not run; 130 after Ctrl-C.
    """
    from .run import run

    return run(model, out_dir, ngram)
